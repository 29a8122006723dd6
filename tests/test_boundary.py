"""A stage's log of its output rows: bit for bit what was put, however it is kept, and never more than its budget."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee_spec.server import boundary
from bloombee_spec.server.boundary import ROWS, BoundaryLog, LogBudget
from bloombee_spec.wire.activations import CodecUnavailable
from tests.codec_helpers import DTYPES, activations, any_bits, same_bits

HIDDEN = 64
BLOCK = ROWS * HIDDEN * 4  # bytes of a raw block of float32
PLENTY = 1 << 22


class Sealing(list[Callable[[], None]]):
    """Blocks that wait to be sealed: when that happens is up to the test."""

    def run(self) -> None:
        while self:
            self.pop(0)()


def new_log(
    memory: int = PLENTY, disk: int = 0, dtype: torch.dtype = torch.float32, max_length: int = 1000
) -> tuple[BoundaryLog, LogBudget, Sealing]:
    sealing = Sealing()
    budget = LogBudget(memory, disk, sealing.append)
    return BoundaryLog(HIDDEN, max_length, dtype, budget), budget, sealing


def some_rows(n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return activations(n, HIDDEN, dtype, seed)


def used(budget: LogBudget, memory: int = PLENTY) -> int:
    return memory - budget.left[0]


# --- what is read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [(1 << 20, 0), (0, 1 << 20)])
def test_the_log_keeps_rows_in_memory_or_on_disk(budget: tuple[int, int]) -> None:
    shared = LogBudget(*budget)
    log = BoundaryLog(4, 1000, torch.float32, shared)
    rows = torch.arange(4000, dtype=torch.float32).view(1000, 4)
    for at in range(0, 300, 7):
        log.put(at, rows[at : at + 7])
    assert torch.equal(log.read(0, 300), rows[:300])
    log.truncate(100)
    log.put(100, rows[500:510])
    assert torch.equal(log.read(99, 110), torch.cat([rows[99:100], rows[500:510]]))
    with pytest.raises(ValueError, match="are here"):
        log.read(0, 111)
    log.close()
    assert shared.left == budget


def test_a_log_without_budget_or_with_a_gap_promises_nothing() -> None:
    log = BoundaryLog(4, 1000, torch.float32, LogBudget(0, 0))
    log.put(0, torch.zeros(5, 4))
    assert (log.first, log.end) == (5, 5)
    log = BoundaryLog(4, 1000, torch.float32, LogBudget(1 << 20, 0))
    log.skip(10)
    log.put(10, torch.ones(2, 4))
    log.put(20, torch.ones(2, 4))
    assert (log.first, log.end) == (20, 22)
    log.put(15, torch.ones(3, 4))
    assert (log.first, log.end) == (15, 18), "rows before the log's first one are a new beginning"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [activations, any_bits])  # any bits: NaN with payloads, infinities, denormals
@pytest.mark.parametrize("on_disk", [False, True])
def test_rows_come_back_bit_by_bit(
    dtype: torch.dtype, make: Callable[[int, int, torch.dtype], torch.Tensor], on_disk: bool
) -> None:
    log, budget, sealing = new_log(0 if on_disk else PLENTY, PLENTY, dtype)
    total = sum(budget.left)
    rows = make(5 * ROWS + 10, HIDDEN, dtype)
    log.skip(3)  # blocks begin anywhere
    for at in range(0, len(rows), 7):
        log.put(3 + at, rows[at : at + 7])
        if at < 3 * ROWS:
            sealing.run()  # of the rest some are raw
    assert len(sealing) == 2
    assert (total - sum(budget.left) < 6 * ROWS * log.row_bytes) == (make is activations), "sealed, or not"
    borders = (0, 5, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS, 4 * ROWS - 3, 5 * ROWS, len(rows))
    for start, end in itertools.combinations_with_replacement(borders, 2):
        assert same_bits(log.read(3 + start, 3 + end), rows[start:end])
    log.close()
    assert sum(budget.left) == total


def test_what_is_read_is_a_copy() -> None:
    log, _, sealing = new_log()
    rows = some_rows(2 * ROWS - 1)
    log.put(0, rows)
    sealing.run()
    log.read(0, 2 * ROWS - 1).zero_()
    assert same_bits(log.read(0, 2 * ROWS - 1), rows)


def test_what_is_sealed_can_be_written_again() -> None:
    log, budget, sealing = new_log()
    rows, others = some_rows(3 * ROWS), some_rows(2 * ROWS, seed=1)
    log.put(0, rows)
    sealing.run()
    log.truncate(ROWS + 5)
    assert same_bits(log.read(0, ROWS + 5), rows[: ROWS + 5])
    log.put(ROWS + 5, others[:1])
    assert not sealing, "a block that is not full is not sealed"
    log.put(ROWS + 3, others)  # overwrites without a truncation
    sealing.run()
    assert same_bits(log.read(0, log.end), torch.cat([rows[: ROWS + 3], others]))
    log.close()
    assert used(budget) == 0


def test_rows_are_put_with_and_without_inference_mode() -> None:
    log, _, sealing = new_log()
    rows = some_rows(2 * ROWS)
    with torch.inference_mode():
        log.put(0, rows[:ROWS].clone())
    sealing.run()
    with torch.inference_mode():
        log.put(ROWS - 2, rows[ROWS - 2 : ROWS - 1].clone())  # decodes the block
    log.put(ROWS - 1, rows[ROWS - 1 :])
    sealing.run()
    log.put(ROWS - 1, rows[ROWS - 1 :])
    assert same_bits(log.read(0, 2 * ROWS), rows)


def test_more_rows_than_announced_are_refused() -> None:
    log, budget, sealing = new_log(max_length=ROWS + 6)
    log.put(0, some_rows(ROWS + 6))
    assert used(budget) == (ROWS + 6) * log.row_bytes, "the last block is no longer than needed"
    with pytest.raises(ValueError, match="for a log of"):
        log.put(ROWS + 6, some_rows(1))
    sealing.run()
    assert same_bits(log.read(0, ROWS + 6), some_rows(ROWS + 6))


# --- what it costs ------------------------------------------------------------------------------------------------


def test_memory_then_disk_then_none() -> None:
    log, budget, _ = new_log(2 * BLOCK, BLOCK)
    log.put(0, some_rows(ROWS + 1))
    assert budget.left == (0, BLOCK)
    log.put(ROWS + 1, some_rows(ROWS))
    assert budget.left == (0, 0)
    assert (log.first, log.end) == (0, 2 * ROWS + 1)
    log.put(2 * ROWS + 1, some_rows(ROWS))
    assert (log.first, log.end) == (3 * ROWS + 1, 3 * ROWS + 1) and budget.left == (2 * BLOCK, BLOCK)
    log.put(3 * ROWS + 1, some_rows(2))
    assert (log.first, log.end) == (3 * ROWS + 1, 3 * ROWS + 3), "it goes on with what comes next"


@pytest.mark.parametrize(("memory", "disk"), [(5, 0), (0, 5), (4, 4)])
def test_sealed_blocks_leave_room_for_more(memory: int, disk: int) -> None:
    """In blocks of bf16, of which a sealed one takes about two thirds."""
    budgets = memory * BLOCK // 2, disk * BLOCK // 2
    log, budget, sealing = new_log(*budgets, torch.bfloat16)
    rows = some_rows((memory + disk + 1) * ROWS, torch.bfloat16)
    for at in range(0, len(rows), ROWS):
        log.put(at, rows[at : at + ROWS])
        sealing.run()
    assert same_bits(log.read(0, len(rows)), rows) and min(budget.left) >= 0
    log.put(2 * ROWS + 1, rows[2 * ROWS + 1 : 3 * ROWS])
    sealing.run()
    log.put(3 * ROWS - 1, rows[3 * ROWS - 1 : 4 * ROWS])
    assert same_bits(log.read(0, 4 * ROWS), rows[: 4 * ROWS])
    log.close()
    assert budget.left == budgets
    sealing.run()
    assert budget.left == budgets, "a seal that was pending gave back what had been given back"


def test_a_sealed_block_that_cannot_be_unsealed_for_lack_of_budget_is_not_promised() -> None:
    log, budget, sealing = new_log(2 * BLOCK)
    log.put(0, some_rows(ROWS))
    sealing.run()
    log.put(ROWS, some_rows(1))
    assert budget.left[0] < BLOCK
    log.put(5, some_rows(1, seed=1))  # drops the second block, so there is room
    assert (log.first, log.end) == (0, 6)
    log.put(6, some_rows(ROWS - 6))
    sealing.run()
    assert budget.take(BLOCK) == 0  # another log's
    log.put(7, some_rows(2))
    assert (log.first, log.end) == (9, 9) and budget.left == (BLOCK, 0)


def test_rows_that_do_not_shrink_stay_as_they_are() -> None:
    log, budget, sealing = new_log()
    log.put(0, any_bits(ROWS, HIDDEN, torch.float32))
    sealing.run()
    assert used(budget) == BLOCK


def test_a_dtype_that_the_codec_does_not_know_stays_raw() -> None:
    log, budget, sealing = new_log(dtype=torch.int32)
    rows = torch.arange(ROWS * HIDDEN, dtype=torch.int32).view(ROWS, HIDDEN)
    log.put(0, rows)
    sealing.run()
    assert used(budget) == BLOCK and torch.equal(log.read(0, ROWS), rows)


def test_without_the_codecs_library_rows_stay_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_codec(name: str) -> None:
        raise CodecUnavailable(name)

    monkeypatch.setattr(boundary, "get_codec", get_codec)
    log, budget, sealing = new_log()
    log.put(0, some_rows(ROWS))
    sealing.run()
    assert used(budget) == BLOCK and same_bits(log.read(0, ROWS), some_rows(ROWS))


def test_a_disk_that_refuses_is_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no space left")

    log, budget, _ = new_log(0, PLENTY)
    log.put(0, some_rows(2))
    monkeypatch.setattr(boundary, "_allocate", refuse)
    log.put(2, some_rows(ROWS))
    assert (log.first, log.end) == (ROWS + 2, ROWS + 2) and budget.left == (0, PLENTY)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors where Linux lists them")
def test_blocks_on_disk_hold_no_descriptors() -> None:
    log, _, sealing = new_log(0, PLENTY)
    before = len(os.listdir("/proc/self/fd"))
    log.put(0, some_rows(10 * ROWS))
    for job in sealing[:5]:
        job()
    assert len(os.listdir("/proc/self/fd")) == before
    assert same_bits(log.read(0, 10 * ROWS), some_rows(10 * ROWS))


def test_a_closed_log_takes_nothing() -> None:
    log, budget, _ = new_log()
    log.put(0, some_rows(2))
    log.close()
    log.put(2, some_rows(2))  # a forward that was under way
    assert used(budget) == 0 and (log.first, log.end) == (4, 4)


# --- seals and changes at the same time ---------------------------------------------------------------------------


def overwrite(log: BoundaryLog) -> torch.Tensor:
    log.put(0, some_rows(ROWS, seed=1))
    return some_rows(ROWS, seed=1)


def overwrite_the_last_row(log: BoundaryLog) -> torch.Tensor:
    log.put(ROWS - 1, some_rows(1, seed=1))
    return torch.cat([some_rows(ROWS)[:-1], some_rows(1, seed=1)])


def fill(log: BoundaryLog) -> torch.Tensor:
    log.put(ROWS // 2, some_rows(ROWS // 2, seed=1))
    return torch.cat([some_rows(ROWS)[: ROWS // 2], some_rows(ROWS // 2, seed=1)])


def write_into_the_middle(log: BoundaryLog) -> torch.Tensor:
    log.put(ROWS // 2, some_rows(1, seed=1))
    return torch.cat([some_rows(ROWS)[: ROWS // 2], some_rows(1, seed=1)])


def close(log: BoundaryLog) -> torch.Tensor:
    log.close()
    return some_rows(0)


CHANGES = [overwrite, overwrite_the_last_row, fill, write_into_the_middle, close]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_seal_of_a_block_that_was_changed_has_no_effect(
    change: Callable[[BoundaryLog], torch.Tensor], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when the last lines of `_seal` do not ask for the version."""
    log, budget, sealing = new_log()
    log.put(0, some_rows(ROWS))
    (job,) = sealing
    sealing.clear()
    expected = []
    pack = boundary._pack

    def slow_pack(rows: torch.Tensor) -> bytearray | None:
        packed = pack(rows)
        expected.append(change(log))
        return packed

    if when == "meanwhile":
        monkeypatch.setattr(boundary, "_pack", slow_pack)
        job()
        monkeypatch.setattr(boundary, "_pack", pack)
    else:
        expected.append(change(log))
        job()
    n = len(expected[0])
    assert used(budget) == (BLOCK if n else 0), "sealed although it was changed"
    assert same_bits(log.read(log.end - n, log.end), expected[0])
    sealing.run()  # the one of the new contents, where they fill the block
    assert (used(budget) < BLOCK) == (n in (0, ROWS))
    assert same_bits(log.read(log.end - n, log.end), expected[0])


