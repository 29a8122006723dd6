"""Links, stages and the verifier of a simulated ring. Every stage holds a real `TokenTree` and derives by itself what
is dead.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bloombee_spec.plan.route import Leg, Stage
from bloombee_spec.plan.sim.events import Clock
from bloombee_spec.tree import ALIAS_WINDOW, Fate, Node, NodeSpec, TokenTree, committed_ref

INJECTED = 1 << 40  # ids of rows that the first stage starts by itself; the client counts from 0
TRUTH = 0  # the token that the target commits at every position; wrong candidates carry other tokens


@dataclass(eq=False, slots=True)
class Row:
    """A candidate's row at one place."""

    spec: NodeSpec
    position: int
    dead: bool = False


class Link:
    """FIFO with delay and bandwidth. What died while it waited is not sent; what is on its way arrives."""

    def __init__(self, clock: Clock, leg: Leg, deliver: Callable[[list[NodeSpec]], None]):
        self._clock, self._leg, self._deliver = clock, leg, deliver
        self._frames: deque[list[Row]] = deque()
        self._busy = False
        self.bytes = 0.0
        self.frames = 0
        self.rows = 0

    def send(self, rows: list[Row]) -> None:
        self._frames.append(rows)
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = False
        while self._frames:
            rows = [row for row in self._frames.popleft() if not row.dead]
            if rows:
                self._busy = True
                self.frames += 1
                self.rows += len(rows)
                self.bytes += self._leg.frame_bytes + len(rows) * self._leg.row_bytes
                self._clock.after(self._leg.serialisation(len(rows)), self._sent, [row.spec for row in rows])
                return

    def _sent(self, specs: list[NodeSpec]) -> None:
        self._clock.after(self._leg.delay_s, self._deliver, specs)
        self._next()


