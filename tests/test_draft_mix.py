"""The mixture: one well-formed tree, credit where it is due, and no cost when the cheap drafter is sure or silent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee_spec.draft.base import Drafter, Proposal, never
from bloombee_spec.draft.mix import Calibration, MixConfig, MixedDrafter
from bloombee_spec.draft.scripted import Script, ScriptedDrafter
from bloombee_spec.draft.suffix import SuffixDrafter
from tests.draft_helpers import accepted, chain_of, proposed, small_texts

VOCAB = 97
TEXT = [(31 * i + i * i) % VOCAB for i in range(2000)]


class Fixed(Drafter):
    """Says the same chains at each call."""

    def __init__(self, name: str, *chains: Sequence[tuple[int, float]]) -> None:
        self.name = name
        self.asked = 0
        self.proposals: list[Proposal] = []
        for chain in chains:
            parent = -1
            for token, prob in chain:
                self.proposals.append(Proposal(parent, token, prob))
                parent = len(self.proposals) - 1

    def start(self, prompt: Sequence[int]) -> None:
        pass

    def observe(self, tokens: Sequence[int]) -> None:
        pass

    def propose(
        self, path: Sequence[int], budget: int, *, max_depth: int = 64, interrupted: Callable[[], bool] = never
    ) -> list[Proposal]:
        self.asked += 1
        return self.proposals


def _scripted(acceptance: float, seed: int = 0, stated: float | None = None) -> ScriptedDrafter:
    drafter = ScriptedDrafter(TEXT, VOCAB, Script(acceptance, seed=seed))
    if stated is not None:
        drafter._chance = lambda rank: stated  # type: ignore[method-assign]
    return drafter


def test_proposals_are_merged_and_the_likeliest_are_kept() -> None:
    left = Fixed("left", [(1, 0.6), (2, 0.5)], [(3, 0.1)])
    right = Fixed("right", [(1, 0.3), (4, 0.4)])
    tree = proposed(MixedDrafter([left, right]), budget=4)
    assert [tuple(chain_of(tree, i)) for i in range(4)] == [(1,), (1, 2), (1, 4), (3,)]
    assert [each.prob for each in tree] == [0.6, 0.5, 0.4, 0.1]


def test_contradictions_cannot_all_be_right() -> None:
    tree = proposed(MixedDrafter([Fixed("left", [(1, 0.9)]), Fixed("right", [(2, 0.9)])]))
    assert [each.prob for each in tree] == [pytest.approx(0.5), pytest.approx(0.5)]


def test_expensive_drafters_are_not_asked_when_cheap_ones_are_sure() -> None:
    sure, slow = Fixed("sure", [(1, 0.95), (2, 0.95)]), Fixed("slow", [(7, 0.5)])
    mixture = MixedDrafter([sure, slow])
    assert len(proposed(mixture, budget=2)) == 2
    assert slow.asked == 0
    assert len(proposed(mixture, budget=3)) == 3
    assert slow.asked == 1


def test_a_silent_cheap_drafter_changes_nothing() -> None:
    """Free when there is no match: the tree is the one that the model alone would have proposed."""
    slow = Fixed("slow", [(7, 0.5), (8, 0.5)], [(9, 0.2)])
    mixture = MixedDrafter([SuffixDrafter(corpus=None), slow])
    mixture.start([1, 2, 3])
    assert {tuple(chain_of(proposed(mixture), i)) for i in range(3)} == {(7,), (7, 8), (9,)}
    assert sorted(each.prob for each in proposed(mixture)) == [0.2, 0.5, 0.5]


def test_an_interruption_keeps_what_the_cheap_ones_said() -> None:
    slow = Fixed("slow", [(7, 0.5)])
    mixture = MixedDrafter([Fixed("cheap", [(1, 0.2)]), slow])
    assert [each.token for each in mixture.propose((), 8, interrupted=lambda: True)] == [1]
    assert slow.asked == 0


def test_each_committed_token_is_credited_to_those_who_proposed_it() -> None:
    # Seen to fail with `_settle` that does not move down the tree.
    mixture = MixedDrafter([Fixed("left", [(1, 0.6), (2, 0.5)]), Fixed("right", [(1, 0.3), (4, 0.4)], [(5, 0.1)])])
    mixture.start([0])
    proposed(mixture, budget=8)
    assert mixture.proposer_of([1]) == ("left", "right")
    assert mixture.proposer_of([1, 2]) == ("left",)
    assert mixture.proposer_of([1, 9]) == ()
    mixture.observe([1])
    assert mixture.proposer_of([4]) == ("right",)
    mixture.observe([4, 6])
    left, right = mixture.credits
    assert (left.name, left.tested, left.committed) == ("left", 2, 1)
    assert (right.name, right.tested, right.committed) == ("right", 3, 2)


def test_a_proposal_for_a_path_is_credited_at_its_place() -> None:
    mixture = MixedDrafter([Fixed("only", [(5, 0.5)])])
    mixture.start([0])
    proposed(mixture, path=[8, 9])
    mixture.observe([8, 9, 5])
    assert (mixture.credits[0].tested, mixture.credits[0].committed) == (1, 1)


def test_asking_twice_is_credited_once() -> None:
    mixture = MixedDrafter([Fixed("only", [(5, 0.5)])])
    mixture.start([0])
    for _ in range(3):
        proposed(mixture)
    mixture.observe([5])
    assert (mixture.credits[0].tested, mixture.credits[0].committed) == (1, 1)


def test_overconfident_drafters_are_trusted_less_and_modest_ones_more() -> None:
    # Seen to fail with `record` left out of `_settle`.
    boaster, modest = _scripted(0.2, seed=1, stated=0.95), _scripted(0.8, seed=2, stated=0.3)
    mixture = MixedDrafter([boaster, modest], MixConfig(enough=1.0))
    mixture.start(TEXT[:10])
    before = proposed(mixture, budget=2, max_depth=1)
    for position in range(10, 600):
        proposed(mixture, budget=8, max_depth=3)
        mixture.observe([TEXT[position]])
    after = proposed(mixture, budget=2, max_depth=1)
    assert before[0].prob > 0.6
    first = mixture._likelihood(mixture._awaited.children[after[0].token])
    second = mixture._likelihood(mixture._awaited.children[after[-1].token]) if len(after) > 1 else 0
    assert first == pytest.approx(0.8, abs=0.12) and second <= 0.4
    assert mixture.proposer_of([after[0].token]) in (("modest",), (modest.name,), (boaster.name, modest.name))


def test_calibrations_outlive_a_stream_and_are_shared_by_forks() -> None:
    mixture = MixedDrafter([_scripted(0.2, stated=0.95)])
    mixture.start(TEXT[:10])
    for position in range(10, 300):
        proposed(mixture, budget=1)
        mixture.observe([TEXT[position]])
    learnt = proposed(mixture, budget=1)[0].prob
    assert learnt < 0.5
    twin = mixture.with_drafters([_scripted(0.2, stated=0.95)])
    for drafter in (mixture, twin):
        drafter.start(TEXT[:10])
        assert proposed(drafter, budget=1)[0].prob == learnt
    with pytest.raises(ValueError, match="expected the drafters"):
        mixture.with_drafters([SuffixDrafter(corpus=None)])


def test_depths_are_calibrated_apart() -> None:
    mixture = MixedDrafter([Fixed("only", [(1, 0.8), (2, 0.8)])])
    mixture.start([0])
    for _ in range(200):
        proposed(mixture)
        mixture.observe([1, 3])  # the first is always right, the second never
    first, second = proposed(mixture)
    assert first.prob > 0.95 and second.prob < 0.1


def test_awaited_proposals_are_bounded() -> None:
    mixture = MixedDrafter([Fixed("only", [(1, 0.8), (2, 0.8)])], MixConfig(awaited=50))
    mixture.start([0])
    for token in range(1000):
        proposed(mixture, path=[token])
    nodes, stack = 0, [mixture._awaited]
    while stack:
        node = stack.pop()
        nodes += 1
        stack += node.children.values()
    assert nodes <= 50 + 5


@given(
    parts=st.lists(small_texts, min_size=1, max_size=4),
    paths=st.lists(small_texts, max_size=3),
    budget=st.integers(0, 12),
)
@settings(deadline=None)
def test_proposing_leaves_no_trace(parts: list[list[int]], paths: list[list[int]], budget: int) -> None:
    """Without commits in between; committed tokens, on the other hand, do judge what was proposed."""

    def mixture() -> MixedDrafter:
        return MixedDrafter([SuffixDrafter(corpus=None), _scripted(0.7)])

    asking, silent = mixture(), mixture()
    for drafter in (asking, silent):
        drafter.start([token for part in parts for token in part])
    for path in paths:
        proposed(asking, path, budget)
    assert proposed(asking, (), budget) == proposed(silent, (), budget)


@given(outcomes=st.lists(st.tuples(st.floats(0.001, 1), st.booleans()), max_size=300), prob=st.floats(0.001, 1))
def test_corrected_probabilities_are_probabilities(outcomes: list[tuple[float, bool]], prob: float) -> None:
    calibration = Calibration(8, 50)
    for promised, came_true in outcomes:
        calibration.record(promised, came_true)
    assert 0 < calibration.corrected(prob) <= 1


def test_very_long_chains_are_merged_without_recursion() -> None:
    mixture = MixedDrafter([Fixed("only", [(1, 0.999)] * 3000)], MixConfig(awaited=10000))
    mixture.start([0])
    assert len(proposed(mixture, budget=3000, max_depth=3000)) == 3000


def test_a_mixture_accepts_what_any_of_its_drafters_does() -> None:
    suffix = SuffixDrafter(corpus=None)
    mixture = MixedDrafter([suffix, _scripted(1.0)])
    mixture.start(TEXT[:40])
    assert accepted(proposed(mixture, budget=16, max_depth=4), TEXT[40:]) == 4


def test_an_empty_mixture_is_refused() -> None:
    with pytest.raises(ValueError):
        MixedDrafter([])
    with pytest.raises(ValueError):
        MixConfig(enough=0)