def wait_for_the_background() -> None:
    for thread in threading.enumerate():
        if thread.name == "spec-log-sealer":
            thread.join()


def test_blocks_are_sealed_in_the_background() -> None:
    budget = LogBudget(PLENTY, 0)
    logs = [BoundaryLog(HIDDEN, 1000, torch.float32, budget) for _ in range(2)]
    for at in range(0, 4 * ROWS, 16):
        for i, log in enumerate(logs):
            log.put(at, some_rows(4 * ROWS, seed=i)[at : at + 16])
    wait_for_the_background()
    assert used(budget) < 8 * BLOCK
    for i, log in enumerate(logs):
        assert same_bits(log.read(0, 4 * ROWS), some_rows(4 * ROWS, seed=i))


def test_a_seal_that_fails_leaves_the_block_and_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pack, calls = boundary._pack, []

    def fails_once(rows: torch.Tensor) -> bytearray | None:
        calls.append(rows)
        if len(calls) == 1:
            raise OSError("no space left")
        return pack(rows)

    monkeypatch.setattr(boundary, "_pack", fails_once)
    budget = LogBudget(PLENTY, 0)
    log = BoundaryLog(HIDDEN, 1000, torch.float32, budget)
    with caplog.at_level(logging.ERROR):
        log.put(0, some_rows(2 * ROWS))
        wait_for_the_background()
    assert len(caplog.records) == 1 and BLOCK < used(budget) < 2 * BLOCK
    assert same_bits(log.read(0, 2 * ROWS), some_rows(2 * ROWS))


