"""How a server gets at the KV of a text that others hold: estimated seconds of each way, numbers in, choice out.

Boundary rows of a span of m blocks are `2·m·kv_heads/heads` times smaller than its KV, but must be computed again; KV
is there when it arrives. Computing again from the token ids costs the same rows on the same last link and more compute
before it, so it is only for what nobody kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bloombee_spec.kv.levels import Level, LevelCost, LevelPlan, choose_levels, plan_seconds

CHUNK = 256
EXACT_SHARE = 0.7  # of raw bytes, as the lossless codecs leave on activations and KV
ENCODE_BPS, DECODE_BPS = 200e6, 300e6  # bytes per second of the lossless KV level on one core, see docs/kv.md
WAYS = ("rows", "kv")
# Of the lossy levels, on one core, see docs/kv.md: bits per value, and values per second encoded and decoded.
LOSSY = {Level.INT8: (8.25, 160e6, 340e6), Level.FINE: (3.54, 15e6, 40e6), Level.COARSE: (2.32, 16e6, 32e6)}


@dataclass(frozen=True, slots=True)
class Recovery:
    """:param row_bytes: of one token's boundary row; `kv_bytes` of its KV in the span, both raw
    :param row_s: seconds per token to compute the span's blocks, in chunks
    :param bandwidth_bps: of the link into the new server
    :param value_bytes: of one number
    """

    tokens: int
    row_bytes: float
    kv_bytes: float
    row_s: float
    bandwidth_bps: float
    delay_s: float = 0.0
    value_bytes: int = 2

    def seconds(self, way: str) -> float:
        """Until the new server holds the text exactly; sender, link and receiver work at the same time.

        :param way: `rows` or `kv`
        """
        size, decode = (self.row_bytes, self.row_s) if way == "rows" else (self.kv_bytes, self.kv_bytes / DECODE_BPS)
        cost = LevelCost(EXACT_SHARE * size, size / ENCODE_BPS, decode)
        levels = [Level.LOSSLESS] * len(self.chunks)
        return plan_seconds(self.chunks, levels, {Level.LOSSLESS: cost}, self.bandwidth_bps, self.delay_s)

    @property
    def chunks(self) -> list[int]:
        """Tokens of each chunk."""
        return [min(CHUNK, self.tokens - at) for at in range(0, self.tokens, CHUNK)]

    def choose(self, worst: Level, deadline_s: float, ways: tuple[str, ...] = WAYS) -> tuple[str, LevelPlan]:
        """The way, and the level of each chunk of KV: exact if that is there in time, else the most exact that is.

        :param worst: lossiest level that may be used; `LOSSLESS` leaves no choice but the way
        :param ways: which ones there are
        """
        way = min(ways, key=self.seconds)
        exact = LevelPlan((Level.LOSSLESS,) * len(self.chunks), self.seconds(way))
        if worst is Level.LOSSLESS or exact.seconds <= deadline_s or "kv" not in ways:
            return way, exact
        costs = {level: cost for level, cost in self._costs().items() if level <= worst}
        lossy = choose_levels(
            self.chunks, costs, self.bandwidth_bps, allow_lossy=True, deadline_s=deadline_s, delay_s=self.delay_s
        )
        return ("kv", lossy) if lossy.seconds < exact.seconds else (way, exact)

    def _costs(self) -> Mapping[Level, LevelCost]:
        size, values = self.kv_bytes, self.kv_bytes / self.value_bytes
        exact = LevelCost(EXACT_SHARE * size, size / ENCODE_BPS, size / DECODE_BPS)
        lossy = {
            level: LevelCost(bits / 8 * values, values / encoded, values / decoded)
            for level, (bits, encoded, decoded) in LOSSY.items()
        }
        return {Level.LOSSLESS: exact, **lossy}
