"""Chains of relay mode: which candidates they hold, and how many of them a lap is worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from swarm_helpers import VOCAB

from bloombee_spec.client.chain import MAX_PATIENCE, ROW_COST, ChainLength, draft_chain
from bloombee_spec.draft.base import Drafter, Proposal


class Listed(Drafter):
    """Proposes one list below the committed tokens and another below any candidate."""

    def __init__(self, first: Sequence[Proposal], later: Sequence[Proposal] = ()):
        self._first, self._later = list(first), list(later)

    def start(self, prompt: Sequence[int]) -> None: ...

    def observe(self, tokens: Sequence[int]) -> None: ...

    def propose(self, path: Sequence[int], budget: int, **options: Any) -> list[Proposal]:
        return (self._later if path else self._first)[:budget]


def test_chain_follows_the_likeliest_children_and_asks_again_at_its_end() -> None:
    tree = [Proposal(-1, 5, 0.3), Proposal(-1, 6, 0.6), Proposal(0, 7, 0.9), Proposal(1, 8, 0.2), Proposal(1, 9, 0.4)]
    chain = draft_chain(Listed(tree, [Proposal(-1, 4, 0.5)]), 5, VOCAB)
    assert chain.tokens == (6, 9, 4, 4, 4) and chain.chances == (0.6, 0.4, 0.5, 0.5, 0.5)
    assert draft_chain(Listed(tree), 5, VOCAB).tokens == (6, 9)
    assert draft_chain(Listed(tree), 1, VOCAB).tokens == (5,)  # a budget of 1 shows the drafter's first guess only
    assert draft_chain(Listed([]), 5, VOCAB).tokens == ()


def test_token_outside_the_vocabulary_ends_the_chain() -> None:
    assert draft_chain(Listed([Proposal(-1, 3, 0.9), Proposal(0, VOCAB, 0.9)]), 5, VOCAB).tokens == (3,)
    assert draft_chain(Listed([Proposal(-1, -1, 0.9)]), 5, VOCAB).tokens == ()


def _sent(
    length: ChainLength, laps: int, chance: float, hits: Callable[[int], int], row_cost: float = 0.0
) -> list[int]:
    """How many candidates each lap carries, when `hits` of those are committed and a row costs `row_cost` laps."""
    sent = []
    for _ in range(laps):
        room = length.room(64)
        k = length.cut([chance] * room)
        length.learn_verdicts([chance] * min(k, hits(k) + 1), min(k, hits(k)))
        length.laps.learn(k + 1, 0.1 * (1 + row_cost * k))
        length.learn_drafting(max(room, 1), 0.0)
        sent.append(k)
    return sent


def test_chain_grows_to_the_limit_when_all_is_accepted() -> None:
    assert _sent(ChainLength(0.05), 6, 0.99, lambda k: k)[-1] == 64


def test_nothing_is_sent_when_nothing_is_accepted_but_for_rare_probes() -> None:
    sent = _sent(ChainLength(0.05), 200, 0.9, lambda k: 0)
    assert sum(sent) < 0.35 * len(sent)
    quiet = [lap for lap, k in enumerate(sent) if k]
    assert quiet[-1] > 200 - MAX_PATIENCE and all(k <= 4 for k in sent[30:])


def test_probes_find_out_that_the_drafter_has_become_good() -> None:
    length = ChainLength(0.05)
    _sent(length, 100, 0.9, lambda k: 0)
    assert max(_sent(length, 2 * MAX_PATIENCE, 0.9, lambda k: k)) >= 8


def test_dear_rows_make_short_chains() -> None:
    cheap, dear, absurd = (
        _sent(ChainLength(0.0), 40, 0.8, lambda k: min(k, 4), row_cost=cost)[-1] for cost in (ROW_COST, 0.3, 2.0)
    )
    assert cheap > dear > absurd == 0


def test_slow_drafter_rests_while_it_does_not_pay() -> None:
    length = ChainLength(0.0)
    asked = []
    for _ in range(200):
        room = length.room(64)
        if room:
            length.learn_drafting(room, 0.1 * room)  # a candidate takes as long as a lap
        k = length.cut([0.5] * room)
        length.learn_verdicts([0.5] * min(k, 1), 0)
        length.laps.learn(k + 1, 0.1)
        asked.append(room)
    assert (
        sum(map(bool, asked)) <= 2 + 3 + 200 / MAX_PATIENCE
        and max(i for i, k in enumerate(asked) if k) > 200 - MAX_PATIENCE
    )
