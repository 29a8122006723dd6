"""Suffix decoding: propose what followed the present context earlier, in this stream or in past outputs.

Costs no model and no more than a millisecond. Occurrence counts choose the tree, and a match of m tokens is trusted
for about alpha * m more, as in SuffixDecoding (Oliaro et al., NeurIPS 2025). Counts of shorter contexts are blended
in, as in prediction by partial matching (Cleary and Witten, 1984), so that a wide tree also holds the second guesses.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bloombee_spec.draft.automaton import Follower, SuffixAutomaton
from bloombee_spec.draft.base import Drafter, Proposal, never
from bloombee_spec.draft.corpus import END_OF_OUTPUT, Corpus, Segment


@dataclass(frozen=True)
class SuffixConfig:
    """How far a repetition is trusted. The defaults were fitted on greedy outputs of a 135M chat model.

    :param min_match: shortest context, in tokens, whose continuations are proposed; 3 to 8 for certain matches only
    :param max_match: longest context that is told apart from its suffixes
    :param alpha: proposals reach at most `alpha * match` tokens beyond a match of that many tokens
    :param doubt: pseudo-count of "something else follows", for a context of one token
    :param doubt_decay: a context of m tokens has a doubt of `doubt / m ** doubt_decay`
    :param min_prob: chains of proposals that are less likely than this are not proposed
    :param max_followers: a context that more different tokens than this have followed says too little to be consulted
    """

    min_match: int = 1
    max_match: int = 24
    alpha: float = 4.0
    doubt: float = 6.0
    doubt_decay: float = 1.3
    min_prob: float = 0.02
    max_followers: int = 32

    def __post_init__(self) -> None:
        if not 1 <= self.min_match <= self.max_match:
            raise ValueError(f"need 1 <= min_match <= max_match, got {self.min_match} and {self.max_match}")
        if self.alpha <= 0 or self.doubt <= 0 or self.doubt_decay < 0 or not 0 < self.min_prob < 1:
            raise ValueError(f"need alpha > 0, doubt > 0, doubt_decay >= 0 and 0 < min_prob < 1, got {self}")
        if self.max_followers < 1:
            raise ValueError(f"max_followers must be at least 1, got {self.max_followers}")


Cursor = tuple[SuffixAutomaton, int, int]  # index, state, length of the context that matches there
Candidate = tuple[
    float, int, Proposal, int, list[Cursor]
]  # -chain probability, age, proposal, depth, parent's cursors

shared_corpus = Corpus()


class SuffixDrafter(Drafter):
    """Drafts from the stream's own text (prompt and output) and from past outputs.

    :param corpus: where outputs are remembered when a stream ends, by default one corpus for the process; None for
        none
    """

    name = "suffix"
    instant = True

    def __init__(self, config: SuffixConfig | None = None, corpus: Corpus | None = shared_corpus) -> None:
        self.config = config or SuffixConfig()
        self.corpus = corpus
        if corpus is not None and corpus.max_context < self.config.max_match:
            raise ValueError(
                f"max_match is {self.config.max_match}, but the corpus only counts {corpus.max_context} tokens"
            )
        self._tokens: list[int] = []
        self._prompt_length = 0
        self._index = SuffixAutomaton(self.config.max_match)

    def fork(self) -> SuffixDrafter:
        """A drafter for another stream with the same corpus."""
        return SuffixDrafter(self.config, self.corpus)

    def start(self, prompt: Sequence[int]) -> None:
        kept = _common_prefix(self._tokens, prompt)
        if kept < self._prompt_length or not self._tokens:
            self.close()  # another stream, not an edit of this one's output
            self._prompt_length = len(prompt)
        elif kept < len(self._tokens):
            self._tokens, self._index = [], SuffixAutomaton(self.config.max_match)
        self.observe(prompt[len(self._tokens) :])

    def observe(self, tokens: Sequence[int]) -> None:
        tokens = [int(token) for token in tokens]
        self._index.extend(tokens)
        self._tokens.extend(tokens)

    def close(self) -> None:
        if self.corpus is not None:
            self.corpus.add(self._tokens[self._prompt_length :])
        self._tokens, self._prompt_length = [], 0
        self._index = SuffixAutomaton(self.config.max_match)

    def propose(
        self, path: Sequence[int], budget: int, *, max_depth: int = 64, interrupted: Callable[[], bool] = never
    ) -> list[Proposal]:
        max_match = self.config.max_match
        context = [*self._tokens[-max_match:], *map(int, path)][-max_match:]
        if self.corpus is None:
            return self._grow([_cursor(self._index, context)], budget, max_depth, interrupted)
        with self.corpus.lock:
            cursors = [_cursor(index, context) for index in (self._index, *reversed(self.corpus.segments))]
            self._touch_best(cursors)
            return self._grow(cursors, budget, max_depth, interrupted)

    def _touch_best(self, cursors: list[Cursor]) -> None:
        """A segment is of use when it knows a longer context than the stream's own text does."""
        lengths = [index.continued(state, length) for index, state, length in cursors]
        length = max(lengths)
        best = cursors[lengths.index(length)][0]
        if self.corpus is not None and isinstance(best, Segment) and length >= self.config.min_match:
            self.corpus.touch(best)

    def _grow(
        self, cursors: list[Cursor], budget: int, max_depth: int, interrupted: Callable[[], bool]
    ) -> list[Proposal]:
        """Best first: always take the candidate whose chain is the most likely, the oldest of equals."""
        proposals: list[Proposal] = []
        frontier: list[Candidate] = []
        parent, chain_prob, depth, age = -1, 1.0, 0, 0
        while len(proposals) < budget and not interrupted():
            if depth < max_depth:
                for token, prob in self._continuations(cursors, depth, self.config.min_prob / chain_prob):
                    if chain_prob * prob < self.config.min_prob:
                        break
                    age += 1
                    proposal = Proposal(parent, token, prob)
                    heapq.heappush(frontier, (-chain_prob * prob, age, proposal, depth + 1, cursors))
            if not frontier:
                break
            negative, _, proposal, depth, cursors = heapq.heappop(frontier)
            parent, chain_prob = len(proposals), -negative
            proposals.append(proposal)
            cursors = [(index, *index.step(state, length, proposal.token)) for index, state, length in cursors]
        return proposals

    def _continuations(self, cursors: list[Cursor], depth: int, floor: float) -> list[tuple[int, float]]:
        """(token, probability) of what may follow, likeliest first.

        Contexts are consulted from the longest to the shortest, this stream's before others' of the same length. A
        context that was followed n times leaves `d / (n + d)` of the probability to those after it, d being its doubt.
        Between equally likely tokens the one from the longer context comes first, then the one that followed it more
        recently.

        :param depth: how many of the context's last tokens were drafted by this very proposal
        :param floor: less probability than this is not worth another context
        """
        config = self.config
        contexts: list[tuple[int, int, SuffixAutomaton, int]] = []  # -length, order, index, state
        reach = 0
        for order, (index, state, length) in enumerate(cursors):
            if length >= config.min_match:
                reach = max(reach, index.continued(state, length))
                for level_length, level in index.levels(state, length, config.min_match, config.max_match):
                    contexts.append((-level_length, order, index, level))
        if depth + 1 > config.alpha * (reach - depth):
            return []
        contexts.sort(key=_longest_first)
        mass = 1.0
        probs: dict[int, float] = {}
        for negative_length, _, index, state in contexts:
            followers = index.followers(state, config.max_followers)
            if not followers:
                continue
            if len(followers) > 1:
                followers.sort(key=_latest_first)
            doubt: float = config.doubt / (-negative_length) ** config.doubt_decay
            share = mass / (sum([count for _, count, _ in followers]) + doubt)
            for token, count, _ in followers:
                probs[token] = probs.get(token, 0.0) + share * count
            mass = share * doubt
            if mass < floor:
                break
        probs.pop(END_OF_OUTPUT, None)
        return sorted(probs.items(), key=_likeliest_first)


def _cursor(index: SuffixAutomaton, context: Sequence[int]) -> Cursor:
    return (index, *index.locate(context))


def _latest_first(follower: Follower) -> int:
    return -follower[2]


def _likeliest_first(item: tuple[int, float]) -> float:
    return -item[1]


def _longest_first(context: tuple[int, int, SuffixAutomaton, int]) -> tuple[int, int]:
    return context[:2]


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    length = min(len(left), len(right))
    return next((i for i in range(length) if left[i] != right[i]), length)
