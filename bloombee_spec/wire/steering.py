"""Control messages of a session that is open: rules, codecs, measurements, trouble."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bloombee_spec.wire import ledger
from bloombee_spec.wire.frames import MAX_LANES, MAX_POSITION
from bloombee_spec.wire.message import Message, in_range
from bloombee_spec.wire.messages import MAX_NAME, MAX_STAGES
from bloombee_spec.wire.node_list import MAX_TOKEN

MAX_STOP_TOKENS = 1024
MAX_POINTS = 16


@dataclass(frozen=True)
class Rule(Message):
    """How tokens of a lane are chosen in `epoch`; to the first and the last stage, before the prefix of that epoch.

    :param stop_tokens: after one of these is committed, nothing more is
    :param sampling: `SamplingSpec.to_wire()`; empty means greedy
    :param row: row of the noise (batch row of the call)
    """

    lane: int
    epoch: int
    stop_tokens: tuple[int, ...]
    sampling: dict[str, Any]
    row: int

    def __post_init__(self) -> None:
        in_range(
            lane=(self.lane, 0, MAX_LANES - 1),
            epoch=(self.epoch, 0, MAX_POSITION),
            stop_tokens=(len(self.stop_tokens), 0, MAX_STOP_TOKENS),
            row=(self.row, 0, MAX_POSITION),
        )
        for token in self.stop_tokens:
            in_range(stop_token=(token, 0, MAX_TOKEN))


@dataclass(frozen=True)
class Failure(Message):
    """The session ends here; `reason` is for the user, `blame` the stage whose fault it is if it is another one."""

    reason: str
    blame: int | None = None

    def __post_init__(self) -> None:
        in_range(blame=(self.blame or 0, 0, MAX_STAGES - 1))


@dataclass(frozen=True)
class Ping(Message):
    """Client to stage: are you there? Answered with `Pong` at once, whatever the stage computes."""


@dataclass(frozen=True)
class Pong(Message):
    """:param held: of a prepared session, by lane: tokens whose KV is here"""

    held: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        in_range(lanes=(len(self.held), 0, MAX_LANES))


@dataclass(frozen=True)
class UseCodec(Message):
    """Client to stage: encode rows for the next hop in this one of the codecs that were agreed on for it."""

    codec: str

    def __post_init__(self) -> None:
        in_range(codec=(len(self.codec), 1, MAX_NAME))


@dataclass(frozen=True)
class Report(Message):
    """Stage to client, now and then while it works: what the planner needs to know. Seconds and bit/s.

    :param next_rtt_s: round trip to the next stage, `first_rtt_s` from the verifier to the first stage, as the
        greetings between them took
    :param bandwidth_bps: of the link from the previous stage, as its frames arrive; None while unknown
    :param queue_s: how long a row waits here for the work of others
    :param compute: `(rows, seconds, rows, seconds, ...)` of a forward through all blocks of the server
    :param codec_costs: `(bytes, seconds)` per row of each codec of the outgoing link, flat
    """

    next_rtt_s: float | None = None
    first_rtt_s: float | None = None
    bandwidth_bps: float | None = None
    queue_s: float = 0.0
    compute: tuple[float, ...] = ()
    codec_costs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        numbers = [self.next_rtt_s or 0.0, self.first_rtt_s or 0.0, self.queue_s, *self.compute]
        if not all(0 <= cost < 1e9 for cost in self.codec_costs) or len(self.codec_costs) > 2 * MAX_POINTS:
            raise ValueError("codec costs are out of range")
        if not all(0 <= number < 1e5 for number in numbers) or not 0 <= (self.bandwidth_bps or 0.0) < 1e15:
            raise ValueError("a number of a report is out of range")
        if len(self.compute) % 2 or len(self.compute) > 2 * MAX_POINTS:
            raise ValueError(f"{len(self.compute)} numbers of compute times")


@dataclass(frozen=True)
class Statistics(Message):
    """What one stage did for one session. Times in seconds, sizes in bytes of frames.

    :param traffic: by stream and direction, as in `wire.ledger`, up to this message
    """

    computed_rows: int
    dropped_rows: int
    forwards: int
    compute_s: float
    wait_s: float
    bytes_in: int
    bytes_out: int
    traffic: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        ledger.from_wire(self.traffic)
