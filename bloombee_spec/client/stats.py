"""What one `generate` call did, counted where it happened."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from bloombee_spec.wire.steering import Statistics


@dataclass(frozen=True)
class SpecStats:
    """Figures of the last `generate` call; rows and tokens over all streams of the batch.

    :param mode: `ring`, `relay` or `host`
    :param tokens: generated tokens
    :param laps: round trips that the slowest stream waited for; equals `tokens` per stream when nothing is speculated
    :param hits: committed tokens that were candidates already in flight; `misses` the others
    :param proposed: candidates sent
    :param hits_by_depth: depth below the root when sent, to committed candidates; `sent_by_depth` alike
    :param rows_computed: rows that any stage computed, prompt included; `rows_dropped` rows that were dropped as dead
    :param bytes_up: bytes that the client wrote to its streams; `bytes_down` that it received
    :param draft_s: seconds that drafters spent on candidates, `hedge_s` on answers to other outcomes; `hedge_hits`
        misses whose answer was ready
    :param retries: times that the ring broke and was opened again; `moves` that it went on elsewhere because a server
        announced to leave; `resumed` tokens whose KV the stages of the earlier ring kept, or were prepared with;
        `inexact` tokens of the session whose KV moved at a lossy level (`SpecConfig.churn_quality`)
    :param modes: committed tokens by the mode of the plan in force: `off`, `tree`, `stream`, or `unplanned` while the
        planner knew too little or was not asked
    :param lap_s: seconds of a lap without speculation, as measured; `legs` one-way delay (s) and bandwidth (bit/s) of
        each link as the planner saw it: client to first stage, between stages, last stage to client
    :param codecs: activation codec that each of these links used last
    :param route: one line per stage: blocks and peer
    :param stages: what each stage counted for the whole session, when it answered; `traffic` what the client did, see
        `wire.ledger.from_wire`
    """

    mode: str
    tokens: int
    laps: int
    hits: int = 0
    misses: int = 0
    proposed: int = 0
    hits_by_depth: dict[int, int] = field(default_factory=dict)
    sent_by_depth: dict[int, int] = field(default_factory=dict)
    rows_computed: int = 0
    rows_dropped: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    candidate_bytes_up: int = 0
    commit_bytes_down: int = 0
    open_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    hedge_s: float = 0.0
    hedge_hits: int = 0
    hedge_misses: int = 0
    retries: int = 0
    moves: int = 0
    resumed: int = 0
    inexact: int = 0
    modes: dict[str, int] = field(default_factory=dict)
    lap_s: float = 0.0
    legs: tuple[tuple[float, float], ...] = ()
    codecs: tuple[str, ...] = ()
    route: tuple[str, ...] = ()
    stages: tuple[Statistics | None, ...] = ()
    traffic: tuple[int, ...] = ()

    @property
    def tokens_per_lap(self) -> float:
        return self.tokens / self.laps if self.laps else 0.0

    @property
    def acceptance(self) -> float:
        """Share of committed tokens that were candidates in flight."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 0.0


@dataclass
class Tally:
    """The same, while it is being counted."""

    def plus(self, other: Tally, *, beside: bool = False) -> Tally:
        """Both together: one after the other, or `beside` each other, where the slower one's laps count."""
        total = Tally()
        for each in (self, other):
            for name, value in vars(each).items():
                if isinstance(value, Counter):
                    getattr(total, name).update(value)
                elif name == "laps" and beside:
                    total.laps = max(total.laps, value)
                else:
                    setattr(total, name, getattr(total, name) + value)
        return total

    tokens: int = 0
    laps: int = 0
    hits: int = 0
    misses: int = 0
    proposed: int = 0
    hits_by_depth: Counter[int] = field(default_factory=Counter)
    sent_by_depth: Counter[int] = field(default_factory=Counter)
    rows_computed: int = 0
    rows_dropped: int = 0
    candidate_bytes_up: int = 0
    commit_bytes_down: int = 0
    draft_s: float = 0.0
    hedge_s: float = 0.0
    hedge_hits: int = 0
    hedge_misses: int = 0
    retries: int = 0
    moves: int = 0
    resumed: int = 0
    modes: Counter[str] = field(default_factory=Counter)