class SimStage:
    """One server: waiting rows go in one forward, dead ones are dropped on arrival, before, within and after it.

    :param forward: gets the computed rows that are still alive
    :param inject: whether a committed token that is no candidate here becomes a row at once (first stage with
        embeddings)
    """

    def __init__(
        self,
        clock: Clock,
        stage: Stage,
        prompt: Sequence[int],
        forward: Callable[[list[Row]], None],
        *,
        inject: bool,
        max_rows: int,
    ):
        self._clock, self._stage, self._forward, self._inject, self._max_rows = clock, stage, forward, inject, max_rows
        self.tree = TokenTree(prompt)
        self._waiting: list[Row] = []
        self._rows: dict[int, Row] = {}  # rows that are here and not yet on the next link, by node id
        self._early: list[NodeSpec] = []
        self._replaced: dict[int, int] = {}  # candidate that was committed before it came -> its position
        self._here = len(prompt) - 2  # the last committed position whose row has arrived
        self._batch: list[Row] = []
        self._block_s = 0.0
        self._blocks_left = 0
        self._batch_from = 0.0
        self._run = 0
        self._forward_s: dict[int, float] = {}
        self.injected = 0
        self.computed = 0.0  # rows, those of a forward that was cut short in proportion
        self.busy_s = 0.0

    def arrive(self, specs: list[NodeSpec]) -> None:
        """Rows came: they wait for other people's work first, where there is any."""
        if self._stage.queue_s > 0:
            self._clock.after(self._stage.queue_s, self._admit, specs)
        else:
            self._admit(specs)

    def _admit(self, specs: list[NodeSpec]) -> None:
        for spec in specs:
            if -spec.parent > self.tree.length or (
                self._early and any(spec.parent == early.id for early in self._early)
            ):
                self._early.append(spec)  # names a committed token that this stage has not been told of yet
            else:
                self._insert(spec)
        self._start()

    def _insert(self, spec: NodeSpec) -> None:
        verdict = self.tree.extend([spec])[0]
        if verdict.fate is Fate.COMMITTED:
            if verdict.position <= self._here:
                # This stage started the row before it came, under another id: its children have to name the position.
                self._replaced[spec.id] = verdict.position
                return
            self._here = verdict.position
            self._waiting.insert(0, Row(self._renamed(spec), verdict.position))
        elif verdict.fate is Fate.LIVE:
            row = Row(self._renamed(spec), verdict.position)
            self._rows[spec.id] = row
            self._waiting.append(row)

    def _renamed(self, spec: NodeSpec) -> NodeSpec:
        position = self._replaced.get(spec.parent)
        return spec if position is None else NodeSpec(spec.id, committed_ref(position), spec.token)

    def commit(self, token: int) -> Node | None:
        """The committed token reached this stage; returns the candidate that it confirms."""
        commit = self.tree.commit(token)
        for node in commit.dead:
            row = self._rows.pop(node.id, None)
            if row is not None:
                row.dead = True
        if commit.hit is not None:
            self._here = commit.position
            self._rows.pop(commit.hit.id, None)
        if commit.dead:
            self._shrink()
        if commit.hit is None and self._inject and self._here < commit.position:
            self.injected += 1
            self.arrive([NodeSpec(INJECTED + commit.position, committed_ref(commit.position - 1), token)])
        if self._early:
            early, self._early = self._early, []
            self._admit(early)
        if len(self._replaced) > ALIAS_WINDOW:
            self._replaced = {key: at for key, at in self._replaced.items() if at > commit.position - ALIAS_WINDOW}
        return commit.hit

    def _start(self) -> None:
        if self._batch:
            return
        waiting = [row for row in self._waiting if not row.dead]
        if not waiting:
            self._waiting = []
            return
        # Order of arrival has the canonical row first: every other live row descends from it, so it came later.
        self._batch, self._waiting = waiting[: self._max_rows], waiting[self._max_rows :]
        self._schedule(self._stage.blocks)

    def _schedule(self, blocks: int) -> None:
        rows = len(self._batch)
        if rows not in self._forward_s:
            self._forward_s[rows] = self._stage.compute.time(rows)
        self._block_s = self._forward_s[rows] / self._stage.blocks
        self._blocks_left, self._batch_from = blocks, self._clock.now
        self._run += 1
        self._clock.after(blocks * self._block_s, self._finish, self._run)

    def _shrink(self) -> None:
        """Rows of the running forward died: the next block starts without them."""
        if not self._batch or not any(row.dead for row in self._batch) or self._block_s <= 0:
            return
        done = min(self._blocks_left, math.ceil((self._clock.now - self._batch_from) / self._block_s - 1e-9))
        self._run += 1
        self._clock.at(self._batch_from + done * self._block_s, self._resume, self._run, done)

    def _resume(self, run: int, done: int) -> None:
        if run != self._run:
            return
        self._account(done)
        self._batch = [row for row in self._batch if not row.dead]
        if self._batch:
            self._schedule(self._blocks_left - done)
        else:
            self._start()

    def _finish(self, run: int) -> None:
        if run != self._run:
            return
        self._account(self._blocks_left)
        rows, self._batch = [row for row in self._batch if not row.dead], []
        if rows:
            self._forward(rows)
        self._start()

    def _account(self, blocks: int) -> None:
        self.computed += len(self._batch) * blocks / self._stage.blocks
        self.busy_s += blocks * self._block_s


class Verifier:
    """The last stage's second half: commits a token as soon as the root's row is computed, and tells everybody."""

    def __init__(self, prompt_length: int, broadcast: Callable[[], Node | None]):
        """:param broadcast: commits the next token everywhere, and returns the candidate that it confirms at this
        stage
        """
        self._broadcast = broadcast
        self._root = prompt_length - 1
        self._ready = self._root - 1  # the last committed position whose row is computed
        self._computed: set[int] = set()

    def verify(self, rows: list[Row]) -> None:
        for row in rows:
            if row.position <= self._root:
                self._ready = max(self._ready, row.position)
            else:
                self._computed.add(row.spec.id)
        while self._ready == self._root:
            hit = self._broadcast()
            self._root += 1
            if hit is not None and hit.id in self._computed:
                self._ready = self._root
            if hit is None:
                self._computed.clear()  # nothing that was computed descends from the new root
