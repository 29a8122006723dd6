"""The client's side of one decoding stream: its token tree, its drafter, what is in flight. No I/O here: frames in, frames out."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bloombee_spec.client.stats import Tally
from bloombee_spec.config import SpecConfig
from bloombee_spec.draft.base import Drafter
from bloombee_spec.tree import Node, NodeSpec, TokenTree, committed_ref
from bloombee_spec.wire.frames import CommitFrame, FrameError, NodesFrame, PrefixFrame


@dataclass(frozen=True)
class StreamRequest:
    """One row of a `generate` call.

    :param tokens: prompt, with everything that was committed before it
    :param limit: total length at which the stream ends
    :param sampling: the rule on the wire (empty: greedy); `row` its noise row
    """

    tokens: tuple[int, ...]
    limit: int
    stop_tokens: tuple[int, ...] = ()
    sampling: Any = None
    row: int = 0


class Stream:
    """
    :param lane: index in the session
    :param drafter: None decodes plainly
    :param credits: most candidates alive at a time
    :param inject: the first stage starts canonical rows by itself; otherwise the client sends each corrected token
    """

    def __init__(self, lane: int, drafter: Drafter | None, config: SpecConfig, *, credits: int, inject: bool):
        self.lane, self.drafter, self.config = lane, drafter, config
        self.credits, self.inject = min(credits, config.max_candidates), inject
        self.tree = TokenTree()
        self.epoch = 0
        self.request = StreamRequest((), 0)
        self.finished = True
        self.tally = Tally()
        self._held = 0  # rows that surely passed all stages: those below a token that was committed from them
        self._root_ref = 0
        self._next_id = 0
        self._lap: dict[int, int] = {}  # node id -> lap in which its row travels
        self._root_lap = 0
        self._depth: dict[int, int] = {}  # node id -> depth below the root when it was sent
        self._chance: dict[int, float] = {}  # node id -> probability of its path below the root of that time
        self._asked: set[int] = set()  # nodes below which the drafter was asked; -1 for the root

    # ---------------------------------------------------------------- a turn

    def begin(self, request: StreamRequest, seq: int, chunk: int) -> list[PrefixFrame]:
        """Start from `request.tokens`; only what the stages do not hold yet is sent, in chunks of at most `chunk` tokens."""
        known, tokens = self.tree.committed, request.tokens
        same = next((i for i, (a, b) in enumerate(zip(known, tokens)) if a != b), min(len(known), len(tokens)))
        start = max(0, min(same, self._held, len(tokens) - 1))
        self._held = start
        self.request, self.finished = request, len(tokens) >= request.limit
        self.epoch += 1
        self.tree.rewind(min(start, len(known)))
        for token in tokens[start:]:
            self.tree.commit(token)
        self._reset_candidates()
        self._root_ref, self._root_lap = committed_ref(len(tokens) - 1), 1
        self.tally = Tally()
        if self.drafter is not None:
            self.drafter.start(tokens)
        ends = range(start, len(tokens), chunk)
        return [
            PrefixFrame(
                self.lane, self.epoch, seq + i, at, tokens[at : at + chunk], at + chunk >= len(tokens), request.limit
            )
            for i, at in enumerate(ends)
        ]

    def commit(self, frame: CommitFrame) -> tuple[list[int], NodeSpec | None]:
        """Apply a commit frame; one of an older epoch is ignored.

        :returns: new tokens, and the corrected token as a node when the client has to send it
        :raises FrameError: the verifier skipped a position, or runs ahead of the client's epoch
        """
        if frame.epoch < self.epoch or self.finished:
            return [], None
        if frame.epoch > self.epoch or frame.position > self.tree.length:
            raise FrameError(
                f"commit at {frame.position} in epoch {frame.epoch}, expected {self.tree.length} in {self.epoch}"
            )
        self.tally.rows_computed += frame.computed
        self.tally.rows_dropped += frame.dropped
        new = list(frame.tokens[max(0, self.tree.length - frame.position) :])
        correction: NodeSpec | None = None
        taken: list[int] = []
        for token in new:
            if self.finished:
                break
            correction = self._commit_one(token)
            taken.append(token)
            if self.tree.length >= self.request.limit or token in self.request.stop_tokens:
                self.finished = True
        if taken and self.drafter is not None:
            self.drafter.observe(taken)
        return taken, None if self.finished else correction

    def stop(self, length: int) -> None:
        """The caller wants no more: keep `length` tokens, and enter a new epoch so that what is in flight is ignored."""
        self.finished = True
        self.epoch += 1
        self.tree.rewind(min(length, self.tree.length))
        self._held = min(self._held, self.tree.length)

    def _commit_one(self, token: int) -> NodeSpec | None:
        commit = self.tree.commit(token)
        self._held = commit.position
        self.tally.tokens += 1
        self.tally.laps = max(self.tally.laps, self._root_lap)
        for node in commit.dead:
            self._forget(node.id)
        if commit.hit is not None:
            self.tally.hits += 1
            self.tally.hits_by_depth[self._depth[commit.hit.id]] += 1
            self._root_ref, self._root_lap = commit.hit.id, self._lap[commit.hit.id]
            if commit.hit.id in self._asked:
                self._asked.add(-1)
            else:
                self._asked.discard(-1)
            chance = max(self._chance[commit.hit.id], 1e-9)
            for node_id in self.tree.nodes:
                self._chance[node_id] /= chance
            self._forget(commit.hit.id)
            return None
        self.tally.misses += 1
        self._root_lap += 1
        old_root = self._root_ref
        self._reset_candidates()
        if self.inject:
            self._root_ref = committed_ref(commit.position)
            return None
        correction = NodeSpec(self._take_id(), old_root, token)
        self.tree.extend((correction,))  # known as the root from now on
        self._root_ref = correction.id
        return correction

    # ---------------------------------------------------------------- drafting

    def draft(self) -> list[NodeSpec]:
        """New candidates, parents first, best paths first, as many as credits and probabilities allow."""
        if self.drafter is None or self.finished:
            return []
        started = time.perf_counter()
        room = min(self.credits - len(self.tree), self.config.burst)
        deepest = self.request.limit - 1  # no candidate at the limit or beyond: nothing is verified there
        specs: list[NodeSpec] = []
        anchors = self._anchors()
        while room > 0 and anchors:
            key, _, anchor = heapq.heappop(anchors)
            path = [] if anchor is None else [node.token for node in anchor.path()]
            self._asked.add(-1 if anchor is None else anchor.id)
            depth = min(self.config.max_depth - len(path), deepest - (self.tree.length - 1 + len(path)))
            if depth <= 0:
                continue
            proposals = self.drafter.propose(path, room, max_depth=depth)
            placed: list[Node | None] = []
            for proposal in proposals:
                parent = anchor if proposal.parent < 0 else placed[proposal.parent]
                lost = proposal.parent >= 0 and parent is None
                parent_chance = -key if parent is anchor else self._chance[parent.id] if parent is not None else 0.0
                if lost or room <= 0 or parent_chance * proposal.prob < self.config.min_probability:
                    placed.append(None)
                    continue
                found = self.tree.child_of_root(proposal.token) if parent is None else parent.child(proposal.token)
                if found is None:
                    found = self._add(parent, proposal.token, parent_chance * proposal.prob, specs)
                    room -= 1
                    heapq.heappush(anchors, (-self._chance[found.id], found.id, found))
                if proposal.parent >= 0 and parent is not None:
                    self._asked.add(parent.id)
                placed.append(found)
            anchors = [entry for entry in anchors if (entry[2].id if entry[2] is not None else -1) not in self._asked]
            heapq.heapify(anchors)
        self.tally.draft_s += time.perf_counter() - started
        return specs

    def frame(self, specs: Sequence[NodeSpec], seq: int) -> NodesFrame:
        return NodesFrame(self.lane, self.epoch, seq, tuple(specs))

    def _anchors(self) -> list[tuple[float, int, Node | None]]:
        """Where the drafter was not asked yet, the most probable first: a heap of (-chance, tie, node)."""
        anchors: list[tuple[float, int, Node | None]] = [] if -1 in self._asked else [(-1.0, -1, None)]
        anchors += [
            (-self._chance[node.id], node.id, node) for node in self.tree.nodes.values() if node.id not in self._asked
        ]
        heapq.heapify(anchors)
        return anchors

    def _add(self, parent: Node | None, token: int, chance: float, specs: list[NodeSpec]) -> Node:
        spec = NodeSpec(self._take_id(), self._root_ref if parent is None else parent.id, token)
        (verdict,) = self.tree.extend((spec,))
        assert verdict.node is not None
        specs.append(spec)
        depth = verdict.position - self.tree.length + 1
        self._chance[spec.id], self._depth[spec.id] = chance, depth
        self._lap[spec.id] = self._root_lap if parent is None else self._lap[parent.id]
        self.tally.proposed += 1
        self.tally.sent_by_depth[depth] += 1
        return verdict.node

    def _take_id(self) -> int:
        node_id, self._next_id = self._next_id, self._next_id + 1
        return node_id

    def _forget(self, node_id: int) -> None:
        for book in (self._lap, self._depth, self._chance):
            book.pop(node_id, None)
        self._asked.discard(node_id)

    def _reset_candidates(self) -> None:
        self._lap, self._depth, self._chance, self._asked = {}, {}, {}, set()
