"""Bytes by what they are for: one count per stream and direction, kept at either end.

What a relay or a packet counter sees beyond these sums is the transport's own: its headers, encryption, keep-alives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

from bloombee_spec.wire.frames import (
    CommitFrame,
    Encoded,
    Frame,
    Kind,
    NodesFrame,
    PrefixFrame,
    checksum_bytes,
    kind_of,
)

CLIENT, DATA, COMMIT, KV = "client", "data", "commit", "kv"  # roles of a stream: who opened it, and what for
ROLES = (CLIENT, DATA, COMMIT)  # of a ring's own streams, which a ledger counts
LENGTH_BYTES, STAMP_BYTES = 3, 4  # before each frame; the stamp on streams of activations only
CLIENT_END = -1  # in place of a stage's index


@dataclass(slots=True)
class Traffic:
    """Frames that went one way. The last five are bytes and add up to all that was written to the stream.

    :param messages: the frames among them that are control
    :param n_rows: activation rows; `n_ids` token ids of prefixes and candidates; `n_commits` committed tokens
    :param ids: token ids, with the counters and references to parents that go with them
    :param rows: encoded activations
    :param commits: committed tokens, positions and counters
    :param control: messages, rewinds, and rounds of rules that compare distributions
    :param headers: lengths, stamps, versions, checksums
    """

    frames: int = 0
    messages: int = 0
    n_rows: int = 0
    n_ids: int = 0
    n_commits: int = 0
    ids: int = 0
    rows: int = 0
    commits: int = 0
    control: int = 0
    headers: int = 0

    @property
    def bytes(self) -> int:
        return self.ids + self.rows + self.commits + self.control + self.headers

    def sent(self, data: Encoded, stamped: bool = False) -> None:
        """Count a frame that `encode` made."""
        self._count(kind_of(data), len(data), stamped, data.n_tokens, data.n_rows, data.row_bytes)

    def received(self, frame: Frame, size: int, stamped: bool = False) -> None:
        """Count a frame that was decoded from `size` bytes.

        :param stamped: a stamp came before it, not counted in `size`
        """
        if isinstance(frame, PrefixFrame):
            self._count(Kind.PREFIX, size, stamped, len(frame.tokens), frame.n_rows, len(frame.rows))
        elif isinstance(frame, NodesFrame):
            self._count(Kind.NODES, size, stamped, len(frame.nodes), frame.n_rows, len(frame.rows))
        elif isinstance(frame, CommitFrame):
            self._count(Kind.COMMIT, size, stamped, len(frame.tokens))
        else:
            self._count(Kind.CONTROL, size, stamped)

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(*[a + b for a, b in zip(astuple(self), astuple(other))])

    def _count(
        self, kind: int, size: int, stamped: bool, n_tokens: int = 0, n_rows: int = 0, row_bytes: int = 0
    ) -> None:
        headers = 1 + checksum_bytes(size)
        body = size - headers - row_bytes
        self.frames += 1
        self.headers += headers + LENGTH_BYTES + STAMP_BYTES * stamped
        self.n_rows += n_rows
        self.rows += row_bytes
        if kind in (Kind.PREFIX, Kind.NODES):
            self.ids += body
            self.n_ids += n_tokens
        elif kind == Kind.COMMIT:
            self.commits += body
            self.n_commits += n_tokens
        else:
            self.messages += 1
            self.control += body


@dataclass(frozen=True, slots=True)
class Way:
    """One direction of one stream, seen from one end.

    :param role: what the stream is for; a `client` stream is control, ids and commits
    :param other: index of the stage at its other end, CLIENT_END for the client
    :param outgoing: from here to there
    """

    role: str
    other: int
    outgoing: bool


COLUMNS = 3 + len(fields(Traffic))
MAX_WAYS = 2048  # of one party: a verifier of 256 stages has some 512 streams
MAX_COUNT = 1 << 53


class Ledger:
    """All streams of one party. Event loop only."""

    def __init__(self) -> None:
        self.entries: dict[Way, Traffic] = {}

    def of(self, role: str, other: int, *, outgoing: bool) -> Traffic:
        return self.entries.setdefault(Way(role, other, outgoing), Traffic())

    def keep(self, role: str, other: int, traffic: Traffic, *, outgoing: bool) -> None:
        """Somebody else counts on: an outbox, or whoever read the first frame."""
        self.entries[Way(role, other, outgoing)] = traffic

    def total(self, *, outgoing: bool) -> int:
        """Bytes of all ways out, or in."""
        return sum(traffic.bytes for way, traffic in self.entries.items() if way.outgoing == outgoing)

    def to_wire(self) -> tuple[int, ...]:
        """COLUMNS numbers for each way."""
        numbers: list[int] = []
        for way, traffic in self.entries.items():
            numbers += (ROLES.index(way.role), way.other + 1, way.outgoing, *astuple(traffic))
        return tuple(map(int, numbers))


def from_wire(numbers: Sequence[int]) -> dict[Way, Traffic]:
    """Inverse of `Ledger.to_wire`.

    :raises ValueError: not what a ledger sends
    """
    if len(numbers) % COLUMNS or len(numbers) > COLUMNS * MAX_WAYS:
        raise ValueError(f"{len(numbers)} numbers of traffic")
    if any(not 0 <= number < MAX_COUNT for number in numbers):
        raise ValueError("a number of traffic is out of range")
    found = {}
    for at in range(0, len(numbers), COLUMNS):
        role, other, outgoing, *counts = numbers[at : at + COLUMNS]
        if role >= len(ROLES) or outgoing > 1:
            raise ValueError(f"traffic of the unknown role {role}")
        found[Way(ROLES[role], other - 1, bool(outgoing))] = Traffic(*counts)
    return found
