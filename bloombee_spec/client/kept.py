"""What the stages of a broken ring still hold, and how a new ring goes on with it.

A stage that is new gets the rows that it lacks from the stage before it, which has kept them; only what nobody kept is
computed again from the token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bloombee_spec.client.prefix import common_prefix
from bloombee_spec.hosts.base import Span
from bloombee_spec.server.holding import digest
from bloombee_spec.wire.messages import Open, Opened

Source = tuple[bytes, int]  # a session, and the stage that it asks for


@dataclass
class Ready:
    """What other servers were prepared with.

    :param sources: their spans, and under which name they hold the text; `inexact` tokens of it whose KV moved at a
        lossy level
    """

    sources: dict[Span, Source] = field(default_factory=dict)
    inexact: int = 0


@dataclass
class Kept:
    """
    :param sources: spans whose servers hold KV of this text, and under which name
    :param texts: by lane, the committed tokens, as the client knows them
    :param arena: columns for candidates in those buffers
    """

    sources: dict[Span, Source]
    texts: list[tuple[int, ...]]
    arena: int

    def drop(self, peer: str | None) -> None:
        """That server is to blame, or leaves: it will not be asked."""
        self.sources = {span: source for span, source in self.sources.items() if span.peer != peer}

    def lengths(self, texts: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """By lane, how many of the first tokens may be gone on with. The last token's row is always computed again,
        since what follows it is decided by it."""
        return tuple([max(0, min(common_prefix(old, new), len(new) - 1)) for old, new in zip(self.texts, texts)])


@dataclass(frozen=True)
class LanePlan:
    """
    :param start: tokens that all stages hold before the text goes on
    :param first: what the first stage holds; the ids from there up to `start` are sent to it
    :param next_holds: by stage, the tokens that the stage behind it holds
    :param replay: by stage, up to where it sends its kept rows from `next_holds` on; 0: none
    """

    start: int
    first: int
    next_holds: tuple[int, ...]
    replay: tuple[int, ...]


def plan_lane(held: Sequence[int], logged: Sequence[int], length: int) -> LanePlan:
    """
    :param held: by stage, tokens whose KV it holds; `logged` where its kept rows begin, which end at `held`
    :param length: of the text that is to be gone on with; what is held beyond it is not used
    """
    holds = [min(n, length) for n in held]
    start = max(holds, default=0)
    n = len(holds)
    next_holds, replay = [0] * n, [0] * n
    for i in range(n - 1, 0, -1):
        before = i - 1
        next_holds[before] = holds[i]
        if holds[i] >= start:
            continue
        if logged[before] <= holds[i]:
            replay[before] = holds[before] if holds[before] > holds[i] else 0
        else:  # its rows are not kept from there on: they are computed again
            holds[before] = min(holds[before], holds[i])
    return LanePlan(start, holds[0] if holds else 0, tuple(next_holds), tuple(replay))


def plans(stages: Sequence[Opened], lengths: Sequence[int], texts: Sequence[Sequence[int]]) -> list[LanePlan]:
    """By lane; what a stage holds of another text than the client's counts as nothing."""
    held = [_agreed(opened, texts) for opened in stages]
    return [
        plan_lane([stage[lane][0] for stage in held], [stage[lane][1] for stage in held], length)
        for lane, length in enumerate(lengths)
    ]


def _agreed(opened: Opened, texts: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """By lane, `(held, logged)` of a stage, as far as its text is the client's."""
    if len(opened.held) != len(texts):  # nothing, or nonsense
        return [(0, 0)] * len(texts)
    told = zip(texts, opened.held, opened.digests, opened.logged)
    return [(n, logged) if digest(text[:n]) == theirs else (0, 0) for text, n, theirs, logged in told]


def resuming(request: Open, source: Source | None, lengths: tuple[int, ...]) -> Open:
    if source is None:
        return request
    return replace(request, resume=source[0], resume_stage=source[1], resume_lengths=lengths)
