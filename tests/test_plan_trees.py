"""The best tree of each size, against Sequoia's recurrence and against trying them all."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee_spec.plan.trees import beam_coverage, best_first, expected_tokens, sequoia_table

falling = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4).map(
    lambda raw: tuple(sorted((p / max(1.0, sum(raw)) for p in raw), reverse=True))
)


def _brute(rates: tuple[tuple[float, ...], ...], size: int, depth: int) -> float:
    """Expected tokens of the best tree of exactly `size` nodes: every split among every number of children."""

    @cache
    def subtree(nodes: int, at: int) -> float:  # `nodes` including its own root, whose children are at depth `at`
        if nodes == 1:
            return 1.0
        if at > depth:
            return float("-inf")
        return 1.0 + forest(nodes - 1, at, 0)

    @cache
    def forest(nodes: int, at: int, rank: int) -> float:  # siblings from `rank` on
        if nodes == 0:
            return 0.0
        row = rates[min(at, len(rates)) - 1]
        if rank == len(row):
            return float("-inf")
        return max(row[rank] * subtree(n, at + 1) + forest(nodes - n, at, rank + 1) for n in range(1, nodes + 1))

    return max(subtree(n, 1) for n in range(1, size + 2))


@settings(max_examples=60, deadline=None)
@given(falling, st.integers(1, 9), st.integers(1, 5))
def test_the_recurrence_the_search_and_brute_force_agree(row: tuple[float, ...], size: int, depth: int) -> None:
    brute = _brute((row,), size, depth)
    assert expected_tokens(best_first((row,), size, depth)) == pytest.approx(brute)
    assert sequoia_table(row, size + 1, depth + 1)[size + 1, depth + 1] == pytest.approx(brute)


@settings(max_examples=60, deadline=None)
@given(st.lists(falling, min_size=1, max_size=4), st.integers(1, 8), st.integers(1, 4))
def test_the_search_is_best_when_acceptance_depends_on_depth(
    rows: list[tuple[float, ...]], size: int, depth: int
) -> None:
    assert expected_tokens(best_first(tuple(rows), size, depth)) == pytest.approx(_brute(tuple(rows), size, depth))


@settings(deadline=None)
@given(falling, st.integers(1, 40), st.integers(1, 6))
def test_a_tree_is_a_tree(row: tuple[float, ...], size: int, depth: int) -> None:
    nodes = best_first((row,), size, depth)
    assert len(nodes) <= size
    seen: set[tuple[int, int]] = set()
    for index, node in enumerate(nodes):
        assert node.parent < index and 1 <= node.depth <= depth
        assert node.depth == (nodes[node.parent].depth + 1 if node.parent >= 0 else 1)
        assert node.rank == 0 or (node.parent, node.rank - 1) in seen, "a sibling came before the one ranked above it"
        seen.add((node.parent, node.rank))
    assert [node.reach for node in nodes] == sorted((node.reach for node in nodes), reverse=True)


def test_a_chain_saturates_and_a_tree_does_not() -> None:
    chain = expected_tokens(best_first(((0.8,),), 500, 500))
    assert chain == pytest.approx(5.0, abs=1e-6), "1/(1-α)"
    table = sequoia_table((0.8, 0.08, 0.04), 129, 40)[:, 40]
    gains = [table[2 * n] - table[n] for n in (16, 32, 64)]
    assert min(gains) > 0.4 and table[128] > 5.0


@settings(deadline=None)
@given(falling, st.integers(1, 8), st.integers(1, 30))
def test_coverage_falls_with_depth_and_grows_with_width(row: tuple[float, ...], width: int, depth: int) -> None:
    narrow, wide = beam_coverage((row,), width, depth), beam_coverage((row,), 2 * width, depth)
    assert narrow[0] == 1.0 and narrow == sorted(narrow, reverse=True)
    assert all(a <= b + 1e-9 for a, b in zip(narrow, wide))
    if width == 1:
        assert narrow == pytest.approx([row[0] ** d for d in range(len(narrow))])


def test_coverage_of_a_layer_wide_enough_for_everything_is_the_sum_of_the_siblings() -> None:
    assert beam_coverage(((0.5, 0.2, 0.1),), 27, 3) == pytest.approx([1, 0.8, 0.64, 0.512])
