"""A new ring goes on with what the stages of a broken one hold."""

from __future__ import annotations

import random

import pytest

from bloombee_spec.client.kept import Kept, plan_lane
from bloombee_spec.hosts.base import Span


def test_only_the_new_stage_gets_rows() -> None:
    plan = plan_lane([500, 498, 0, 495], [0, 0, 0, 495], 499)
    assert plan.start == 499 and plan.first == 499
    assert plan.replay == (499, 498, 0, 0)  # stage 0 tops up stage 1, stage 1 refills stage 2
    assert plan.next_holds == (498, 0, 495, 0)


def test_a_new_first_stage_gets_ids_only() -> None:
    plan = plan_lane([0, 100, 100], [0, 0, 100], 100)
    assert plan.start == 100 and plan.first == 0 and plan.replay == (0, 0, 0) and plan.next_holds[0] == 100


def test_rows_that_nobody_kept_are_computed_again() -> None:
    plan = plan_lane([100, 100, 0], [0, 60, 0], 100)
    assert plan.replay == (100, 0, 0) and plan.next_holds == (0, 0, 0)  # stage 1 computes all rows once more


@pytest.mark.parametrize("seed", range(200))
def test_every_stage_ends_up_with_the_whole_text(seed: int) -> None:
    """Plays a plan: what each stage holds afterwards is a prefix without gaps, as long as the text."""
    rng = random.Random(seed)
    n, length = rng.randint(1, 5), rng.randint(0, 12)
    held = [rng.choice([0, rng.randint(0, 15), length]) for _ in range(n)]
    logged = [rng.choice([0, rng.randint(0, h)]) for h in held]
    plan = plan_lane(held, logged, length)
    holds = [min(h, length) for h in held]
    arriving = list(range(plan.first, plan.start))  # ids to the first stage
    for i in range(n):
        if arriving:
            assert arriving[0] <= holds[i], "a gap"
            assert arriving == list(range(arriving[0], arriving[-1] + 1))
            holds[i] = arriving[0]
        before = holds[i]
        holds[i] += len(arriving)
        passed = [p for p in arriving if p >= plan.next_holds[i]] if i + 1 < n else []
        if i + 1 < n and plan.replay[i]:
            assert logged[i] <= plan.next_holds[i] <= plan.replay[i] <= before, "rows that are not kept"
            passed = [*range(plan.next_holds[i], plan.replay[i]), *passed]
            assert passed == sorted(set(passed)), "a row is sent twice"
        arriving = passed
    assert plan.start == max(min(h, length) for h in held)
    assert all(h >= plan.start for h in holds)


def test_an_edited_history_is_kept_up_to_the_edit() -> None:
    kept = Kept({Span("a", 0, 2): (b"s" * 16, 0)}, [(1, 2, 3, 4), (7, 8)], 8)
    assert kept.lengths([(1, 2, 9, 9, 9), (7, 8)]) == (2, 1)
    assert kept.lengths([(1, 2, 3, 4, 5), (7, 8, 9)]) == (4, 2)
    kept.drop("a")
    assert not kept.sources
