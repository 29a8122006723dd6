"""So many requests run, so many wait, and the next one is told to come back."""

from __future__ import annotations

import asyncio

import pytest

from bloombee_spec.api.errors import ApiError
from bloombee_spec.api.slots import Slots


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_queue_is_bounded_and_in_order() -> None:
    async def play() -> None:
        slots, order = Slots(2, 2), list[str]()

        async def request(name: str) -> None:
            await slots.acquire()
            order.append(name)

        tasks = [asyncio.ensure_future(request(name)) for name in "abcd"]
        await _settle()
        assert order == ["a", "b"]
        with pytest.raises(ApiError) as refused:
            await slots.acquire()
        assert refused.value.status == 429 and int(refused.value.headers["Retry-After"]) > 0
        assert refused.value.body()["error"]["type"] == "rate_limit_error"
        slots.release()
        await _settle()
        assert order == ["a", "b", "c"]
        tasks[3].cancel()  # hung up while it waited: its place is free
        await _settle()
        late = asyncio.ensure_future(request("e"))
        await _settle()
        slots.release()
        await _settle()
        assert order == ["a", "b", "c", "e"] and late.done()

    asyncio.run(play())


def test_without_a_queue_only_free_slots_are_given() -> None:
    async def play() -> None:
        slots = Slots(1, 0)
        await slots.acquire()
        with pytest.raises(ApiError):
            await slots.acquire()
        slots.release()
        await slots.acquire()

    asyncio.run(play())


@pytest.mark.parametrize("sizes", [(0, 1), (1, -1)])
def test_impossible_sizes_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="expected at least 1 and 0"):
        Slots(*sizes)
