"""The client's side of one decoding stream: its token tree, its drafter, what is in flight. No I/O here: frames in,
frames out.

The decode loop calls `begin`, `commit` and `stop`; drafting (`ask`, `answer`, …) may run in another thread. Both hold
`lock`, which is never held while the drafter thinks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bloombee_spec.choose import Chooser
from bloombee_spec.client.candidates import Ask, Candidates, root_ref_of
from bloombee_spec.client.measured import RouteMeter
from bloombee_spec.client.pace import Pace
from bloombee_spec.client.planning import Planning
from bloombee_spec.client.prefix import common_prefix, prefix_frames
from bloombee_spec.client.stats import Tally
from bloombee_spec.client.think import Lesson, go_on, layers, start_over, think
from bloombee_spec.config import SpecConfig
from bloombee_spec.draft.base import Drafter, Proposal
from bloombee_spec.draft.cache import HedgeCache
from bloombee_spec.tree import NodeSpec, TokenTree
from bloombee_spec.wire.frames import CommitFrame, FrameError, NodesFrame, PrefixFrame


@dataclass(frozen=True)
class StreamRequest:
    """One row of a `generate` call.

    :param tokens: prompt, with everything that was committed before it
    :param limit: total length at which the stream ends
    :param sampling: the rule on the wire (empty: greedy); `row` its noise row
    :param chooser: the rule where only the client can evaluate it; for a route that lets the client verify
    """

    tokens: tuple[int, ...]
    limit: int
    stop_tokens: tuple[int, ...] = ()
    sampling: Any = None
    row: int = 0
    chooser: Chooser | None = None


class Stream:
    """
    :param lane: index in the session
    :param drafter: None decodes plainly
    :param credits: most candidates alive at a time
    :param inject: the first stage starts canonical rows by itself; otherwise the client sends each corrected token
    :param meter: what the route is measured to be, for the planner and the price of a candidate; shared by all streams
    """

    def __init__(
        self,
        lane: int,
        drafter: Drafter | None,
        config: SpecConfig,
        *,
        credits: int,
        inject: bool,
        vocab_size: int,
        meter: RouteMeter | None = None,
    ):
        self.lane, self.drafter, self.config = lane, drafter, config
        self.credits, self.inject = min(credits, config.max_candidates), inject
        self.lock = threading.Lock()
        self.tree = TokenTree()
        self.candidates = Candidates(self.tree, config.min_probability or 0.0, vocab_size)
        self.hedges = HedgeCache()
        self._meter = meter
        self.planning: Planning | None = None
        if meter is not None and drafter is not None and config.plan != "none":
            self.planning = Planning(meter, config, self.credits, drafter.instant)
        self._set_price()
        self._pace = Pace(meter) if meter is not None and self.planning is not None else None
        self._missed = False  # whether the last committed token was no candidate
        self._missed_at: float | None = None  # when the lap of its row began
        self.epoch = 0
        self.request = StreamRequest((), 0)
        self.finished = True
        self.tally = Tally()
        self.held = 0  # rows that surely passed all stages: those below a token that was committed from them
        self._vocab_size = vocab_size
        self._lessons: list[Lesson] = []  # what the drafter does not know yet

    # ---------------------------------------------------------------- a turn

    def begin(self, request: StreamRequest, chunk: int) -> list[PrefixFrame]:
        """Start from `request.tokens`; only what the stages do not hold yet is sent, in chunks of at most `chunk`
        tokens.

        :returns: frames without numbers (`seq`)
        """
        known, tokens = self.tree.committed, request.tokens
        same = common_prefix(known, tokens)
        start = max(0, min(same, self.held, len(tokens) - 1))
        self.held = start
        self.request, self.finished = request, len(tokens) >= request.limit
        self.epoch += 1
        self.tree.rewind(start)
        for token in tokens[start:]:
            self.tree.commit(token)
        self.candidates.restart(root_ref_of(len(tokens)), lap=1)
        self.hedges.clear()
        self.tally = Tally()
        self._missed_at = None
        self._lessons = [start_over(tokens, request.sampling or {}, request.row, self._vocab_size)]
        return prefix_frames(self.lane, self.epoch, tokens, start, chunk, request.limit)

    def resume(self, tokens: Sequence[int]) -> None:
        """Before the first turn: the stages hold the KV of these tokens, from an earlier ring."""
        for token in tokens:
            self.tree.commit(token)
        self.held = len(tokens)

    def commit(self, frame: CommitFrame) -> tuple[list[int], list[NodeSpec]]:
        """Apply a commit frame; one of an older epoch is ignored.

        :returns: new tokens, and nodes to send at once: after a miss the corrected token, if the client has to send
            it, with what was drafted ahead for just this outcome
        :raises FrameError: the verifier skipped a position, or runs ahead of the client's epoch
        """
        if frame.epoch < self.epoch or self.finished:
            return [], []
        if frame.epoch > self.epoch or frame.position > self.tree.length:
            raise FrameError(
                f"commit at {frame.position} in epoch {frame.epoch}, expected {self.tree.length} in {self.epoch}"
            )
        self.tally.rows_computed += frame.computed
        self.tally.rows_dropped += frame.dropped
        specs: list[NodeSpec] = []
        taken: list[int] = []
        for token in frame.tokens[max(0, self.tree.length - frame.position) :]:
            specs = self._commit_one(token)
            taken.append(token)
            if self.tree.length >= self.request.limit or token in self.request.stop_tokens:
                self.finished = True
                break
        if taken:
            self._time_lap()
            self._set_price()
            self._lessons.append(go_on(tuple(taken)))
        return taken, [] if self.finished else specs

    def stop(self, length: int) -> None:
        """The caller wants no more: keep `length` tokens, and enter a new epoch so that what is in flight is
        ignored."""
        self.finished = True
        self.epoch += 1
        self.tree.rewind(min(length, self.tree.length))
        self.candidates.restart(root_ref_of(self.tree.length), lap=1)
        self.hedges.clear()
        self.held = min(self.held, self.tree.length)

    def _time_lap(self) -> None:
        """From a miss to the next commit nothing shortens a lap: candidates arrive behind the corrected token."""
        now = time.perf_counter()
        if self._missed_at is not None and self._meter is not None:
            self._meter.observe_lap(now - self._missed_at)
        self._missed_at = now if self._missed else None

    def _set_price(self) -> None:
        if self._meter is not None and self.config.min_probability is None:
            self.candidates.min_chance = self._meter.min_probability

    def _commit_one(self, token: int) -> list[NodeSpec]:
        verdict = self.candidates.judge(token)
        if verdict is not None and self.planning is not None:
            self.planning.judged(*verdict)
        commit = self.tree.commit(token)
        self.held = commit.position
        self.tally.tokens += 1
        self.tally.modes["unplanned" if self.planning is None else self.planning.name] += 1
        self.tally.laps = max(self.tally.laps, self.candidates.root_lap)
        self._missed = commit.hit is None
        if commit.hit is not None:
            self.tally.hits += 1
            self.tally.hits_by_depth[self.candidates.move(commit)] += 1
            self.hedges.commit(token)
            if self.planning is not None:
                self.planning.hit()
            return []
        self.tally.misses += 1
        if self.planning is not None:
            self.planning.missed()
        probe = self.planning is not None and self.planning.probe
        lap = self.candidates.root_lap + 1
        specs: list[NodeSpec] = []
        if self.inject:
            self.candidates.restart(root_ref_of(self.tree.length), lap, probe)
        else:
            specs.append(self.candidates.correct(token))
            self.tree.extend(specs)  # known as the root from now on
            self.candidates.restart(specs[0].id, lap, probe)
        if self.drafter is not None and not self.drafter.instant and self.config.hedges:
            prepared = self.hedges.miss(token)
            self.tally.hedge_hits += prepared is not None
            self.tally.hedge_misses += prepared is None
            if prepared is not None:
                ask = self.ask(self.credits)
                specs += self._placed(ask, prepared) if ask is not None else []
        return specs

    # ---------------------------------------------------------------- drafting

    @property
    def room(self) -> int:
        """Candidates that may be added now."""
        room = self.credits - len(self.tree)
        if self.planning is None:
            return room
        tree = self.planning.tree
        if self.planning.off or (tree is not None and len(self.tree) > 0):
            return 0
        return room if tree is None else min(room, tree.tree_size)

    @property
    def deepest(self) -> int:
        """The last token is decided by the row before it, so no candidate is of use at its place or beyond."""
        return self.request.limit - 2

    def pause(self) -> float:
        """Seconds until more candidates may be sent."""
        return 0.0 if self._pace is None else self._pace.pause()

    def ask(self, most: int | None = None) -> Ask | None:
        """The next question for the drafter, None when there is no room, or nothing likely enough to ask.

        :param most: proposals at most; None: one burst
        """
        if self.drafter is None or self.finished:
            return None
        most = self._burst if most is None else most
        depth = self.config.max_depth
        if self.planning is None:
            return self.candidates.next_ask(min(self.room, most), depth, self.deepest)
        depth = depth if self.planning.tree is None else min(depth, self.planning.tree.depth)
        return self.candidates.next_ask(min(self.room, most), depth, self.deepest, self.planning.layers_per_ask)

    @property
    def _burst(self) -> int:
        """Candidates to send in one go: a synchronous tree leaves whole."""
        if self.planning is not None and self.planning.tree is not None:
            return self.credits
        return self.config.burst if self._pace is None else self._pace.burst(self.config.burst)

    def lessons(self) -> list[Lesson]:
        """What the drafter has to learn before it answers, in order; handed out once."""
        lessons, self._lessons = self._lessons, []
        return lessons

    def answer(self, ask: Ask, proposals: Sequence[Proposal]) -> list[NodeSpec]:
        """Candidates to send; none when the question is void by now."""
        specs = [] if self.finished else self._placed(ask, proposals)
        if self._pace is not None:
            self._pace.sent(len(specs))
        return specs

    def drafted(self, seconds: float, proposals: Sequence[Proposal]) -> None:
        """The drafter thought for `seconds` beside the network."""
        self.tally.draft_s += seconds
        if self.planning is not None:
            self.planning.drafted(seconds, layers(proposals))

    @property
    def hedge_budget(self) -> int:
        """Outcomes to prepare for at a time."""
        if self.planning is None:
            return self.config.hedges
        return self.planning.hedged_outcomes

    def draft(self) -> list[NodeSpec]:
        """Ask a drafter that answers at once, until it has nothing more for one burst."""
        specs: list[NodeSpec] = []
        most = 0 if self.pause() > 0 else self._burst
        while len(specs) < most and (ask := self.ask(most)) is not None:
            started = time.perf_counter()
            proposals = think(self.drafter, self.lessons(), ask) if self.drafter is not None else []
            self.tally.draft_s += time.perf_counter() - started
            specs += self.answer(ask, proposals)
            if self.planning is not None and self.planning.tree is not None:
                break
        return specs

    def frame(self, specs: Sequence[NodeSpec], seq: int) -> NodesFrame:
        return NodesFrame(self.lane, self.epoch, seq, tuple(specs))

    def _placed(self, ask: Ask, proposals: Sequence[Proposal]) -> list[NodeSpec]:
        width = self.credits if self.planning is None else self.planning.width
        specs = self.candidates.place(ask, proposals, self.room, width)
        self.tally.proposed += len(specs)
        for spec in specs:
            self.tally.sent_by_depth[self.candidates.depth_of(spec)] += 1
        return specs
