"""The last stage's part in rounds: waits for the rows of what was drafted, and says what the session's rule makes of
them. It commits nothing; the client does."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bloombee_spec.lane import Lane, Row
from bloombee_spec.sampling.rounds import (
    ROOT,
    Distributions,
    Purpose,
    RoundRule,
    Target,
    round_rng,
    spec_of,
)
from bloombee_spec.tree import Commit
from bloombee_spec.verify import Head
from bloombee_spec.wire.frames import FrameError, RoundFrame
from bloombee_spec.wire.varint import Reader, put_uint

MAX_ID = 1 << 40


@dataclass(frozen=True)
class _Options:
    distribution: Distributions
    seed: int
    row: int


class Judge:
    """Of one lane. `accept` and `committed` are called with the lane's lock held, `step` without.

    :param lock: guards the lane; `head` final norm and LM head
    :param device: where logits are
    """

    def __init__(
        self, rule: RoundRule, lane: Lane, lock: threading.Lock, head: Head, vocab: int, device: torch.device
    ):
        self._rule, self._lane, self._lock, self._head = rule, lane, lock, head
        self._vocab, self._device = vocab, device
        self._options: _Options | None = None
        self._round: RoundFrame | None = None  # the one to be answered
        self._nodes: range = range(0)  # its candidates
        self._epoch = -1
        self._root: tuple[int, torch.Tensor] | None = None  # position, `[hidden]`
        self._waiting: dict[int, torch.Tensor] = {}  # rows of live candidates by node id

    def set_rule(self, sampling: Mapping[str, Any], row: int) -> None:
        """:raises ValueError: an option is unknown or out of range"""
        spec = spec_of(sampling)
        self._options = _Options(Distributions(spec, self._vocab, self._device), spec.seed, row)

    def accept(self, frame: RoundFrame) -> None:
        """
        :raises FrameError: it does not say which candidates it is about, or comes before the last one was answered
        """
        read = Reader(memoryview(frame.body))
        first, count = read.uint(MAX_ID), read.uint(self._lane.arena.size)
        if self._round is not None and self._round.epoch == frame.epoch:
            raise FrameError(f"round {frame.seq} before round {self._round.seq} was answered")
        if self._round is None or frame.epoch > self._round.epoch:
            self._round = RoundFrame(frame.lane, frame.epoch, frame.seq, bytes(read.rest()))
            self._nodes = range(first, first + count)

    def committed(self, commits: Iterable[Commit]) -> None:
        """The client has committed; usually its last token is no candidate, and its row is on the way."""
        for commit in commits:
            row = None if commit.hit is None else self._waiting.pop(commit.hit.id, None)
            self._root = None if row is None else (commit.position, row)
            for node in commit.dead:
                self._waiting.pop(node.id, None)

    def step(self, rows: Sequence[Row], hidden: Iterable[torch.Tensor]) -> RoundFrame | None:
        """Take the rows of a forward (`hidden`: one `[hidden]` each); the answer, once the round is complete.

        :raises FrameError: the round does not fit its candidates
        :raises SamplingError: the logits are broken, or the options leave no token
        """
        with self._lock:
            lane = self._lane
            if self._epoch != lane.epoch:
                self._root, self._waiting, self._epoch = None, {}, lane.epoch
            length = lane.tree.length
            for row, part in zip(rows, hidden):
                if row.node is not None:
                    self._waiting[row.id] = part
                elif row.position == length - 1 and lane.prefix_complete:
                    self._root = (row.position, part)
            frame, root, options = self._round, self._root, self._options
            if frame is None or root is None or options is None or frame.epoch != self._epoch:
                return None
            known = all(node in self._waiting and node in lane.tree.nodes for node in self._nodes)
            if not known or root[0] != length - 1 or lane.rule_epoch != self._epoch:
                return None
            self._round = None
            committed = tuple(lane.tree.committed)
            nodes = [lane.tree.nodes[node] for node in self._nodes]
            parts = [self._waiting[node.id] for node in nodes]
            index = {node.id: i for i, node in enumerate(nodes)}
            parents = [ROOT if node.parent is None else index.get(node.parent.id, len(nodes)) for node in nodes]
        if any(parent >= i for i, parent in enumerate(parents)):
            raise FrameError("a round does not hold the ancestors of its candidates")
        read = Reader(memoryview(frame.body))
        draft = self._rule.read_draft(read, [node.token for node in nodes], parents, self._vocab)
        read.end()
        target = self._target(options, committed, draft.path, [*parts, root[1]])
        out = bytearray()
        self._rule.answer(out, draft, target, round_rng(options.seed, options.row, length, Purpose.ACCEPT))
        counted = bytearray()
        with self._lock:
            for counter in lane.take_counters():
                put_uint(counted, counter)
        return RoundFrame(frame.lane, frame.epoch, frame.seq, bytes(counted + out))

    def _target(self, options: _Options, committed: tuple[int, ...], path: Any, parts: list[torch.Tensor]) -> Target:
        """:param parts: `[hidden]` of each candidate, and of the root at the end"""

        def target(index: int) -> torch.Tensor:
            logits = self._head(parts[index][None])[0]  # row by row: a batch may round otherwise
            return options.distribution(logits, lambda: (*committed, *path(index)))

        return target
