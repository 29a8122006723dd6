"""Which activation codec pays on a link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CodecOption:
    """What a codec costs for one row, as measured by the caller.

    :param row_bytes: bytes of one row on the wire
    :param row_s: seconds to encode and decode one row (both ends added)
    :param frame_s: seconds per frame whatever the rows
    :param lossless: whether the target distribution stays the swarm's own
    """

    name: str
    row_bytes: float
    row_s: float = 0.0
    frame_s: float = 0.0
    lossless: bool = True

    def __post_init__(self) -> None:
        if min(self.row_bytes, self.row_s, self.frame_s) < 0:
            raise ValueError(f"codec {self.name!r} has a negative cost")

    def time(self, rows: int, bandwidth_bps: float) -> float:
        """Seconds that a frame of `rows` costs beyond the link's delay."""
        return self.frame_s + rows * (self.row_s + 8.0 * self.row_bytes / bandwidth_bps)


def choose_codec(
    options: Sequence[CodecOption],
    bandwidth_bps: float,
    rows: int,
    *,
    current: str | None = None,
    allow_lossy: bool = False,
    hysteresis: float = 0.1,
) -> CodecOption:
    """The option with the least time per frame; the current one stays unless another saves more than `hysteresis` of
    it.

    Against sending rows as they are, a codec wins iff `bandwidth < 8·saved_bytes / (t_encode + t_decode)`.

    :param rows: rows per frame that the plan sends
    :raises ValueError: no option is allowed, or the bandwidth or the rows are not positive
    """
    if not bandwidth_bps > 0 or rows < 1:
        raise ValueError(f"no codec can be chosen for {rows} rows at {bandwidth_bps} bit/s")
    allowed = [option for option in options if option.lossless or allow_lossy]
    if not allowed:
        raise ValueError("no lossless codec is on offer, and lossy ones were not allowed")
    best = min(allowed, key=lambda option: option.time(rows, bandwidth_bps))
    kept = next((option for option in allowed if option.name == current), None)
    if kept is None:
        return best
    worth_it = best.time(rows, bandwidth_bps) < (1.0 - hysteresis) * kept.time(rows, bandwidth_bps)
    return best if worth_it else kept


def break_even_bandwidth(plain: CodecOption, packed: CodecOption, rows: int) -> float:
    """Bandwidth (bit/s) below which `packed`, being the smaller one, is faster than `plain`: 0 if never, infinite if
    always.

    `8·saved_bytes / (added codec time)`.
    """
    saved = rows * (plain.row_bytes - packed.row_bytes)
    added = packed.frame_s - plain.frame_s + rows * (packed.row_s - plain.row_s)
    if saved <= 0:
        return 0.0
    return float("inf") if added <= 0 else 8.0 * saved / added
