"""Rules that compare distributions, through the code and the bytes of both sides: their laws, and what they refuse."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from round_play import chain, play, play_round
from sampling_laws import (
    DRAFTER,
    NONE,
    TARGET,
    V,
    assert_law,
    assert_wrong_law,
    joint_law,
    spec_of,
    target_distribution,
)

from bloombee_spec.config import RULES, SpecConfig
from bloombee_spec.sampling import round_rules
from bloombee_spec.sampling.comparison import truncate_top_k
from bloombee_spec.sampling.processors import SamplingError
from bloombee_spec.sampling.round_rules import ROUND_RULES, Leviathan
from bloombee_spec.sampling.rounds import Distributions, Draft, Draws, Purpose, certain, draw_draft, round_rng
from bloombee_spec.sampling.spec import SamplingSpec
from bloombee_spec.wire.distributions import decode_distribution, encode_distribution, rounded
from bloombee_spec.wire.varint import FrameError, Reader, put_uint

DRAWS = 20_000
FEWER = 6_000
EVERY_RULE = pytest.mark.parametrize("name", ROUND_RULES)
WIDTHS = {"specinfer": (2, 2)}  # the others: a chain of two


def reader(data: bytes | bytearray) -> Reader:
    return Reader(memoryview(bytes(data)))


def law_of(table: torch.Tensor):
    """`[V + 1, V + 1, V]`: the next token given the last two."""

    @functools.cache
    def law(text: tuple[int, ...]) -> torch.Tensor:
        a, b = [NONE, NONE, *text][-2:]
        return table[a, b]

    return law


def texts(rule, p, q, widths=(1, 1), draws=DRAWS) -> torch.Tensor:
    torch.set_num_threads(1)
    p, q = law_of(p), law_of(q)
    return torch.tensor([play(rule, p, q, widths, 3, seed // 50, seed % 50) for seed in range(draws)])


P = target_distribution(TARGET, spec_of("plain"))
Q = torch.softmax(DRAFTER.double(), -1)


@pytest.mark.parametrize("name", [name for name, rule in ROUND_RULES.items() if rule.exact])
def test_exact_rules_sample_from_the_target(name: str) -> None:
    assert_law(texts(ROUND_RULES[name], P, Q, WIDTHS.get(name, (1, 1))), joint_law(P))


def test_options_shape_the_target_and_the_drafter() -> None:
    """Tokens that p excludes, and a drafter under the same options."""
    spec = spec_of("cold_top_k")
    p = target_distribution(TARGET, spec)
    q = target_distribution(DRAFTER, spec)
    assert_law(texts(ROUND_RULES["leviathan"], p, q, draws=FEWER), joint_law(p))


def test_a_drafter_without_randomness_is_a_distribution_of_one_token() -> None:
    points = torch.nn.functional.one_hot(DRAFTER.argmax(-1), V).double()
    assert_law(texts(ROUND_RULES["leviathan"], P, points, draws=FEWER), joint_law(P))


def test_a_top_k_downlink_samples_from_the_truncated_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_rules, "TOP_K", 4)
    drawn = texts(ROUND_RULES["picospec"], P, Q, draws=FEWER)
    assert_law(drawn, joint_law(truncate_top_k(P, 4)))
    assert_wrong_law(drawn, joint_law(P))


def test_the_law_needs_every_candidate_whatever_it_is() -> None:
    """A client that leaves out what its drafter thinks unlikely samples from another law."""
    p, q = law_of(P), law_of(Q)

    def choosy(seed: int) -> list[int]:
        text: tuple[int, ...] = ()
        while len(text) < 3:
            rng = round_rng(seed, 0, len(text), Purpose.DRAFT)
            (token,) = draw_draft((1,), lambda path, text=text: q((*text, *path)), rng).tokens
            widths = (1,) if q(text)[token] > 0.2 else ()
            text += tuple(play_round(Leviathan(), p, q, widths, text, seed, 0))
        return list(text[:3])

    assert_wrong_law(torch.tensor([choosy(seed) for seed in range(FEWER)]), joint_law(P))


@EVERY_RULE
def test_greedy_rounds_commit_the_most_likely_tokens(name: str) -> None:
    points = torch.nn.functional.one_hot(TARGET.argmax(-1), V).double()
    guesses = torch.nn.functional.one_hot(DRAFTER.argmax(-1), V).double()
    expected: list[int] = []
    while len(expected) < 6:
        expected.append(int(law_of(points)(tuple(expected)).argmax()))
    for q in (points, guesses, Q):
        for seed in range(5):
            assert play(ROUND_RULES[name], law_of(points), law_of(q), WIDTHS.get(name, (1, 1)), 6, seed) == expected


@EVERY_RULE
def test_without_candidates_a_round_is_one_token(name: str) -> None:
    tokens = [play_round(ROUND_RULES[name], law_of(P), law_of(Q), (), (), seed, 0) for seed in range(400)]
    assert {len(each) for each in tokens} == {1} and {token for (token,) in tokens} == set(range(V))


def test_a_seed_repeats_and_others_do_not() -> None:
    runs = [play(ROUND_RULES["block"], law_of(P), law_of(Q), (1, 1), 12, seed, row) for seed, row in
            [(1, 0), (1, 0), (2, 0), (1, 1)]]  # fmt: skip
    assert runs[0] == runs[1] and len({tuple(run) for run in runs}) == 3


def test_nothing_random_is_used_twice() -> None:
    firsts = {
        float(torch.rand((), generator=round_rng(seed, row, length, purpose)))
        for seed in range(4) for row in range(4) for length in range(4) for purpose in Purpose
    }  # fmt: skip
    assert len(firsts) == 4 * 4 * 4 * len(Purpose)


def test_specinfer_grows_a_tree_within_its_budget() -> None:
    rule = ROUND_RULES["specinfer"]
    assert [rule.widths(budget) for budget in (0, 1, 2, 6, 10, 14)] == [
        (), (1,), (2,), (2, 2), (2, 2, 1), (2, 2, 1, 1),
    ]  # fmt: skip
    assert ROUND_RULES["block"].widths(3) == (1, 1, 1)


# --- what crosses the wire -----------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1), min_size=1, max_size=300).filter(lambda p: sum(p) > 1e-3))
def test_a_distribution_survives_the_wire_as_both_sides_round_it(weights: list[float]) -> None:
    p = torch.tensor(weights, dtype=torch.float64)
    p /= p.sum()
    data = encode_distribution(p)
    assert len(data) <= 1 + 2 * len(p)
    read = reader(data)
    got = decode_distribution(read, len(p))
    read.end()
    assert torch.equal(got, rounded(p))
    assert float((got - p).abs().sum()) < 2**-11
    assert bool((got[p == 0] == 0).all())


def test_few_tokens_are_few_bytes() -> None:
    p = torch.zeros(50_000)
    p[[7, 9, 40_000]] = torch.tensor([0.5, 0.25, 0.25])
    assert len(encode_distribution(p)) == 2 + 1 + 1 + 3 + 3 * 2
    assert len(encode_distribution(certain(3, 50_000))) == 5
    assert float(rounded(certain(3, 9))[3]) == 1.0


@given(st.binary(max_size=60))
def test_any_bytes_are_a_distribution_or_an_error(data: bytes) -> None:
    try:
        p = decode_distribution(reader(data), 20)
    except FrameError:
        return
    assert p.shape == (20,) and float(p.sum()) == pytest.approx(1.0) and float(p.min()) >= 0


@EVERY_RULE
@given(up=st.binary(max_size=80), down=st.binary(max_size=80))
def test_any_bytes_are_a_draft_and_an_answer_or_an_error(name: str, up: bytes, down: bytes) -> None:
    rule, q = ROUND_RULES[name], torch.full((V,), 1 / V, dtype=torch.float64)
    draft = Draft((1, 2), (-1, 0), (Draws(-1, (0,), q), Draws(0, (1,), q)))
    try:
        received = rule.read_draft(reader(up), draft.tokens, draft.parents, V)
        assert (received.tokens, received.parents) == (draft.tokens, draft.parents)
        rule.answer(bytearray(), received, lambda _: q, round_rng(0, 0, 1, Purpose.ACCEPT))
    except FrameError:
        pass
    try:
        outcome = rule.settle(reader(down), draft, V, round_rng(0, 0, 1, Purpose.RESAMPLE))
        assert 0 <= outcome.token < V and outcome.accepted in ((), (0,), (0, 1))
    except FrameError:
        pass


@pytest.mark.parametrize("name", ["leviathan", "block", "picospec"])
def test_chain_rules_refuse_trees(name: str) -> None:
    q, up = torch.full((V,), 1 / V, dtype=torch.float64), bytearray()
    draft = Draft((1, 2), (-1, -1), (Draws(-1, (0,), q), Draws(-1, (1,), q)))
    ROUND_RULES[name].write_draft(up, draft)
    with pytest.raises(FrameError, match="chains, not trees"):
        ROUND_RULES[name].read_draft(reader(up), draft.tokens, draft.parents, V)


def test_every_candidate_of_a_tree_was_drawn_from_something() -> None:
    q, up = torch.full((V,), 1 / V, dtype=torch.float64), bytearray()
    draft = Draft((1, 2), (-1, -1), (Draws(-1, (0,), q),))
    ROUND_RULES["specinfer"].write_draft(up, draft)
    with pytest.raises(FrameError, match="nobody drew"):
        ROUND_RULES["specinfer"].read_draft(reader(up), draft.tokens, draft.parents, V)


def test_a_q_of_zero_is_refused() -> None:
    with pytest.raises(FrameError, match="q is not in"):
        ROUND_RULES["leviathan"].read_draft(reader(bytes(4)), (1,), (-1,), V)


def test_an_accepted_path_follows_the_tree() -> None:
    q, down = torch.full((V,), 1 / V, dtype=torch.float64), bytearray()
    draft = Draft((1, 2), (-1, -1), (Draws(-1, (0, 1), q),))
    for number in (2, 0, 1, 5):
        put_uint(down, number)
    with pytest.raises(FrameError, match="does not follow"):
        ROUND_RULES["specinfer"].settle(reader(down), draft, V, round_rng(0, 0, 1, Purpose.RESAMPLE))


def test_broken_logits_have_no_distribution() -> None:
    shape = Distributions(SamplingSpec(0, do_sample=True), V)
    for value in (float("nan"), float("inf")):
        logits = torch.zeros(V)
        logits[2] = value
        with pytest.raises(SamplingError, match="no distribution"):
            shape(logits, ())
    with pytest.raises(SamplingError, match="no distribution"):
        shape(torch.full((V,), -float("inf")), ())


def test_chains_know_their_shape() -> None:
    assert chain((4, 5)).is_chain and chain(()).is_chain and chain((4, 5)).path(1) == (4, 5)


# --- configuration --------------------------------------------------------------------------------------------------


def test_rules_of_the_configuration_are_those_that_exist() -> None:
    assert ("keyed", *ROUND_RULES) == RULES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "greedy"}, "expected one of keyed"),
        ({"rule": "block", "mode": "relay"}, "servers with the plugin"),
        ({"rule": "block", "mode": "off"}, "servers with the plugin"),
        ({"rule": "block", "client_verifies": True}, "client_verifies"),
        ({"rule": "block", "plan": "stream"}, "plan='stream'"),
    ],
)
def test_combinations_without_sense_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpecConfig(**changes)
