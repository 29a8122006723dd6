"""The client of a simulated ring: follows plans, drafts beside the network, hedges, and learns from each verdict."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from bloombee_spec.plan.acceptance import RANKS, AcceptanceModel, Rates
from bloombee_spec.plan.decision import DraftCost, Mode, Plan
from bloombee_spec.plan.sim.drafts import Drafts, Judged
from bloombee_spec.plan.sim.events import Clock
from bloombee_spec.plan.sim.ring import Link, Row
from bloombee_spec.plan.sizing import HEDGED_POSITIONS
from bloombee_spec.plan.trees import TreeNode, best_first
from bloombee_spec.tree import Node, NodeSpec, committed_ref


class SimClient:
    """:param policy: asked once per lap for the plan to follow
    :param beliefs: the drafter's own idea of its acceptance, `[depth][rank]`: it orders the candidates
    :param lap_s: the plan is asked for again after this long without a miss
    :param draft_rows: rows that the drafter expands per step of a synchronous tree, at most
    :param send_roots: the client has to send the row of a committed token that was no candidate (no embeddings at
        stage 1)
    """

    def __init__(
        self,
        clock: Clock,
        drafts: Drafts,
        uplink: Link,
        draft: DraftCost,
        beliefs: Rates,
        acceptance: AcceptanceModel,
        policy: Callable[[], Plan],
        lap_s: float,
        *,
        send_roots: bool,
        draft_rows: int,
    ):
        self._clock, self._drafts, self._uplink, self._draft = clock, drafts, uplink, draft
        self._beliefs, self._acceptance = beliefs, acceptance
        self.policy, self.lap_s = policy, lap_s
        self._send_roots, self._draft_rows = send_roots, draft_rows
        self.plan = Plan(Mode.OFF)
        self._plan_at = 0.0
        self._leaves: list[Node] = []  # the deepest layer
        self._outgoing: deque[list[Node]] = deque()
        self._shape: list[TreeNode] = []  # of the synchronous tree that is being drafted
        self._grown: dict[int, Node] = {}
        self._layer = 0
        self._slot = 0.0  # when the next frame of a stream may leave
        self._ticking = False
        self._job = 0  # changes when what the drafter is doing became pointless
        self._busy = False
        self._hedges: dict[int, int] = {}  # id of a live candidate (or -1 - position of the root) -> layers ready
        self._rows: dict[int, Row] = {}
        self.arrivals: list[float] = []
        self.misses: list[int] = []  # positions of tokens that were no candidate here when they came
        self.drafted = 0
        self.hedge_hits = 0
        self.hedge_layers_used = 0

    def start(self) -> None:
        """The prompt is in every stage's cache; its last token's row starts the ring."""
        self._new_plan()
        self._restart(always=True)

    def commit(self, token: int) -> None:
        root_key = self._root_key()
        judged = self._drafts.commit(token)
        self.arrivals.append(self._clock.now)
        sent = self._forget(judged)
        if judged.depth:
            known = judged.rank if judged.rank is not None and judged.rank < RANKS else None
            self._acceptance.observe(RANKS, known, judged.depth)
        ready = self._hedges.pop(root_key, 0)
        hit = judged.commit.hit
        if hit is not None:
            if not sent and self._send_roots:  # it was right, but still waited here
                row = NodeSpec(hit.id, committed_ref(judged.commit.position - 1), token)
                self._uplink.send([Row(row, judged.commit.position)])
            if hit.id in self._hedges:
                self._hedges[self._root_key()] = self._hedges.pop(hit.id)
            if self._clock.now - self._plan_at >= self.lap_s:
                self._new_plan()
            self._kick()
            return
        self.misses.append(judged.commit.position)
        hedged = judged.rank is not None and judged.sent <= judged.rank < judged.sent + self.plan.hedges
        width = self.plan.width
        self._abandon()
        self._new_plan()
        if ready and hedged and self.plan.mode is Mode.STREAM:
            self.hedge_hits += 1
            self.hedge_layers_used += ready
            for _ in range(min(ready, self.plan.depth)):
                self._add_layer(width)
        self._restart()

    def _restart(self, always: bool = False) -> None:
        """After a miss: the committed token's row if it is ours to send, and what is ready behind it, in one frame."""
        self._kick()
        if not (self._send_roots or always):
            return
        position = self._drafts.tree.length - 1
        token = self._drafts.tree.committed[position]
        first = self._outgoing.popleft() if self._outgoing else []
        root = Row(NodeSpec(self._drafts.new_id(), committed_ref(position - 1), token), position)
        self._uplink.send([root, *self._as_rows(first)])
        self._slot = self._clock.now + self.plan.pace_s

    def _new_plan(self) -> None:
        self.plan, self._plan_at = self.policy(), self._clock.now

    def _abandon(self) -> None:
        self._job += 1
        self._busy = False
        self._shape = []
        self._outgoing.clear()
        self._leaves = []
        self._slot = self._clock.now

    def _forget(self, judged: Judged) -> bool:
        """Drop what died; whether the candidate that was confirmed had been sent."""
        for node in judged.commit.dead:
            self._hedges.pop(node.id, None)
            row = self._rows.pop(node.id, None)
            if row is not None:
                row.dead = True
        hit = judged.commit.hit
        return hit is not None and self._rows.pop(hit.id, None) is not None

    # the drafter: one thing at a time

    def _kick(self) -> None:
        while not self._busy and self.plan.mode is not Mode.OFF:
            if self.plan.mode is Mode.TREE or self._shape:  # a tree that was begun is sent, whatever the plan says now
                if not self._shape:
                    if len(self._drafts.tree):
                        return  # the verdict on the last tree is not in
                    self._shape = best_first(self._beliefs, self.plan.tree_size, self.plan.depth)
                    self._grown, self._layer = {}, 0
                self._work(self._draft.time(min(len(self._shape), self._draft_rows)), self._grow)
            elif self._in_flight() < self.plan.depth:
                self._work(self._draft.time(self.plan.width), self._layer_done)
            elif self.plan.hedges and self._to_hedge():
                rows = self.plan.hedges * HEDGED_POSITIONS * self.plan.width
                self._work(self._draft.time(rows), self._hedge_done)
            else:
                return

    def _work(self, seconds: float, done: Callable[[], None]) -> None:
        if seconds == 0:
            done()
            return
        self._busy = True
        self._clock.after(seconds, self._worked, self._job, done)

    def _worked(self, job: int, done: Callable[[], None]) -> None:
        if job == self._job:
            self._busy = False
            done()
            self._kick()

    def _grow(self) -> None:
        """One layer of a synchronous tree; it leaves when it is complete."""
        self._layer += 1
        self._drafts.grow(self._shape, self._layer, self._grown)
        if self._layer >= max(node.depth for node in self._shape):
            self._shape = []
            self._queue([node for node in self._grown.values() if self._drafts.tree.is_live(node)])

    def _layer_done(self) -> None:
        self._add_layer(self.plan.width)

    def _add_layer(self, width: int) -> None:
        parents: list[Node | None] = [*self._front()]
        self._leaves = self._drafts.layer(parents or [None], width)
        self._queue(self._leaves)

    def _queue(self, nodes: list[Node]) -> None:
        self.drafted += len(nodes)
        self._outgoing.append(nodes)
        self._tick()

    def _front(self) -> list[Node]:
        """The deepest live candidates, all of one layer; none when the root has no descendant."""
        tree = self._drafts.tree
        front = [node for node in self._leaves if tree.is_live(node)]
        if not front and len(tree):
            last = max(node.position for node in tree.live())
            front = [node for node in tree.live() if node.position == last]
        self._leaves = front
        return front

    def _in_flight(self) -> int:
        """Layers between the root and the leaves."""
        front = self._front()
        return front[0].position - (self._drafts.tree.length - 1) if front else 0

    # sending, no faster than the plan's pace

    def _tick(self) -> None:
        if not self._ticking and self._outgoing:
            self._ticking = True
            self._clock.at(self._slot, self._leave)

    def _leave(self) -> None:
        self._ticking = False
        if self._clock.now < self._slot:
            self._tick()
            return
        while self._outgoing:
            nodes = [node for node in self._outgoing.popleft() if self._drafts.tree.is_live(node)]
            if nodes:
                self._slot = self._clock.now + self.plan.pace_s
                self._uplink.send(self._as_rows(nodes))
                break
        self._tick()

    def _as_rows(self, nodes: list[Node]) -> list[Row]:
        rows = [Row(self._drafts.spec(node), node.position) for node in nodes]
        self._rows.update((row.spec.id, row) for row in rows)
        return rows

    # hedges: answers for outcomes that were not sent, kept here

    def _root_key(self) -> int:
        return -self._drafts.tree.length

    def _path(self) -> list[int]:
        """Keys of the root and of the most likely candidates below it, nearest first."""
        keys = [self._root_key()]
        children = self._drafts.tree.roots
        while children and len(keys) < HEDGED_POSITIONS:
            best = max(children, key=lambda node: self._drafts.belief(node).reach)
            keys.append(best.id)
            children = best.children
        return keys

    def _to_hedge(self) -> list[int]:
        return [key for key in self._path() if self._hedges.get(key, 0) < self.plan.hedge_layers]

    def _hedge_done(self) -> None:
        for key in self._to_hedge():
            self._hedges[key] = self._hedges.get(key, 0) + 1
