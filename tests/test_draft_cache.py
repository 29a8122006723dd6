"""Hedges: how many, and which of them can still happen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloombee_spec.draft.base import Proposal
from bloombee_spec.draft.cache import HedgeCache, branch_count, fan_out, whole

HEDGE = [Proposal(-1, 5, 0.5)]


def test_fan_out_of_the_published_example() -> None:
    assert [round(share, 1) for share in fan_out(0.8, 4, 20, 0.6)] == [4.1, 3.6, 3.1, 2.7, 6.5]


@given(acceptance=st.floats(0, 1), chain=st.integers(0, 12), budget=st.floats(0, 100), reuse=st.floats(0.05, 3))
def test_fan_out_spends_the_budget(acceptance: float, chain: int, budget: float, reuse: float) -> None:
    shares = fan_out(acceptance, chain, budget, reuse)
    assert len(shares) == chain + 1
    assert min(shares) >= 0
    assert sum(shares) == pytest.approx(budget)
    assert sum(whole(shares)) <= budget + 1e-6
    assert all(abs(count - share) < 1 + 1e-9 for count, share in zip(whole(shares), shares))


@given(
    acceptance=st.floats(0.05, 0.95),
    chain=st.integers(1, 6),
    reuse=st.floats(0.2, 2),
    moved=st.floats(0.01, 0.5),
    data=st.data(),
)
def test_no_other_fan_out_is_asked_less_in_vain(
    acceptance: float, chain: int, reuse: float, moved: float, data: st.DataObject
) -> None:
    """Moving any share elsewhere raises the chance that a hedge is missing: sum of P(k accepted) F_k^-r."""
    shares = fan_out(acceptance, chain, 20, reuse)
    chances = [acceptance**k * (1 - acceptance) for k in range(chain)] + [acceptance**chain]
    giver, taker = data.draw(st.permutations(range(chain + 1)))[:2]
    other = list(shares)
    other[giver] -= moved * shares[giver]
    other[taker] += moved * shares[giver]
    missing = [sum(p * f**-reuse for p, f in zip(chances, each)) for each in (shares, other)]
    assert missing[0] <= missing[1] + 1e-9


def test_uncertain_tokens_get_more_branches() -> None:
    assert [branch_count(prob, 4) for prob in (0.0, 0.25, 0.5, 0.9, 1.0)] == [4, 3, 2, 1, 1]


def test_a_prepared_outcome_is_found_when_it_happens() -> None:
    cache = HedgeCache()
    cache.put([10, 11], 99, HEDGE)
    cache.commit(10)
    assert [11, 99] in cache
    cache.commit(11)
    assert cache.miss(99) == tuple(HEDGE)
    assert (cache.stats.hits, cache.stats.misses, len(cache)) == (1, 0, 0)


def test_outcomes_that_cannot_happen_any_more_are_dropped() -> None:
    cache = HedgeCache()
    cache.put([], 98, HEDGE)
    cache.put([10], 99, HEDGE)
    cache.put([10, 11], 97, HEDGE)
    cache.put([12], 97, HEDGE)
    cache.commit(10)
    assert len(cache) == 2
    assert cache.miss(96) is None
    assert len(cache) == 0
    assert cache.stats.hit_rate == 0
    assert cache.stats.obsolete == 4


def test_the_oldest_outcomes_give_way() -> None:
    cache = HedgeCache(capacity=2)
    for token in (1, 2, 3):
        cache.put([], token, HEDGE)
    assert [1] not in cache and [2] in cache and [3] in cache
    assert cache.stats.evicted == 1
    cache.put([], 2, HEDGE)  # anew
    cache.put([], 4, HEDGE)
    assert [3] not in cache and [2] in cache


tokens = st.integers(0, 2)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.lists(tokens, max_size=3), tokens),
        st.tuples(st.just("commit"), st.just([]), tokens),
        st.tuples(st.just("miss"), st.just([]), tokens),
        st.tuples(st.just("clear"), st.just([]), tokens),
    ),
    max_size=30,
)


@given(operations=operations)
def test_kept_outcomes_and_the_ledger_agree_with_absolute_positions(
    operations: list[tuple[str, list[int], int]],
) -> None:
    """Reference: outcomes as whole committed texts. Seen to fail with `commit` that keeps contradicted outcomes."""
    cache = HedgeCache(capacity=5)
    committed: list[int] = []
    prepared: dict[tuple[int, ...], tuple[Proposal, ...]] = {}
    for number, (kind, path, token) in enumerate(operations):
        key = (*committed, *path, token)
        if kind == "put":
            hedge = [Proposal(-1, number, 0.5)]
            cache.put(path, token, hedge)
            prepared.pop(key, None)
            prepared[key] = tuple(hedge)
            while len(prepared) > 5:
                del prepared[next(iter(prepared))]
        elif kind == "clear":
            cache.clear()
            prepared = {}
        else:
            expected = prepared.get(key)
            if kind == "miss":
                assert cache.miss(token) == expected
            else:
                cache.commit(token)
            committed.append(token)
            n = len(committed)
            prepared = {k: v for k, v in prepared.items() if len(k) > n and list(k[:n]) == committed}
        assert len(cache) == len(prepared)
        assert all(list(key[len(committed) :]) in cache for key in prepared)
        stats = cache.stats
        assert stats.stored == stats.hits + stats.obsolete + stats.evicted + len(cache)


def test_impossible_arguments_are_refused() -> None:
    for arguments in ((1.1, 4, 20, 0.6), (0.5, -1, 20, 0.6), (0.5, 4, -1, 0.6), (0.5, 4, 20, 0)):
        with pytest.raises(ValueError):
            fan_out(*arguments)
    with pytest.raises(ValueError):
        branch_count(1.5, 4)
    with pytest.raises(ValueError):
        HedgeCache(capacity=0)
