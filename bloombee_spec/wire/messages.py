"""Control messages that open, link and close sessions."""

from __future__ import annotations

from dataclasses import dataclass

from bloombee_spec.wire.frames import MAX_LANES, MAX_POSITION
from bloombee_spec.wire.ledger import COMMIT, DATA, KV
from bloombee_spec.wire.message import Message, in_range

SESSION_BYTES = 16
DIGEST_BYTES = 8
MAX_STAGES = 256
MAX_NAME = 256


@dataclass(frozen=True)
class Hello(Message):
    """First frame of a stream between stages. `role` is `data` (from the predecessor), `commit` (from the
    verifier) or `kv` (from the donor of a prepared session)."""

    session: bytes
    stage: int
    role: str

    def __post_init__(self) -> None:
        in_range(stage=(self.stage, 0, MAX_STAGES), session=(len(self.session), SESSION_BYTES, SESSION_BYTES))
        if self.role not in (DATA, COMMIT, KV):
            raise ValueError(f"role is {self.role[:20]!r}")


@dataclass(frozen=True)
class Open(Message):
    """First frame of a control stream, client to stage. Peers are base58 peer ids; None stands for the client itself.

    :param stage: this stage's index on the route; `stages` their number
    :param start: first block, `end` one past the last
    :param lanes: streams (batch rows); each gets its own KV of `arena + max_length` columns
    :param previous: who sends activations; `next` who gets them; `verifier` who commits
    :param next_stage: what the next stage is asked for by this session's id
    :param listeners: verifier only: the other stages `(peer, …)` in route order, who get commits directly
    :param embed: this stage turns token ids into rows (first stage); `verify` this stage applies the LM head (last
        stage)
    :param codec: names of the activation codecs that may be used towards the next hop, joined by `|`, the first one
        in use; `codec_in` of those from the previous hop
    :param rule: last stage only: judge rounds by this rule (`sampling.round_rules`), which the client commits
    :param resume: id of an earlier session of this client, whose KV at this server is to be gone on with, as stage
        `resume_stage`; `resume_lengths` tokens of each lane that are still the client's text
    :param prepared: no ring yet: the session takes KV or rows of a text, for another one that will go on with it;
        `donor` may send KV of its blocks, `previous` rows
    """

    session: bytes
    stage: int
    stages: int
    start: int
    end: int
    lanes: int
    max_length: int
    arena: int
    previous: str | None
    next: str | None
    verifier: str | None
    listeners: tuple[str, ...]
    embed: bool
    verify: bool
    codec: str
    codec_in: str
    adapter: str | None = None
    rule: str | None = None
    resume: bytes | None = None
    resume_stage: int = 0
    resume_lengths: tuple[int, ...] = ()
    prepared: bool = False
    donor: str | None = None

    def __post_init__(self) -> None:
        in_range(
            session=(len(self.session), SESSION_BYTES, SESSION_BYTES),
            resume=(SESSION_BYTES if self.resume is None else len(self.resume), SESSION_BYTES, SESSION_BYTES),
            resume_stage=(self.resume_stage, 0, MAX_STAGES - 1),
            resume_lengths=(len(self.resume_lengths), 0 if self.resume is None else self.lanes, self.lanes),
            stages=(self.stages, 1, MAX_STAGES),
            stage=(self.stage, 0, self.stages - 1),
            end=(self.end, self.start + 1, 1 << 16),
            start=(self.start, 0, 1 << 16),
            lanes=(self.lanes, 1, MAX_LANES),
            max_length=(self.max_length, 1, MAX_POSITION),
            arena=(self.arena, 1, MAX_POSITION),
            listeners=(len(self.listeners), 0, self.stages),
        )
        for peer in (
            self.previous,
            self.next,
            self.verifier,
            self.codec,
            self.codec_in,
            self.adapter,
            self.rule,
            self.donor,
            *self.listeners,
        ):
            if peer is not None and len(peer) > MAX_NAME:
                raise ValueError("a name is too long")
        if self.resume is None and self.resume_lengths:
            raise ValueError("lengths without a session to resume")
        for length in self.resume_lengths:
            in_range(resume_length=(length, 0, self.max_length))
        if self.prepared and (self.verify or self.next is not None or self.resume is not None):
            raise ValueError("a prepared session has no neighbours and no past")
        if self.embed and self.stage != 0:
            raise ValueError("only the first stage embeds")
        if self.verify and self.stage != self.stages - 1:
            raise ValueError("only the last stage verifies")
        if self.rule is not None and (self.verify or self.verifier or self.stage != self.stages - 1):
            raise ValueError("rounds are judged by the last stage, and then nobody but the client commits")


@dataclass(frozen=True)
class Opened(Message):
    """The stage has allocated the session. `arena` are the credits granted per lane.

    With `resume`, by lane: `held` tokens whose KV is here, `digests` of those tokens, and `logged`, the first position
    from which on, up to `held`, the stage can send its output rows again.
    """

    arena: int
    max_prefill: int
    held: tuple[int, ...] = ()
    digests: tuple[bytes, ...] = ()
    logged: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.held) == len(self.digests) == len(self.logged) <= MAX_LANES:
            raise ValueError("what is held is told for each lane")
        if any(len(digest) != DIGEST_BYTES for digest in self.digests):
            raise ValueError(f"a digest has {DIGEST_BYTES} bytes")
        if not all(0 <= first <= held <= MAX_POSITION for first, held in zip(self.logged, self.held)):
            raise ValueError("what is held is out of range")


@dataclass(frozen=True)
class Link(Message):
    """All stages are open: connect to the next one (and, at the verifier, to the listeners) now.

    By lane, empty for none: `next_holds` tokens whose KV the next stage has, so that it needs no rows of them; with
    `replay` the stage first sends its logged rows from there up to this position.
    """

    next_holds: tuple[int, ...] = ()
    replay: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if max(len(self.next_holds), len(self.replay)) > MAX_LANES:
            raise ValueError("too many lanes")
        for position in (*self.next_holds, *self.replay):
            in_range(position=(position, 0, MAX_POSITION))


@dataclass(frozen=True)
class Linked(Message):
    """The stage's own outgoing streams are open."""


@dataclass(frozen=True)
class Close(Message):
    """Client to stage: the session is over; answered with `Statistics`. With `keep`, another one will go on with its
    KV shortly."""

    keep: bool = False
