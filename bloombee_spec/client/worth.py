"""When a candidate pays: what one more row costs on this route against what a hit saves."""

from __future__ import annotations

from collections.abc import Sequence

from bloombee_spec.client.ring import StageInfo
from bloombee_spec.hosts.base import Span

ASSUMED_LEG_S = 0.05  # one-way delay of a link before a lap was measured
ASSUMED_BANDWIDTH = 100e6  # bit/s
FLOOR, CEILING = 0.01, 0.5
WEIGHT = 0.2  # of a new lap in the running estimate
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Worth:
    """A candidate whose path has probability P saves a lap with probability P and costs a row at every stage, so it
    pays iff
    `P > row_s / lap_s`. Rows of one forward share the pass over the weights: a row's own cost is the slope of the
    measured times.

    :param spans: the route; `infos` what its servers measured at start (seconds for 1, 8 and 64 rows through all their
        blocks)
    """

    def __init__(self, spans: Sequence[Span], infos: Sequence[StageInfo]):
        shares = [(span.end - span.start) / max(1, info.end - info.start) for span, info in zip(spans, infos)]
        self._compute_s = sum(share * info.row_seconds.get(1, 0.0) for share, info in zip(shares, infos))
        slopes = [max(0.0, info.row_seconds.get(8, 0.0) - info.row_seconds.get(1, 0.0)) / 7 for info in infos]
        row_bytes = infos[0].hidden * BYTES.get(infos[0].dtype, 4)
        self.row_s = sum(share * slope for share, slope in zip(shares, slopes))
        self.row_s += (len(spans) - 1) * 8 * row_bytes / ASSUMED_BANDWIDTH
        self.lap_s = self._compute_s + len(spans) * ASSUMED_LEG_S
        self._measured = False

    def observe_lap(self, seconds: float) -> None:
        """A lap that nothing shortened: from one miss to the next commit, without candidates between."""
        self.lap_s = seconds if not self._measured else (1 - WEIGHT) * self.lap_s + WEIGHT * seconds
        self._measured = True

    @property
    def min_probability(self) -> float:
        return min(CEILING, max(FLOOR, self.row_s / max(self.lap_s, 1e-6)))
