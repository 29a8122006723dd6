"""Bookkeeping of a simulated stage: what is computed, in which order, and what is dropped when."""

from __future__ import annotations

import pytest

from bloombee_spec.plan.compute import ComputeProfile
from bloombee_spec.plan.decision import Mode, Plan
from bloombee_spec.plan.route import Leg, Route, Stage, plain_lap
from bloombee_spec.plan.sim.events import Clock
from bloombee_spec.plan.sim.ring import INJECTED, TRUTH, Row, SimStage
from bloombee_spec.plan.simulate import SimConfig, simulate
from bloombee_spec.tree import NodeSpec, committed_ref

PER_ROW = ComputeProfile.measured({1: 1.0, 2: 2.0})  # one second per row
ROOT = committed_ref(1)


class _Bench:
    """A stage of four blocks with two committed tokens, whose output is recorded as (second, ids)."""

    def __init__(self, *, inject: bool = False, max_rows: int = 64, queue_s: float = 0.0):
        self.clock = Clock()
        self.out: list[tuple[float, list[int]]] = []
        stage = Stage(PER_ROW, queue_s, blocks=4)
        self.stage = SimStage(self.clock, stage, (TRUTH, TRUTH), self._done, inject=inject, max_rows=max_rows)
        self._until = 0.0

    def _done(self, rows: list[Row]) -> None:
        self.out.append((self.clock.now, [row.spec.id for row in rows]))

    def at(self, second: float, *specs: NodeSpec) -> None:
        self.clock.at(second, self.stage.arrive, list(specs))

    def commit_at(self, second: float, token: int) -> None:
        self.clock.at(second, self.stage.commit, token)

    def run(self, until: float = 100.0) -> list[tuple[float, list[int]]]:
        over: list[bool] = []
        self.clock.at(until, over.append, True)
        self.clock.run(lambda: bool(over))
        return self.out


def _spec(identity: int, token: int, parent: int = ROOT) -> NodeSpec:
    return NodeSpec(identity, parent, token)


def test_rows_that_wait_go_in_one_forward() -> None:
    bench = _Bench()
    bench.at(0.0, _spec(1, 1))
    bench.at(0.2, _spec(2, 2))
    bench.at(0.4, _spec(3, 3))
    assert bench.run() == [(1.0, [1]), (3.0, [2, 3])]


def test_a_forward_takes_no_more_rows_than_it_may() -> None:
    bench = _Bench(max_rows=2)
    bench.at(0.0, *(_spec(i, i) for i in range(1, 6)))
    assert bench.run() == [(2.0, [1, 2]), (4.0, [3, 4]), (5.0, [5])]


def test_rows_that_die_while_they_wait_are_not_computed() -> None:
    bench = _Bench()
    bench.at(0.0, _spec(1, 1))
    bench.at(0.2, _spec(2, 2), _spec(3, 1, parent=2))
    bench.commit_at(0.9, 1)
    assert bench.run() == [(1.0, [1])]
    assert bench.stage.computed == 1


def test_a_dead_row_and_its_late_children_are_dropped_on_arrival() -> None:
    bench = _Bench()
    bench.commit_at(0.0, 7)
    bench.at(1.0, _spec(1, 1), _spec(2, 1, parent=1), _spec(3, 7))
    assert bench.run() == [(2.0, [3])], "only the committed token's own row is of use"


def test_a_forward_is_cut_short_between_two_blocks() -> None:
    bench = _Bench()
    bench.at(0.0, _spec(1, 1), _spec(2, 2))  # two rows: 4 blocks of 0.5 s
    bench.commit_at(0.6, 1)  # inside the second block; from the third on one row is left, 0.25 s per block
    assert bench.run() == [(pytest.approx(1.5), [1])]
    assert bench.stage.computed == pytest.approx(2 * 2 / 4 + 1 * 2 / 4)


def test_a_forward_without_any_row_left_ends_and_the_next_begins() -> None:
    bench = _Bench(inject=True)
    bench.at(0.0, _spec(1, 1), _spec(2, 2))
    bench.commit_at(0.6, 9)  # nobody guessed it: this stage starts its row by itself
    assert bench.run() == [(pytest.approx(2.0), [INJECTED + 2])]
    assert bench.stage.injected == 1


def test_the_canonical_row_goes_first() -> None:
    bench = _Bench(max_rows=2)
    bench.at(0.0, _spec(1, 1))
    bench.at(0.1, _spec(2, 1, parent=1), _spec(3, 2, parent=1), _spec(4, 3, parent=1))
    bench.commit_at(0.5, 1)
    bench.commit_at(0.6, 3)  # node 4 came last and is the root's row now; its siblings are dead
    bench.at(0.7, _spec(5, 1, parent=4), _spec(6, 2, parent=4))
    assert bench.run() == [(1.0, [1]), (3.0, [4, 5]), (4.0, [6])]


def test_a_row_that_was_started_here_is_not_computed_again_when_it_comes() -> None:
    bench = _Bench(inject=True)
    bench.commit_at(0.0, 1)
    bench.at(0.5, _spec(1, 1), _spec(2, 1, parent=1))
    out = bench.run()
    assert out == [(1.0, [INJECTED + 2]), (2.0, [2])]


def test_a_second_row_for_a_confirmed_candidate_is_not_computed() -> None:
    bench = _Bench()
    bench.at(0.0, _spec(1, 1))
    bench.commit_at(0.5, 1)
    bench.at(2.0, _spec(9, 1), _spec(10, 4, parent=9))
    assert bench.run() == [(1.0, [1]), (3.0, [10])]


def test_children_of_a_row_that_was_replaced_name_the_position_downstream() -> None:
    bench = _Bench(inject=True)
    seen: list[NodeSpec] = []
    bench.stage._forward = lambda rows: seen.extend(row.spec for row in rows)  # type: ignore[method-assign]
    bench.commit_at(0.0, 1)
    bench.at(0.5, _spec(1, 1), _spec(2, 1, parent=1))
    bench.run()
    assert [spec.parent for spec in seen] == [committed_ref(1), committed_ref(2)], "nobody downstream knows node 1"


def test_a_row_that_is_ahead_of_the_commits_waits_for_them() -> None:
    bench = _Bench()
    bench.at(0.0, NodeSpec(1, committed_ref(2), 5), NodeSpec(2, 1, 6))
    bench.commit_at(3.0, TRUTH)
    assert bench.run() == [(5.0, [1, 2])]


def test_other_peoples_work_comes_first() -> None:
    bench = _Bench(queue_s=2.0)
    bench.at(0.0, _spec(1, 1))
    assert bench.run() == [(3.0, [1])]


def test_commits_that_are_slower_than_rows_do_not_stall_the_ring() -> None:
    """The first stage hears of a commit in 1 ms, the next ones only after 300 ms, when several laps have passed."""
    fast, slow = Leg(0.001, 1e9, 8.0), Leg(0.3, 1e9, 8.0)
    stage = Stage(ComputeProfile.flat(0.001))
    route = Route((stage,) * 3, fast, (fast, fast), slow, fast)
    for plan in (Plan(Mode.OFF), Plan(Mode.STREAM, width=2, depth=4)):
        report = simulate(SimConfig(route, ((0.5, 0.2),), plan=plan, tokens=60))
        assert report.tokens == 60 and report.seconds >= 0.0
    assert plain_lap(route) < 0.01
