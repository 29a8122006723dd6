"""How many candidates one lap carries when each lap is a chain: as many as bring more tokens than they cost time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

from bloombee_spec.draft.base import Drafter
from bloombee_spec.plan.compute import ComputeProfile

ROW_COST = 0.02  # least price of a row, in laps of one row: bytes and other people's compute are never free
CHEAP = 0.03  # a drafter that takes less than this share of a lap is asked for the longest chain
CERTAIN = 0.99  # no candidate counts as more likely than this
DOUBT = 0.5  # verdicts that the belief before the first one counts for: that the drafter's probabilities are right,
EVEN = 0.5  # and that this share of its candidates is
FIRST = 8  # candidates to ask a drafter for whose speed is not known yet
FORGET = 0.5 ** (1 / 64)  # of a verdict by each later one
PROBE = 4  # candidates sent to see whether speculation pays again
PATIENCE, MAX_PATIENCE = 8, 32  # laps without candidates before a probe; doubles with each probe without a hit


@dataclass(frozen=True)
class Chain:
    """Candidates in order, each the parent of the next, with the drafter's chance of each given its parent."""

    tokens: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, length: int) -> Chain:
        return Chain(self.tokens[:length], self.chances[:length])


def draft_chain(drafter: Drafter, most: int, vocab_size: int) -> Chain:
    """The likeliest path down the drafter's trees, at most `most` tokens; a token outside the vocabulary ends it."""
    tokens: list[int] = []
    chances: list[float] = []
    while len(tokens) < most:
        proposals = drafter.propose(tokens, most - len(tokens), max_depth=most - len(tokens))
        best: dict[int, int] = {}  # parent -> its likeliest child
        for index, proposal in enumerate(proposals):
            rival = best.get(proposal.parent)
            if proposal.parent < index and (rival is None or proposal.prob > proposals[rival].prob):
                best[proposal.parent] = index
        at, before = -1, len(tokens)
        while at in best and len(tokens) < most:
            at = best[at]
            if not 0 <= proposals[at].token < vocab_size:
                return Chain(tuple(tokens), tuple(chances))
            tokens.append(proposals[at].token)
            chances.append(proposals[at].prob)
        if len(tokens) == before:
            break
    return Chain(tuple(tokens), tuple(chances))


class ChainLength:
    """Decides for one stream, from its own verdicts and lap times.

    A chain with chances p1, p2, … yields `1 + p1 + p1·p2 + …` tokens for the time of a lap with that many rows: it is
    cut where tokens per second are highest, possibly before its first candidate. The drafter's probabilities are
    corrected by what came true of them. While nothing pays, a few candidates go out now and then to see whether that
    has changed.

    :param min_chance: a candidate whose path is less likely than this is not sent
    """

    def __init__(self, min_chance: float):
        self._min_chance = min_chance
        self._laps: ComputeProfile | None = None  # seconds of a lap by its rows
        self._drafts = 0
        self._draft_s = 0.0  # seconds per drafted candidate
        self._hits = self._expected = self._trials = 0.0  # discounted; expected: sum of the drafter's probabilities
        self._idle = 0  # laps since candidates were last sent
        self._patience = PATIENCE

    def room(self, most: int) -> int:
        """How many candidates to ask the drafter for, before each lap; 0: let it rest."""
        self._idle += 1
        if self._drafts < 2:
            return min(most, FIRST)
        if self._draft_s * most <= CHEAP * self._lap_s(1):
            return most
        average = min(CERTAIN, (self._hits + DOUBT * EVEN) / (self._trials + DOUBT))
        worth = self._best(repeat(average, most), lambda k: self._lap_s(k + 1) + k * self._draft_s)
        return min(most, PROBE) if worth == 0 and self._probe_due else worth

    def cut(self, chances: Sequence[float]) -> int:
        """How many candidates of a drafted chain to send; their drafting is paid already.

        :param chances: the drafter's probability of each, given its parent
        """
        right = (self._hits + DOUBT) / (self._expected + DOUBT)
        length = self._best((min(CERTAIN, right * chance) for chance in chances), lambda k: self._lap_s(k + 1))
        if length == 0 and chances and self._probe_due:
            self._patience = min(2 * self._patience, MAX_PATIENCE)
            length = min(PROBE, len(chances))
        if length:
            self._idle = 0
        return length

    def learn_verdicts(self, chances: Sequence[float], hits: int) -> None:
        """
        :param chances: of the candidates that were judged: those committed, and the first that was not
        :param hits: how many were committed
        """
        for index, chance in enumerate(chances):
            self._hits = FORGET * self._hits + (index < hits)
            self._expected = FORGET * self._expected + chance
            self._trials = FORGET * self._trials + 1
        if hits:
            self._patience = PATIENCE

    def learn_lap(self, rows: int, seconds: float) -> None:
        """A lap of so many rows took so long."""
        if self._laps is None:
            base = seconds / _least(rows)
            self._laps = ComputeProfile(tuple((float(n), base * _least(n)) for n in (1, 8, 64)))
        else:
            self._laps = self._laps.updated(rows, seconds)

    def learn_drafting(self, candidates: int, seconds: float) -> None:
        """The drafter was asked for so many candidates, whatever it found. The first time may include reading a prompt,
        and is not learnt from.
        """
        self._drafts += 1
        if self._drafts > 1:
            self._draft_s += (0.2 if self._drafts > 2 else 1.0) * (seconds / candidates - self._draft_s)

    @property
    def _probe_due(self) -> bool:
        return self._idle >= self._patience

    def _lap_s(self, rows: int) -> float:
        if self._laps is None:
            return _least(rows)
        return max(self._laps.time(rows), self._laps.time(1) * _least(rows), 1e-9)

    def _best(self, chances: Iterable[float], seconds: Callable[[int], float]) -> int:
        """The length with the most expected tokens per second."""
        best, best_rate = 0, 1.0 / seconds(0)
        path = expected = 1.0
        for length, chance in enumerate(chances, 1):
            path *= chance
            if path < self._min_chance:
                break
            expected += path
            rate = expected / seconds(length)
            if rate > best_rate:
                best, best_rate = length, rate
        return best


def _least(rows: int) -> float:
    """Least time of a lap, in laps of one row."""
    return 1.0 + ROW_COST * (rows - 1)