# --- anything in any order ----------------------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(-9, 2), st.integers(0, 11)),  # where, from the end on; how many
        st.tuples(st.just("append"), st.just(0), st.integers(0, 11)),
        st.tuples(st.sampled_from(("truncate", "skip")), st.integers(-9, 2), st.just(0)),
        st.tuples(st.sampled_from(("seal one", "seal all", "seal the newest")), st.just(0), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, memory=st.sampled_from((PLENTY, 3 * 4 * HIDDEN * 4)))
def test_it_reads_like_a_list(steps: list[tuple[str, int, int]], memory: int) -> None:
    """With budget it promises what a list would; without, less, but nothing else."""
    with mock.patch.object(boundary, "ROWS", 4):
        log, budget, sealing = new_log(memory, 0, max_length=120)
        rows: dict[int, torch.Tensor] = {}
        first = end = count = 0
        for what, offset, n in steps:
            at = max(0, end + offset)
            if what in ("put", "append"):
                if at + n > 120:
                    continue
                new = some_rows(n, seed=(count := count + 1))
                log.put(at, new)
                rows |= dict(zip(range(at, at + n), new))
                first, end = (first if first <= at <= end else at), at + n
            elif what == "skip":
                log.skip(at)
                first = end = at
            elif what == "truncate":
                log.truncate(at)
                end = min(end, at)
                first = min(first, end)
            else:
                chosen = {"seal one": sealing[:1], "seal all": sealing[:], "seal the newest": sealing[-1:]}[what]
                for job in chosen:
                    sealing.remove(job)
                    job()
            assert log.end == end and first <= log.first <= end
            assert log.first == first or memory < PLENTY
            expected = [rows[i] for i in range(log.first, end)]
            assert same_bits(log.read(log.first, end), torch.stack(expected) if expected else some_rows(0))
            assert 0 <= budget.left[0] <= memory
        log.close()
        sealing.run()
        assert budget.left == (memory, 0)
