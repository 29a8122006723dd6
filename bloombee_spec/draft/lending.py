"""One drafter per stream: copies of a prototype, or the prototype itself while nobody else uses it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from bloombee_spec.draft.base import Drafter, Proposal, never
from bloombee_spec.draft.coupling import NoiseSource, couple


@runtime_checkable
class Forkable(Protocol):
    """A drafter that can make one for another stream: it shares what is expensive and has its own state."""

    def fork(self) -> Drafter: ...


def fork(drafter: Drafter) -> Drafter:
    """A drafter like this one for another stream.

    :raises ValueError: it cannot be copied
    """
    if not isinstance(drafter, Forkable):
        raise ValueError(
            f"the drafter {drafter.name!r} serves one stream at a time and has no fork(); for several streams at once "
            "pass its class, or a function that makes one"
        )
    return drafter.fork()


class Lender:
    """Lends one drafter to one stream after the other, and forks it for those that come in between.

    A loan ends when the borrower closes the drafter.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._free = threading.Semaphore(1)

    def __call__(self) -> Drafter:
        """
        :raises ValueError: the drafter is lent and cannot be forked
        """
        if self._free.acquire(blocking=False):
            return LentDrafter(self._drafter, self._free.release)
        return fork(self._drafter)


class LentDrafter(Drafter):
    """A drafter that says when its stream has ended."""

    def __init__(self, drafter: Drafter, give_back: Callable[[], None]) -> None:
        self.drafter = drafter
        self.name, self.instant = drafter.name, drafter.instant
        self._give_back: Callable[[], None] | None = give_back

    def start(self, prompt: Sequence[int]) -> None:
        self._borrowed().start(prompt)

    def observe(self, tokens: Sequence[int]) -> None:
        self._borrowed().observe(tokens)

    def propose(
        self, path: Sequence[int], budget: int, *, max_depth: int = 64, interrupted: Callable[[], bool] = never
    ) -> list[Proposal]:
        return self._borrowed().propose(path, budget, max_depth=max_depth, interrupted=interrupted)

    def couple(self, noise: NoiseSource | None, temperature: float) -> None:
        couple(self._borrowed(), noise, temperature)

    def close(self) -> None:
        if self._give_back is not None:
            give_back, self._give_back = self._give_back, None
            self.drafter.close()
            give_back()

    def _borrowed(self) -> Drafter:
        if self._give_back is None:
            raise RuntimeError(f"the drafter {self.name!r} was closed: its stream has ended")
        return self.drafter
