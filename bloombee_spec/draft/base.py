"""The drafter seam: who proposes candidates. Anything that can guess the next tokens of a sequence is a drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Proposal:
    """One proposed token of a small tree.

    :param parent: index of an earlier proposal in the same list, or -1 for the anchor
    :param token: token id in the target's vocabulary
    :param prob: estimated chance that the target commits this token, given that its parent is committed; in (0, 1]
    """

    parent: int
    token: int
    prob: float


def never() -> bool:
    return False


class Drafter(ABC):
    """Proposes continuations of one stream (one batch row). Not shared between threads.

    Only committed tokens ever enter a drafter's state (`start`, `observe`); candidates are passed in as `path` and
    leave no trace, so that a rejected draft can never poison later ones.
    """

    name: str = "drafter"
    instant: bool = False
    """True: an answer takes microseconds, so the decode loop may wait for it; otherwise drafting has a thread of its
    own."""

    @abstractmethod
    def start(self, prompt: Sequence[int]) -> None:
        """Begin a stream: `prompt` are the committed token ids so far. Called again when the history was edited."""

    @abstractmethod
    def observe(self, tokens: Sequence[int]) -> None:
        """Append newly committed tokens."""

    @abstractmethod
    def propose(
        self, path: Sequence[int], budget: int, *, max_depth: int = 64, interrupted: Callable[[], bool] = never
    ) -> list[Proposal]:
        """A tree of at most `budget` proposals below the anchor, parents before children, best first.

        :param path: candidate tokens that follow the committed ones; the anchor is the last of them, or the last
            committed token if there is none
        :param max_depth: longest chain of proposals below the anchor
        :param interrupted: polled between steps of a slow drafter; once true, return what is there
        :returns: possibly nothing: a drafter with no good guess says so, which costs nobody anything
        """

    def close(self) -> None:  # noqa: B027 (most drafters hold nothing)
        """The stream ended; release what it holds. A shared corpus and the like may be updated here."""
