"""Rules that need q: boundary cases, what they refuse, and what they cost. Their laws are in test_sampling_law.py."""

import pytest
import torch

from bloombee_spec.sampling.comparison import (
    accepted_prefix,
    after_rejection,
    block_verification,
    draw,
    leviathan_chain,
    specinfer_siblings,
    truncate_top_k,
)
from bloombee_spec.sampling.profiles import PROFILES, Drafts, Verified, WireBytes

CHAIN_RULES = pytest.mark.parametrize("rule", [leviathan_chain, block_verification], ids=lambda rule: rule.__name__)


def _rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _rows(*rows: list[float]) -> torch.Tensor:
    """`[1, rows, vocab]`."""
    return torch.tensor([list(rows)], dtype=torch.float64)


@CHAIN_RULES
def test_drafts_from_the_target_itself_are_all_accepted(rule):
    p = torch.rand(500, 4, 7, generator=_rng(), dtype=torch.float64).softmax(-1)
    drafted = torch.stack([draw(p[:, i], _rng()) for i in range(3)], 1)
    assert rule(p, p[:, :3], drafted, _rng()).accepted.tolist() == [3] * 500


@CHAIN_RULES
def test_drafts_that_the_target_excludes_are_never_accepted(rule):
    p = _rows([0.0, 0.4, 0.6], [0.0, 0.5, 0.5], [1.0, 0.0, 0.0]).expand(500, -1, -1)
    q = _rows([0.5, 0.5, 0.0], [1.0, 0.0, 0.0]).expand(500, -1, -1)
    verdict = rule(p, q, torch.zeros(500, 2, dtype=torch.long), _rng())
    assert verdict.accepted.tolist() == [0] * 500
    assert set(verdict.token.tolist()) == {2}  # the only token of which p has more than q


def test_a_uniform_number_of_exactly_zero_accepts_nothing_impossible(monkeypatch):
    """The comparison is strict: u = 0 happens once in 2**53."""
    monkeypatch.setattr(torch, "rand", lambda *size, generator, dtype: torch.zeros(*size, dtype=dtype))
    p, q, drafted = _rows([0.0, 1.0], [0.0, 1.0]), _rows([0.5, 0.5]), torch.tensor([[0]])
    for rule in (leviathan_chain, block_verification):
        assert rule(p, q, drafted, _rng()).accepted.tolist() == [0]
    index, token = specinfer_siblings(p[:, 0], q[:, 0], drafted, _rng(), replacement=True)
    assert (index.tolist(), token.tolist()) == ([-1], [1])


@CHAIN_RULES
def test_what_follows_the_last_draft_comes_from_the_target(rule):
    p = _rows([1.0, 0.0], [0.0, 1.0])
    verdict = rule(p, _rows([1.0, 0.0]), torch.tensor([[0]]), _rng())
    assert (verdict.accepted.tolist(), verdict.token.tolist()) == ([1], [1])


@CHAIN_RULES
def test_a_draft_with_q_of_zero_is_refused(rule):
    with pytest.raises(ValueError, match="not drawn from this q"):
        rule(_rows([0.5, 0.5], [0.5, 0.5]), _rows([0.0, 1.0]), torch.tensor([[0]]), _rng())


def test_a_sibling_with_q_of_zero_is_refused():
    half, certain = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.0, 1.0]])
    with pytest.raises(ValueError, match="not drawn from this q"):
        specinfer_siblings(half, certain, torch.tensor([[0]]), _rng(), replacement=True)
    with pytest.raises(ValueError, match="not drawn from this q"):  # a repeated draw without replacement
        p = torch.tensor([[0.0, 0.0, 1.0]])
        specinfer_siblings(p, torch.full((1, 3), 1 / 3), torch.tensor([[0, 0]]), _rng(), replacement=False)


def test_the_split_rule_is_the_whole_rule():
    """DSSD: one number per draft at the verifier, the residual where q is; the same tokens as in one place."""
    rng = _rng()
    p = torch.randn(400, 4, 6, generator=rng, dtype=torch.float64).softmax(-1)
    q = torch.randn(400, 3, 6, generator=rng, dtype=torch.float64).softmax(-1)
    drafted = torch.stack([draw(q[:, i], rng) for i in range(3)], 1)
    whole = leviathan_chain(p, q, drafted, torch.Generator().manual_seed(7))
    rng = torch.Generator().manual_seed(7)
    accepted = accepted_prefix(p, q.gather(2, drafted.unsqueeze(2))[:, :, 0], drafted, rng)
    padded = torch.cat([q, torch.zeros(400, 1, 6, dtype=torch.float64)], 1)
    rows = torch.arange(400)
    token = after_rejection(p[rows, accepted], padded[rows, accepted], rng)
    assert torch.equal(accepted, whole.accepted) and torch.equal(token, whole.token)
    assert len(set(accepted.tolist())) == 4


def test_tokens_of_weight_zero_are_never_drawn():
    weights = torch.tensor([0.0, 1e-30, 0.0, 1.0, 0.0], dtype=torch.float64).expand(100_000, -1)
    assert set(draw(weights, _rng()).tolist()) <= {1, 3}


def test_sibling_order_and_index():
    p, q = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.4, 0.3, 0.3]])
    index, token = specinfer_siblings(p, q, torch.tensor([[0, 1, 2]]), _rng(), replacement=False)
    assert (index.tolist(), token.tolist()) == ([2], [2])
    index, token = specinfer_siblings(p, q, torch.tensor([[0, 1]]), _rng(), replacement=False)
    assert (index.tolist(), token.tolist()) == ([-1], [2])


def test_truncation_keeps_the_largest_and_renormalises():
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])
    torch.testing.assert_close(truncate_top_k(p, 2), torch.tensor([0.0, 0.0, 3 / 7, 4 / 7]))


VOCAB = 128_256  # ids of 3 bytes


@pytest.mark.parametrize(
    ("rule", "run", "expected"),
    [
        ("keyed", Verified(5, 2, VOCAB), WireBytes(15, 9)),
        ("leviathan", Verified(5, 5, VOCAB), WireBytes(25, 4)),
        ("leviathan", Verified(5, 2, VOCAB), WireBytes(25, 1 + 2 * VOCAB)),
        ("block", Verified(5, 2, VOCAB), WireBytes(5 * (3 + 2 * VOCAB), 4)),
        ("specinfer", Verified(8, 2, VOCAB, parents=3), WireBytes(24 + 6 * VOCAB, 9)),
        ("top_k_downlink", Verified(5, 2, VOCAB, top_k=64), WireBytes(15, 6 * 64 * 5)),
    ],
)
def test_bytes_per_verification(rule, run, expected):
    assert PROFILES[rule].bytes(run) == expected


@pytest.mark.parametrize(("vocab", "expected"), [(2, 1), (256, 1), (257, 2), (65_536, 2), (65_537, 3)])
def test_bytes_of_an_id(vocab, expected):
    assert Verified(1, 0, vocab).id_bytes == expected


def test_shared_noise_never_meets_a_p_over_q_test():
    for name, profile in PROFILES.items():
        for drafts in Drafts:
            if name == "keyed" or drafts is Drafts.SAMPLED:
                profile.check_drafts(drafts)
            else:
                with pytest.raises(ValueError, match="biased"):
                    profile.check_drafts(drafts)


def test_only_the_top_k_downlink_is_inexact():
    assert [name for name, profile in PROFILES.items() if not profile.exact] == ["top_k_downlink"]
