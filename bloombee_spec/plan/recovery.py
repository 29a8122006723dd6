"""How a server gets at the KV of a text that others hold: estimated seconds of each way, numbers in, choice out.

Boundary rows of a span of m blocks are `2·m·kv_heads/heads` times smaller than its KV, but must be computed again; KV
is there when it arrives. Computing again from the token ids costs the same rows on the same last link and more compute
before it, so it is only for what nobody kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from bloombee_spec.kv.levels import Level, LevelCost, plan_seconds

CHUNK = 256
EXACT_SHARE = 0.7  # of raw bytes, as the lossless codecs leave on activations and KV
ENCODE_BPS, DECODE_BPS = 200e6, 300e6  # bytes per second of the lossless KV level on one core, see docs/kv.md
WAYS = ("rows", "kv")


@dataclass(frozen=True, slots=True)
class Recovery:
    """:param row_bytes: of one token's boundary row; `kv_bytes` of its KV in the span, both raw
    :param row_s: seconds per token to compute the span's blocks, in chunks
    :param bandwidth_bps: of the link into the new server
    """

    tokens: int
    row_bytes: float
    kv_bytes: float
    row_s: float
    bandwidth_bps: float
    delay_s: float = 0.0

    def seconds(self, way: str) -> float:
        """Until the new server holds the text; sender, link and receiver work at the same time.

        :param way: `rows` or `kv`
        """
        size, decode = (self.row_bytes, self.row_s) if way == "rows" else (self.kv_bytes, self.kv_bytes / DECODE_BPS)
        cost = LevelCost(EXACT_SHARE * size, size / ENCODE_BPS, decode)
        chunks = [min(CHUNK, self.tokens - at) for at in range(0, self.tokens, CHUNK)]
        levels = [Level.LOSSLESS] * len(chunks)
        return plan_seconds(chunks, levels, {Level.LOSSLESS: cost}, self.bandwidth_bps, self.delay_s)

    @property
    def best(self) -> str:
        return min(WAYS, key=self.seconds)
