"""Control messages: opening and linking sessions. Each is a frozen dataclass that checks what a peer sent, field by
field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from bloombee_spec.wire.frames import MAX_LANES, MAX_POSITION, MAX_TOKEN, FrameError

SESSION_BYTES = 16
MAX_STAGES = 256
MAX_STOP_TOKENS = 1024
MAX_NAME = 256
MAX_POINTS = 16

T = TypeVar("T", bound="Message")


class Message:
    """Base of control messages; `to_wire` and `from_wire` are inverse, with the class name as the kind."""

    def to_wire(self) -> dict[str, Any]:
        return {
            "kind": type(self).__name__,
            **{k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()},
        }

    @classmethod
    def from_wire(cls: type[T], message: Mapping[str, Any]) -> T:
        """:raises FrameError: another kind, a missing or unknown field, a wrong type, a value out of range"""
        if message.get("kind") != cls.__name__:
            raise FrameError(f"expected a message {cls.__name__}, found {str(message.get('kind'))[:40]}")
        hints = get_type_hints(cls)
        known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        unknown = set(message) - known - {"kind"}
        if unknown:
            raise FrameError(f"{cls.__name__}: unknown field {sorted(map(str, unknown))[0][:40]!r}")
        values = {}
        for name in known & set(message):
            values[name] = _checked(f"{cls.__name__}.{name}", message[name], hints[name])
        try:
            return cls(**values)
        except (TypeError, ValueError) as e:
            raise FrameError(f"{cls.__name__}: {e}") from None


def _checked(name: str, value: Any, hint: Any) -> Any:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        options = get_args(hint)
        if value is None and type(None) in options:
            return None
        return _checked(name, value, next(option for option in options if option is not type(None)))
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise FrameError(f"{name} is not a list")
        return tuple(_checked(name, item, get_args(hint)[0]) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise FrameError(f"{name} is not a mapping")
        return value
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise FrameError(f"{name} is a {type(value).__name__}, expected {hint.__name__}")
    return value


def _in_range(**bounds: tuple[int, int, int]) -> None:
    for name, (value, low, high) in bounds.items():
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}, expected {low} .. {high}")


@dataclass(frozen=True)
class Hello(Message):
    """First frame of a stream between stages. `role` is `data` (from the predecessor) or `commit` (from the
    verifier)."""

    session: bytes
    stage: int
    role: str

    def __post_init__(self) -> None:
        _in_range(stage=(self.stage, 0, MAX_STAGES), session=(len(self.session), SESSION_BYTES, SESSION_BYTES))
        if self.role not in ("data", "commit"):
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

    def __post_init__(self) -> None:
        _in_range(
            session=(len(self.session), SESSION_BYTES, SESSION_BYTES),
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
            *self.listeners,
        ):
            if peer is not None and len(peer) > MAX_NAME:
                raise ValueError("a name is too long")
        if self.embed and self.stage != 0:
            raise ValueError("only the first stage embeds")
        if self.verify and self.stage != self.stages - 1:
            raise ValueError("only the last stage verifies")


@dataclass(frozen=True)
class Opened(Message):
    """The stage has allocated the session. `arena` are the credits granted per lane."""

    arena: int
    max_prefill: int


@dataclass(frozen=True)
class Link(Message):
    """All stages are open: connect to the next one (and, at the verifier, to the listeners) now."""


@dataclass(frozen=True)
class Linked(Message):
    """The stage's own outgoing streams are open."""


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
        _in_range(
            lane=(self.lane, 0, MAX_LANES - 1),
            epoch=(self.epoch, 0, MAX_POSITION),
            stop_tokens=(len(self.stop_tokens), 0, MAX_STOP_TOKENS),
            row=(self.row, 0, MAX_POSITION),
        )
        for token in self.stop_tokens:
            _in_range(stop_token=(token, 0, MAX_TOKEN))


@dataclass(frozen=True)
class Failure(Message):
    """The session ends here; `reason` is for the user, `blame` the stage whose fault it is if it is another one."""

    reason: str
    blame: int | None = None

    def __post_init__(self) -> None:
        _in_range(blame=(self.blame or 0, 0, MAX_STAGES - 1))


@dataclass(frozen=True)
class Close(Message):
    """Client to stage: the session is over; answered with `Statistics`."""


@dataclass(frozen=True)
class Ping(Message):
    """Client to stage: are you there? Answered with `Pong` at once, whatever the stage computes."""


@dataclass(frozen=True)
class Pong(Message):
    pass


@dataclass(frozen=True)
class UseCodec(Message):
    """Client to stage: encode rows for the next hop in this one of the codecs that were agreed on for it."""

    codec: str

    def __post_init__(self) -> None:
        _in_range(codec=(len(self.codec), 1, MAX_NAME))


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
    """What one stage did for one session. Times in seconds, sizes in bytes of frames."""

    computed_rows: int
    dropped_rows: int
    forwards: int
    compute_s: float
    wait_s: float
    bytes_in: int
    bytes_out: int
