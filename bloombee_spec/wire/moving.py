"""Control messages with which a client moves KV from one server to another. Nobody else can order that."""

from __future__ import annotations

from dataclasses import dataclass

from bloombee_spec.kv.chunks import KEY_BYTES
from bloombee_spec.wire.frames import MAX_LANES, MAX_POSITION, MAX_TOKEN
from bloombee_spec.wire.message import Message, in_range
from bloombee_spec.wire.messages import MAX_NAME, MAX_STAGES, SESSION_BYTES

WHAT = ("rows", "kv")
MIN_RATE = 1e4  # bits per second: an order that is never done holds resources


@dataclass(frozen=True)
class Leaving(Message):
    """Stage to client: this server stops within `seconds`; until then it serves as before."""

    seconds: float

    def __post_init__(self) -> None:
        if not 0 <= self.seconds < 1e5:
            raise ValueError(f"{self.seconds} seconds")


@dataclass(frozen=True)
class Import(Message):
    """Client to a prepared session: its donor is going to send the KV of these tokens of a lane.

    :param start: position of the first one: what the session holds so far
    :param key: of this transfer; every chunk is sealed with it
    :param lossy: whether lossy levels are taken
    """

    lane: int
    start: int
    tokens: tuple[int, ...]
    key: bytes
    lossy: bool = False

    def __post_init__(self) -> None:
        in_range(
            lane=(self.lane, 0, MAX_LANES - 1),
            key=(len(self.key), KEY_BYTES, KEY_BYTES),
            end=(self.start + len(self.tokens), 1, MAX_POSITION),
            start=(self.start, 0, MAX_POSITION),
        )
        for token in self.tokens:
            in_range(token=(token, 0, MAX_TOKEN))


@dataclass(frozen=True)
class Export(Message):
    """Client to a stage: send what it holds of a lane, for the positions `start .. end-1`, to a prepared session.

    :param what: `rows`, its output rows, for the span behind it; `kv`, its KV, for the same span
    :param peer: where that session is; `session`, `stage` its name there
    :param key: seals the chunks (`kv` only); `level` at which they are encoded, see `kv.levels`
    :param blocks: `(first, end)`, those of which KV is sent; all of the stage's unless given
    :param rate: bits per second that the transfer may take, 0: no limit
    """

    what: str
    peer: str
    session: bytes
    stage: int
    lane: int
    start: int
    end: int
    key: bytes = b""
    level: int = 0
    blocks: tuple[int, ...] = ()
    rate: float = 0.0

    def __post_init__(self) -> None:
        if self.what not in WHAT:
            raise ValueError(f"what is {self.what[:20]!r}")
        if self.blocks and (self.what != "kv" or len(self.blocks) != 2 or not self.blocks[0] < self.blocks[1]):
            raise ValueError(f"blocks are {self.blocks[:4]}")
        if self.rate and not MIN_RATE <= self.rate < 1e15:
            raise ValueError(f"a rate of {self.rate} bit/s")
        in_range(
            peer=(len(self.peer), 1, MAX_NAME),
            session=(len(self.session), SESSION_BYTES, SESSION_BYTES),
            stage=(self.stage, 0, MAX_STAGES - 1),
            lane=(self.lane, 0, MAX_LANES - 1),
            start=(self.start, 0, MAX_POSITION),
            end=(self.end, self.start + 1, MAX_POSITION),
            key=(len(self.key), KEY_BYTES if self.what == "kv" else 0, KEY_BYTES if self.what == "kv" else 0),
            level=(self.level, 0, 3),
        )
