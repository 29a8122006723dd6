"""Parked KV: only its client gets it back, only in the same shape, only for a while, and new sessions go first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from bloombee_spec.lane import Lane
from bloombee_spec.server.boundary import BoundaryLog, LogBudget
from bloombee_spec.server.holding import Holding, ParkingLot, digest
from bloombee_spec.wire.frames import FrameError
from bloombee_spec.wire.messages import SESSION_BYTES, Open, Opened

OLD, NEW = b"o" * SESSION_BYTES, b"n" * SESSION_BYTES
OPEN = Open(
    session=OLD, stage=1, stages=3, start=2, end=4, lanes=2, max_length=64, arena=8, previous="a", next="b",
    verifier="b", listeners=(), embed=False, verify=False, codec="raw", codec_in="raw",
)  # fmt: skip
AGAIN = replace(OPEN, session=NEW, resume=OLD, resume_stage=1, resume_lengths=(5, 3))


def parked(run: Callable[[ParkingLot, Holding, list[Holding]], None], timeout: float = 60.0) -> None:
    async def main() -> None:
        freed: list[Holding] = []
        lot = ParkingLot(timeout, freed.append)
        holding = Holding.fresh(OPEN, 1, (10, 11), 100)
        lot.park(OPEN, "client", holding)
        run(lot, holding, freed)

    asyncio.run(main())


def test_its_client_gets_it_back_once() -> None:
    def run(lot: ParkingLot, holding: Holding, freed: list[Holding]) -> None:
        assert lot.take(AGAIN, "client") is holding
        assert lot.take(AGAIN, "client") is None and len(lot) == 0 and not freed

    parked(run)


@pytest.mark.parametrize(
    "change",
    [
        {"resume": NEW}, {"resume_stage": 0}, {"start": 1}, {"end": 5}, {"max_length": 63}, {"arena": 4},
        {"adapter": "other"}, {"lanes": 1, "resume_lengths": (5,)}, {"resume": None, "resume_lengths": ()},
    ],
    ids=str,
)  # fmt: skip
def test_another_name_or_shape_gets_nothing(change: dict[str, object]) -> None:
    parked(lambda lot, *_: _nothing(lot, replace(AGAIN, **change)))  # type: ignore[arg-type]


def test_a_stranger_gets_nothing_even_with_the_right_name() -> None:
    parked(lambda lot, *_: _nothing(lot, AGAIN, "stranger"))


def _nothing(lot: ParkingLot, opened: Open, client: str = "client") -> None:
    assert lot.take(opened, client) is None and len(lot) == 1


def test_the_oldest_goes_when_room_is_needed() -> None:
    def run(lot: ParkingLot, holding: Holding, freed: list[Holding]) -> None:
        later = Holding.fresh(OPEN, 2, (12, 13), 50)
        lot.park(replace(OPEN, session=NEW), "client", later)
        assert [lot.evict(), lot.evict(), lot.evict()] == [100, 50, None]
        assert freed == [holding, later]

    parked(run)


def test_it_is_freed_when_nobody_comes() -> None:
    async def main() -> list[Holding]:
        freed: list[Holding] = []
        lot = ParkingLot(0.01, freed.append)
        lot.park(OPEN, "client", Holding.fresh(OPEN, 1, (10, 11), 100))
        await asyncio.sleep(0.1)
        assert len(lot) == 0
        return freed

    assert len(asyncio.run(main())) == 1


def lane_with(n: int, log: BoundaryLog | None) -> Lane:
    lane = Lane(arena=8, max_length=64, inject=False, log=log)
    for token in range(n):
        lane.tree.commit(token)
    lane.scheduled = lane.filled = n
    if log is not None:
        log.put(0, torch.arange(n, dtype=torch.float32)[:, None].repeat(1, 4))
    return lane


def test_books_begin_where_the_client_wants_and_the_log_comes_along() -> None:
    budget = LogBudget(1 << 20, 0)

    def new_log() -> BoundaryLog:
        return BoundaryLog(4, 64, torch.float32, budget)

    old = Holding(1, (10, 11), 100, [lane_with(7, new_log()), lane_with(2, new_log())])
    resumed = old.resumed((5, 3), True, new_log)
    assert [lane.filled for lane in resumed.lanes] == [5, 2], "no more than there is, no more than is wanted"
    assert [lane.tree.committed for lane in resumed.lanes] == [[0, 1, 2, 3, 4], [0, 1]]
    assert all(lane.inject for lane in resumed.lanes)
    log = resumed.lanes[0].log
    assert log is not None and (log.first, log.end) == (0, 5) and log.read(4, 5)[0, 0] == 4.0
    for lane in (*old.lanes, *resumed.lanes):
        lane.check()
    resumed.close()
    assert budget.left == (1 << 20, 0), "the memory of a log was not given back"


def test_a_stage_that_had_no_log_promises_no_rows_from_before() -> None:
    old = Holding(1, (10,), 100, [lane_with(7, None)])
    (lane,) = old.resumed((6,), False, lambda: BoundaryLog(4, 64, torch.float32, LogBudget(1 << 20, 0))).lanes
    assert lane.log is not None and lane.log.first == lane.log.end == 6


def test_a_digest_tells_texts_apart() -> None:
    assert digest([1, 2, 3]) == digest((1, 2, 3)) != digest([1, 2, 4]) != digest([1, 2])


def test_nonsense_about_earlier_sessions_is_refused() -> None:
    for change in ({"resume_lengths": (5,)}, {"resume_lengths": (5, 65)}, {"resume": b"short"}, {"resume_stage": -1}):
        with pytest.raises((ValueError, FrameError)):
            Open.from_wire({**AGAIN.to_wire(), **change})
    with pytest.raises((ValueError, FrameError)):
        Open.from_wire({**OPEN.to_wire(), "prepared": True})  # with neighbours
    for told in (((5,), (), ()), ((5,), (b"x" * 8,), (6,)), ((5,), (b"x",), (0,))):
        with pytest.raises(ValueError):
            Opened(8, 8, *told)
