"""The suffix automaton against a reference that scans the whole text for each question."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloombee_spec.draft.automaton import Follower, SuffixAutomaton
from tests.draft_helpers import small_texts

contexts = st.lists(st.integers(0, 3), max_size=6)


def _ends(text: Sequence[int], context: Sequence[int]) -> list[int]:
    """Positions that follow an occurrence of the context."""
    n = len(context)
    return [end for end in range(n, len(text) + 1) if list(text[end - n : end]) == list(context)]


def _longest(text: Sequence[int], context: Sequence[int]) -> int:
    return next(n for n in range(len(context), -1, -1) if n == 0 or _ends(text, context[len(context) - n :]))


def _reference_levels(text: Sequence[int], context: Sequence[int], longest: int) -> list[tuple[int, list[Follower]]]:
    """(length, followers) of each suffix of the context that occurs more often than every longer one."""
    levels: list[tuple[int, list[Follower]]] = []
    seen = 0
    for n in range(min(_longest(text, context), longest), 0, -1):
        ends = _ends(text, context[len(context) - n :])
        if len(ends) > seen:
            seen = len(ends)
            followed = [end for end in ends if end < len(text)]
            tokens = {text[end] for end in followed}
            levels.append(
                (
                    n,
                    sorted(
                        (t, sum(text[e] == t for e in followed), max(e for e in followed if text[e] == t))
                        for t in tokens
                    ),
                )
            )
    return levels


@given(text=small_texts, context=contexts, max_context=st.integers(1, 6))
def test_counts_and_positions_are_those_of_a_full_scan(text: list[int], context: list[int], max_context: int) -> None:
    # Seen to fail without the count copied on a split, and without the walks in `_count_tail` and `levels`.
    index = SuffixAutomaton(max_context)
    index.extend(text)
    state, length = index.locate(context)
    assert length == _longest(text, context)
    levels = [(n, sorted(index.followers(level, 10))) for n, level in index.levels(state, length, 1, max_context)]
    assert levels == _reference_levels(text, context, max_context)


@given(text=small_texts, more=contexts, context=contexts)
def test_growing_later_is_growing_at_once(text: list[int], more: list[int], context: list[int]) -> None:
    stepwise, at_once = SuffixAutomaton(4), SuffixAutomaton(4)
    stepwise.extend(text)
    stepwise.locate(context)
    stepwise.extend(more)
    at_once.extend(text + more)
    for index in (stepwise, at_once):
        assert index.size == len(text + more)
    questions = [list(index.levels(*index.locate(context), 1, 4)) for index in (stepwise, at_once)]
    assert questions[0] == questions[1]


def test_a_context_can_be_followed_verbatim_beyond_the_counted_length() -> None:
    text = list(range(100))
    index = SuffixAutomaton(4)
    index.extend([*text, 1000, 0, 1])
    state, length = index.locate([0, 1])
    for token in text[2:]:
        state, length = index.step(state, length, token)
    assert length == 100
    assert index.followers(state, 5) == [(1000, 1, 100)]


def test_a_shorter_context_that_was_split_off_has_followers_of_its_own() -> None:
    # Seen to fail when both states share one dictionary.
    index = SuffixAutomaton(3)
    index.extend([8, 0, 1, 8, 0, 2, 9, 0, 3])
    long, short = (index.followers(index.locate(context)[0], 9) for context in ([8, 0], [0]))
    assert sorted(token for token, _, _ in long) == [1, 2]
    assert sorted(token for token, _, _ in short) == [1, 2, 3]


def test_nothing_is_said_about_a_context_with_too_many_followers() -> None:
    index = SuffixAutomaton(2)
    for token in range(1, 5):
        index.extend((0, token))
    state, _ = index.locate([0])
    assert len(index.followers(state, 4)) == 4
    assert index.followers(state, 3) == []


@pytest.mark.parametrize("period", [1, 2, 7])
def test_a_text_that_repeats_itself_costs_no_more_than_a_bounded_walk(period: int) -> None:
    """The chain of links of a periodic text is as long as the text; counting must not follow all of it."""
    index = SuffixAutomaton(8)
    index.extend(list(range(period)) * (4000 // period))
    assert index._tail_length == 9
    links = 0
    state = index._tail
    while state:
        links, state = links + 1, index._link[state]
    assert links <= 9


def test_the_reserved_token_is_refused() -> None:
    index = SuffixAutomaton(2)
    with pytest.raises(ValueError, match="reserved"):
        index.extend([3, -1])
    assert index.size == 1
