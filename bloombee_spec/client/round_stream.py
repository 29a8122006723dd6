"""The client's side of one stream that is decoded in rounds: what is committed, what was drafted, what to send. No I/O
here."""

from __future__ import annotations

import time

import torch

from bloombee_spec.client.prefix import common_prefix, prefix_frames
from bloombee_spec.client.stats import Tally
from bloombee_spec.client.stream import StreamRequest
from bloombee_spec.draft.base import Drafter
from bloombee_spec.draft.sampled import Sampler, sampler_of
from bloombee_spec.sampling.processors import SamplingError
from bloombee_spec.sampling.rounds import (
    Distributions,
    Draft,
    Purpose,
    RoundRule,
    draw_draft,
    round_rng,
    spec_of,
)
from bloombee_spec.tree import NodeSpec, committed_ref
from bloombee_spec.wire.distributions import ENTRY_BYTES
from bloombee_spec.wire.frames import (
    MAX_FRAME_BYTES,
    CommitFrame,
    FrameError,
    NodesFrame,
    PrefixFrame,
    RoundFrame,
)
from bloombee_spec.wire.varint import Reader, put_uint

MAX_COUNT = 1 << 40


class RoundStream:
    """
    :param budget: candidates in a round, at most
    :param drafter: None decodes plainly, by the same rule
    :param inject: the first stage starts the row of a committed token by itself; otherwise it is sent with the round
    """

    def __init__(
        self, lane: int, drafter: Drafter | None, rule: RoundRule, *, budget: int, max_depth: int, inject: bool,
        vocab_size: int,
    ):  # fmt: skip
        self.lane, self.drafter, self.rule = lane, drafter, rule
        self._sampler: Sampler | None = None if drafter is None else sampler_of(drafter, vocab_size)
        rows = MAX_FRAME_BYTES // (ENTRY_BYTES * vocab_size + 64) - 1  # of q, if all of them are sent
        self._widths = rule.widths(min(budget, rows))[:max_depth]
        self._inject, self._vocab = inject, vocab_size
        self.committed: list[int] = []
        self.request = StreamRequest((), 0)
        self.epoch = self.held = 0  # held: tokens whose rows surely passed all stages
        self.finished = True
        self.tally = Tally()
        self._seq = self._next_id = 0
        self._draft = Draft()
        self._corrected = False  # the last committed token has no row yet, and nobody but the client starts it

    def begin(self, request: StreamRequest, chunk: int) -> list[PrefixFrame]:
        """As `Stream.begin`: frames of at most `chunk` tokens, without numbers."""
        tokens = request.tokens
        self.held = start = max(0, min(common_prefix(self.committed, tokens), self.held, len(tokens) - 1))
        self.committed, self.request = list(tokens), request
        self.finished = len(tokens) >= request.limit
        self.epoch += 1
        self._seq, self._corrected = 0, False
        self.tally = Tally()
        spec = spec_of(request.sampling or {})
        self._seed, self._shape = spec.seed, Distributions(spec, self._vocab)
        if self._sampler is not None:
            self._sampler.start(tokens)
        return prefix_frames(self.lane, self.epoch, tokens, start, chunk, request.limit)

    def draft(self) -> tuple[NodesFrame | None, RoundFrame]:
        """Draw the next round: its candidates for the first stage, and what the last one has to know of them."""
        started = time.perf_counter()
        deepest = self.request.limit - 1 - len(self.committed)  # the last token is decided by the row before it
        rng = self._rng(Purpose.DRAFT)
        self._draft = draw_draft(self._widths[: max(deepest, 0)], self._distribution, rng)
        self.tally.draft_s += time.perf_counter() - started
        length, specs = len(self.committed), []
        root = committed_ref(length - 1)
        if self._corrected:
            specs.append(NodeSpec(self._take_ids(1), committed_ref(length - 2), self.committed[-1]))
            root = specs[0].id
        draft = self._draft
        first = self._take_ids(len(draft.tokens))
        for index, (token, parent) in enumerate(zip(draft.tokens, draft.parents)):
            specs.append(NodeSpec(first + index, root if parent < 0 else first + parent, token))
        self._seq += 1
        body = bytearray()
        put_uint(body, first)
        put_uint(body, len(draft.tokens))
        self.rule.write_draft(body, draft)
        self.tally.proposed += len(draft.tokens)
        self.tally.sent_by_depth.update(len(draft.path(index)) for index in range(len(draft.tokens)))
        nodes = NodesFrame(self.lane, self.epoch, self._seq, tuple(specs)) if specs else None
        return nodes, RoundFrame(self.lane, self.epoch, self._seq, bytes(body))

    def settle(self, frame: RoundFrame) -> CommitFrame | None:
        """What the stage's answer commits, up to the limit or a stop token; None for an answer of an older epoch.

        :raises FrameError: not an answer to this round
        """
        if self.finished or frame.epoch < self.epoch:
            return None
        if (frame.epoch, frame.seq) != (self.epoch, self._seq):
            raise FrameError(f"an answer to round {frame.seq}, the last one was {self._seq}")
        read = Reader(memoryview(frame.body))
        self.tally.rows_computed += read.uint(MAX_COUNT)
        self.tally.rows_dropped += read.uint(MAX_COUNT)
        outcome = self.rule.settle(read, self._draft, self._vocab, self._rng(Purpose.RESAMPLE))
        read.end()
        position = len(self.committed)
        tokens: list[int] = []
        for token in (*[self._draft.tokens[index] for index in outcome.accepted], outcome.token):
            tokens.append(token)
            self.finished = position + len(tokens) >= self.request.limit or token in self.request.stop_tokens
            if self.finished:
                break
        self._count(len(tokens), len(outcome.accepted))
        self.committed += tokens
        self.held = len(self.committed) - 1
        self._corrected = not self._inject
        if self._sampler is not None:
            self._sampler.observe(tokens)
        return CommitFrame(self.lane, self.epoch, position, tuple(tokens))

    def stop(self, length: int) -> None:
        """The caller wants no more: keep `length` tokens, in a new epoch."""
        self.finished = True
        self.epoch += 1
        self.tally.tokens -= max(0, len(self.committed) - length)
        del self.committed[length:]
        self.held = min(self.held, len(self.committed))

    def _distribution(self, path: tuple[int, ...]) -> torch.Tensor | None:
        if self._sampler is None:
            return None
        try:
            return self._sampler.distribution(path, self._shape)
        except SamplingError:  # options that leave the drafter nothing: where it is silent depends on the path alone
            return None

    def _rng(self, purpose: Purpose) -> torch.Generator:
        return round_rng(self._seed, self.request.row, len(self.committed), purpose)

    def _take_ids(self, count: int) -> int:
        first, self._next_id = self._next_id, self._next_id + count
        return first

    def _count(self, tokens: int, accepted: int) -> None:
        tally = self.tally
        hits = min(accepted, tokens)
        tally.tokens += tokens
        tally.laps += 1
        tally.hits += hits
        tally.misses += tokens - hits
        tally.hits_by_depth.update(range(1, hits + 1))
        tally.modes[self.rule.name] += tokens
