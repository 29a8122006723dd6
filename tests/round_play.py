"""Rounds without a network: what the client sends and the stage answers, through the code and the bytes of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bloombee_spec.sampling.rounds import Draft, Purpose, RoundRule, draw_draft, round_rng
from bloombee_spec.wire.varint import Reader

Law = Callable[[tuple[int, ...]], torch.Tensor]
"""Tokens so far to the distribution of the next one."""


def play_round(
    rule: RoundRule, p: Law, q: Law, widths: Sequence[int], text: tuple[int, ...], seed: int, row: int
) -> list[int]:
    """One round after `text`: the tokens that it commits."""
    vocab, length = len(p(text)), len(text)

    def rng(purpose: Purpose) -> torch.Generator:
        return round_rng(seed, row, length, purpose)

    draft = draw_draft(widths, lambda path: q((*text, *path)), rng(Purpose.DRAFT))
    up, down = bytearray(), bytearray()
    rule.write_draft(up, draft)
    read = Reader(memoryview(bytes(up)))
    received = rule.read_draft(read, draft.tokens, draft.parents, vocab)
    read.end()
    rule.answer(down, received, lambda index: p((*text, *received.path(index))), rng(Purpose.ACCEPT))
    read = Reader(memoryview(bytes(down)))
    outcome = rule.settle(read, draft, vocab, rng(Purpose.RESAMPLE))
    read.end()
    return [*[draft.tokens[index] for index in outcome.accepted], outcome.token]


def play(rule: RoundRule, p: Law, q: Law, widths: Sequence[int], n: int, seed: int, row: int = 0) -> list[int]:
    """The first `n` tokens."""
    text: tuple[int, ...] = ()
    while len(text) < n:
        text += tuple(play_round(rule, p, q, widths[: n - len(text)], text, seed, row))
    return list(text[:n])


def chain(tokens: Sequence[int]) -> Draft:
    return Draft(tuple(tokens), tuple(range(-1, len(tokens) - 1)))
