"""How many candidates one lap carries when each lap is a chain: as many as bring more tokens than they cost time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

from bloombee_spec.draft.base import Drafter

ROW_COST = 0.02  # least price of a row, in laps of one row: bytes and other people's compute are never free
CHEAP = 0.03  # a drafter that takes less than this share of a lap is asked for the longest chain
CERTAIN = 0.99  # no candidate counts as more likely than this
DOUBT = 0.5  # verdicts that the belief before the first one counts for: that the drafter's probabilities are right,
EVEN = 0.5  # and that this share of its candidates is
FIRST = 8  # candidates to ask a drafter for whose speed is not known yet
FORGET = 0.5 ** (1 / 64)  # of a verdict by each later one
LAPS = 50  # laps that the lap times are remembered for
OUTLIER = 4.0  # a lap counts as at most this many times longer than expected
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


class LapTimes:
    """Seconds of a lap as a straight line over its rows, fitted to recent laps.

    Least squares with exponential forgetting; the slope is drawn towards `ROW_COST`, since laps of equal length say
    nothing about it.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._spread = self._joint = 0.0  # means, variance and covariance

    def learn(self, rows: int, seconds: float) -> None:
        if self._weight:
            seconds = min(seconds, OUTLIER * self(rows))
        self._weight = self._weight * (1 - 1 / LAPS) + 1
        gain = 1 / self._weight
        off_rows, off_seconds = rows - self._rows, seconds - self._seconds
        self._rows += gain * off_rows
        self._seconds += gain * off_seconds
        self._spread = (1 - gain) * (self._spread + gain * off_rows**2)
        self._joint = (1 - gain) * (self._joint + gain * off_rows * off_seconds)

    def __call__(self, rows: int) -> float:
        """Expected seconds, in laps of one row as long as none was seen."""
        if not self._weight:
            return _least(rows)
        usual = ROW_COST * self._seconds / _least(self._rows)
        slope = min((self._joint + usual) / (self._spread + 1.0), self._seconds / self._rows)
        one = max(self._seconds - slope * (self._rows - 1), 1e-9)
        return max(one + slope * (rows - 1), one * _least(rows))


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
        self.laps = LapTimes()
        self._drafts = 0
        self._draft_s = 0.0  # seconds per drafted candidate
        self._hits = self._expected = self._trials = 0.0  # discounted; expected: sum of the drafter's probabilities
        self._idle = 0  # laps since candidates were last sent
        self._patience = PATIENCE
        self._probing = False

    def room(self, most: int) -> int:
        """How many candidates to ask the drafter for, before each lap; 0: let it rest."""
        self._idle += 1
        self._probing = self._idle >= self._patience
        if self._drafts < 2:
            return min(most, FIRST)
        if self._draft_s * most <= CHEAP * self.laps(1):
            return most
        average = min(CERTAIN, (self._hits + DOUBT * EVEN) / (self._trials + DOUBT))
        worth = self._best(repeat(average, most), lambda k: self.laps(k + 1) + k * self._draft_s)
        if worth == 0 and self._probing:
            self._idle = 0  # asking costs time, whatever comes of it
            return min(most, PROBE)
        return worth

    def cut(self, chances: Sequence[float]) -> int:
        """How many candidates of a drafted chain to send; their drafting is paid already.

        :param chances: the drafter's probability of each, given its parent
        """
        right = (self._hits + DOUBT) / (self._expected + DOUBT)
        length = self._best((min(CERTAIN, right * chance) for chance in chances), lambda k: self.laps(k + 1))
        if length == 0 and self._probing:
            length = min(PROBE, len(chances))
        if length:
            self._idle = 0
            self._patience = min(2 * self._patience, MAX_PATIENCE) if self._probing else self._patience
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

    def learn_drafting(self, candidates: int, seconds: float) -> None:
        """The drafter was asked for so many candidates, whatever it found. The first time, which may include reading a
        prompt, is not learnt from.
        """
        self._drafts += 1
        if self._drafts > 1:
            self._draft_s += (0.2 if self._drafts > 2 else 1.0) * (seconds / candidates - self._draft_s)

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


def _least(rows: float) -> float:
    """Least time of a lap, in laps of one row."""
    return 1.0 + ROW_COST * (rows - 1)
