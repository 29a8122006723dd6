"""Negative controls: wrong acceptance rules, each of them shipped by somebody, must fail the check that the exact ones
pass.
"""

import pytest
import torch
from sampling_laws import (
    DRAFTER,
    DRAWS,
    MANY_DRAWS,
    NONE,
    TARGET,
    assert_law,
    assert_wrong_law,
    chain_round,
    draws_without_replacement,
    grow,
    joint_law,
    keyed_noise,
    most_likely,
    processed_scores,
    spec_of,
    target_distribution,
    tree_round,
)

from bloombee_spec.sampling.comparison import accepted_prefix, block_verification, draw, leviathan_chain
from bloombee_spec.sampling.processors import ProcessorStack
from bloombee_spec.sampling.rule import race


def _argmax(row, rng):
    return row.argmax(-1)


def _target() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores and distribution of the target, distribution of the drafter."""
    spec = spec_of("plain")
    scores = processed_scores(TARGET, ProcessorStack.from_spec(spec))
    return scores, target_distribution(TARGET, spec), torch.softmax(DRAFTER.double(), -1)


def _argmax(row, rng):
    return row.argmax(-1)


@pytest.mark.parametrize("rule", [leviathan_chain, block_verification], ids=lambda rule: rule.__name__)
def test_deterministic_drafts_judged_by_p_over_q(rule):
    _, p, q = _target()
    assert_wrong_law(grow(DRAWS, chain_round(rule, p, q, 2, choose=_argmax)), joint_law(p))


@pytest.mark.parametrize("replacement", [True, False])
def test_top_k_siblings_judged_by_p_over_q(replacement):
    _, p, q = _target()
    assert_wrong_law(grow(DRAWS, tree_round(p, q, (3,), most_likely, replacement)), joint_law(p))


def test_siblings_without_replacement_and_q_not_updated():
    _, p, q = _target()
    wrong = grow(MANY_DRAWS, tree_round(p, q, (3, 3), draws_without_replacement, replacement=True))
    assert_wrong_law(wrong, joint_law(p))
    right = grow(MANY_DRAWS, tree_round(p, q, (3, 3), draws_without_replacement, replacement=False))
    assert_law(right, joint_law(p))


def _token_by_token(choose) -> torch.Tensor:
    """Three tokens of each stream: `choose(context, noise, rng)` gives the next one."""
    noise, rng = keyed_noise(), torch.Generator().manual_seed(5)
    a = b = torch.full((len(noise),), NONE)
    tokens = []
    for i in range(3):
        a, b = b, choose((a, b), noise[:, i], rng)
        tokens.append(b)
    return torch.stack(tokens, 1)


def test_match_followed_by_a_fresh_draw():
    """A draft that equals the target's token is kept; otherwise that token is thrown away and another one drawn."""
    scores, p, _ = _target()

    def choose(context, noise, rng):
        drafted, target = race(DRAFTER[context], noise).argmax(-1), race(scores[context], noise).argmax(-1)
        return torch.where(drafted == target, drafted, draw(p[context], rng))

    assert_wrong_law(_token_by_token(choose), joint_law(p))


def test_independent_draw_per_path():
    """Each of two paths draws its own target token at the node that they share; the first that matches is kept."""
    scores, p, _ = _target()

    def choose(context, noise, rng):
        siblings = DRAFTER[context].topk(2, dim=-1).indices
        first, second = race(scores[context], noise).argmax(-1), draw(p[context], rng)
        return torch.where((first != siblings[:, 0]) & (second == siblings[:, 1]), second, first)

    assert_wrong_law(_token_by_token(choose), joint_law(p))


def test_keyed_drafts_judged_by_p_over_q():
    """A correct p/q test of a keyed draft, and a correct residual, drawn with the noise of the position like
    everything else.
    """
    _, p, _ = _target()
    q = torch.softmax(-TARGET.double(), -1)  # a drafter that disagrees: the better the drafter, the smaller the bias

    def choose(context, noise, rng):
        drafted = race(q[context].log(), noise).argmax(-1).unsqueeze(1)
        accepted = accepted_prefix(torch.stack([p[context]] * 2, 1), q[context].gather(1, drafted), drafted, rng)
        residual = (p[context] - q[context]).clamp_min(0.0)
        return torch.where(accepted == 1, drafted[:, 0], race(residual.log(), noise).argmax(-1))

    assert_wrong_law(_token_by_token(choose), joint_law(p))


def test_the_check_itself_accepts_the_target():
    """The harness of the controls above, with the right rule in it."""
    scores, p, _ = _target()
    assert_law(_token_by_token(lambda context, noise, rng: race(scores[context], noise).argmax(-1)), joint_law(p))
