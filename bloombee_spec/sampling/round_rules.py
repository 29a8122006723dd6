"""The rules for comparison with the keyed one, by name. Their arithmetic is in `comparison.py`."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from bloombee_spec.sampling.comparison import (
    accepted_prefix,
    after_rejection,
    block_verification,
    draw,
    leviathan_chain,
    specinfer_siblings,
    truncate_top_k,
)
from bloombee_spec.sampling.rounds import ROOT, Draft, Draws, Outcome, RoundRule, Target, only_chains
from bloombee_spec.wire.distributions import decode_distribution, encode_distribution, rounded
from bloombee_spec.wire.varint import FrameError, Reader, put_uint

TOP_K = 64  # entries of a row on the top-k downlink
BRANCHING = 2  # draws at each of the first levels of a tree
BRANCHING_LEVELS = 2
MAX_DRAWS = 64  # below one candidate


class Leviathan(RoundRule):
    """Token by token (Leviathan et al. 2023, Chen et al. 2023), split as DSSD splits it: q of each candidate up; down
    the number accepted, with the next token, or after a rejection with p, for the client to draw from `max(p - q, 0)`.

    p is rounded to what the wire carries before it is compared, so that both sides speak of the same p.
    """

    name = "leviathan"

    def write_draft(self, out: bytearray, draft: Draft) -> None:
        for draws in draft.draws:
            (node,) = draws.nodes
            out += struct.pack("<f", float(draws.q[draft.tokens[node]]))

    def read_draft(self, read: Reader, tokens: Sequence[int], parents: Sequence[int], vocab: int) -> Draft:
        q_of_node = struct.unpack(f"<{len(tokens)}f", read.take(4 * len(tokens)))
        if not all(0 < q <= 1 for q in q_of_node):
            raise FrameError("a candidate whose q is not in (0, 1]")
        return only_chains(tokens, parents, q_of_node=q_of_node)

    def answer(self, out: bytearray, draft: Draft, target: Target, rng: torch.Generator) -> None:
        for index, (token, q) in enumerate(zip(draft.tokens, draft.q_of_node)):
            p = rounded(target(index - 1))
            one = torch.tensor([[token]])
            if not int(accepted_prefix(p.expand(1, 2, -1), torch.tensor([[q]], dtype=torch.float64), one, rng)):
                put_uint(out, index)
                out += encode_distribution(p)
                return
        put_uint(out, len(draft.tokens))
        put_uint(out, int(draw(rounded(target(len(draft.tokens) - 1))[None], rng)))

    def settle(self, read: Reader, draft: Draft, vocab: int, rng: torch.Generator) -> Outcome:
        accepted = read.uint(len(draft.tokens))
        if accepted == len(draft.tokens):
            return Outcome(tuple(range(accepted)), read.uint(vocab - 1))
        p, q = decode_distribution(read, vocab), draft.draws[accepted].q
        return Outcome(tuple(range(accepted)), int(after_rejection(p[None], q[None], rng)))


class Block(RoundRule):
    """Block verification (Sun et al. 2024): whole rows of q up, the number accepted and the next token down."""

    name = "block"

    def write_draft(self, out: bytearray, draft: Draft) -> None:
        for draws in draft.draws:
            out += encode_distribution(draws.q)

    def read_draft(self, read: Reader, tokens: Sequence[int], parents: Sequence[int], vocab: int) -> Draft:
        draws = [Draws(i - 1, (i,), decode_distribution(read, vocab)) for i in range(len(tokens))]
        return only_chains(tokens, parents, draws=tuple(draws))

    def answer(self, out: bytearray, draft: Draft, target: Target, rng: torch.Generator) -> None:
        p = torch.stack([target(index) for index in range(-1, len(draft.tokens))])
        q = torch.stack([draws.q for draws in draft.draws]) if draft.draws else p[:0]
        verdict = block_verification(p[None], q[None], torch.tensor([draft.tokens], dtype=torch.long), rng)
        put_uint(out, int(verdict.accepted))
        put_uint(out, int(verdict.token))

    def settle(self, read: Reader, draft: Draft, vocab: int, rng: torch.Generator) -> Outcome:
        return Outcome(tuple(range(read.uint(len(draft.tokens)))), read.uint(vocab - 1))


class SpecInfer(RoundRule):
    """Multi-step verification of a tree (Miao et al. 2024): siblings are independent draws from one q, a row of which
    goes up for each candidate with children; the accepted path and the next token come down."""

    name = "specinfer"

    def widths(self, budget: int) -> tuple[int, ...]:
        """Two draws at each of the first two levels, then chains, as far as the budget goes."""
        widths: list[int] = []
        level, total = 1, 0
        while True:
            width = BRANCHING if len(widths) < BRANCHING_LEVELS else 1
            level *= width
            total += level
            if total > budget:
                return tuple(widths) or (1,) * min(budget, 1)
            widths.append(width)

    def write_draft(self, out: bytearray, draft: Draft) -> None:
        put_uint(out, len(draft.draws))
        for draws in draft.draws:
            put_uint(out, draws.parent + 1)
            put_uint(out, len(draws.nodes))
            for node in draws.nodes:
                put_uint(out, node - draws.parent - 1)
            out += encode_distribution(draws.q)

    def read_draft(self, read: Reader, tokens: Sequence[int], parents: Sequence[int], vocab: int) -> Draft:
        draws: list[Draws] = []
        for _ in range(read.uint(len(tokens))):
            parent = read.uint(len(tokens)) - 1
            if draws and parent <= draws[-1].parent:
                raise FrameError("draws are not in the order of their parents")
            count = read.uint(MAX_DRAWS)
            nodes = tuple([parent + 1 + read.uint(len(tokens)) for _ in range(count)])
            if not nodes or any(node >= len(tokens) or parents[node] != parent for node in nodes):
                raise FrameError(f"draws below candidate {parent} that are not its children")
            draws.append(Draws(parent, nodes, decode_distribution(read, vocab)))
        if {node for each in draws for node in each.nodes} != set(range(len(tokens))):
            raise FrameError("a candidate that nobody drew")
        return Draft(tuple(tokens), tuple(parents), tuple(draws))

    def answer(self, out: bytearray, draft: Draft, target: Target, rng: torch.Generator) -> None:
        below = {draws.parent: draws for draws in draft.draws}
        path: list[int] = []
        node = ROOT
        while (draws := below.get(node)) is not None:
            siblings = torch.tensor([[draft.tokens[child] for child in draws.nodes]])
            which, token = specinfer_siblings(target(node)[None], draws.q[None], siblings, rng, replacement=True)
            if int(which) < 0:
                break
            node = draws.nodes[int(which)]
            path.append(node)
        else:
            token = draw(target(node)[None], rng)
        put_uint(out, len(path))
        for index in path:
            put_uint(out, index)
        put_uint(out, int(token))

    def settle(self, read: Reader, draft: Draft, vocab: int, rng: torch.Generator) -> Outcome:
        path: list[int] = []
        for _ in range(read.uint(len(draft.tokens))):
            index = read.uint(max(len(draft.tokens) - 1, 0))
            if draft.parents[index] != (path[-1] if path else ROOT):
                raise FrameError("an accepted candidate that does not follow the one before it")
            path.append(index)
        return Outcome(tuple(path), read.uint(vocab - 1))


class PicoSpec(RoundRule):
    """Verification at the client on a top-k downlink: nothing but ids goes up; the largest entries of p after each
    candidate come down. Samples from the truncated p: exact only where the options have `top_k` of no more than that
    themselves, or for greedy decoding.
    """

    name = "picospec"
    exact = False

    def write_draft(self, out: bytearray, draft: Draft) -> None:
        pass

    def read_draft(self, read: Reader, tokens: Sequence[int], parents: Sequence[int], vocab: int) -> Draft:
        return only_chains(tokens, parents)

    def answer(self, out: bytearray, draft: Draft, target: Target, rng: torch.Generator) -> None:
        for index in range(-1, len(draft.tokens)):
            p = target(index)
            out += encode_distribution(truncate_top_k(p, min(TOP_K, len(p))))

    def settle(self, read: Reader, draft: Draft, vocab: int, rng: torch.Generator) -> Outcome:
        p = torch.stack([decode_distribution(read, vocab) for _ in range(len(draft.tokens) + 1)])
        q = torch.stack([draws.q for draws in draft.draws]) if draft.draws else p[:0]
        verdict = leviathan_chain(p[None], q[None], torch.tensor([draft.tokens], dtype=torch.long), rng)
        return Outcome(tuple(range(int(verdict.accepted))), int(verdict.token))


ROUND_RULES: dict[str, RoundRule] = {rule.name: rule for rule in (Leviathan(), Block(), SpecInfer(), PicoSpec())}
