"""One decoding stream at one stage: what each kind of frame does to its books.

The event loop calls `accept_*`, the runtime thread calls `take` and `finish`; the session's lock is held around each
call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bloombee_spec.lane_books import LaneBooks
from bloombee_spec.lane_rows import Answer, LaneBatch, Row, RowLog
from bloombee_spec.tree import Commit, Fate, NodeSpec, committed_ref
from bloombee_spec.wire.frames import CommitFrame, FrameError, NodesFrame, PrefixFrame, RewindFrame

__all__ = ["Lane", "LaneBatch", "Row"]


@dataclass(frozen=True, slots=True)
class _WaitingNode:
    epoch: int
    spec: NodeSpec
    hidden: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _WaitingPrefix:
    frame: PrefixFrame
    hidden: torch.Tensor | None


class Lane(LaneBooks):
    """The books, and the frames that change them. Frames that build upon commits which are still on their way wait."""

    def __init__(self, *, arena: int, max_length: int, inject: bool, log: RowLog | None = None):
        super().__init__(arena=arena, max_length=max_length, inject=inject, log=log)
        # In order of arrival: what has no free column yet, or builds upon commits that are still on their way.
        self._waiting: deque[_WaitingNode | _WaitingPrefix | Answer] = deque()
        self._waiting_nodes = 0
        self._waiting_rewind: RewindFrame | None = None
        self._newest_epoch = 0  # announced by a prefix; `epoch` follows once the commits before it are here

    @classmethod
    def resumed(cls, old: LaneBooks, length: int, *, inject: bool, log: RowLog | None) -> Lane:
        """Books of a new session over the buffer of `old`, from the first `length` tokens on, or those computed."""
        lane = cls(arena=old.arena.size, max_length=old.max_length, inject=inject, log=log)
        length = min(length, old.filled)
        for token in old.tree.committed[:length]:
            lane.tree.commit(token)
        lane.scheduled = lane.filled = length
        lane._moves = [(source, target) for source, target in old._moves if target < old.arena.size + length]
        lane.arena.reserve([source for source, _ in lane._moves])
        if log is not None:
            log.truncate(length)
        return lane

    def fill(self, start: int, tokens: Sequence[int]) -> None:
        """The KV of these committed tokens came from another server.

        :raises FrameError: they do not follow what is here, or do not fit, or a text is under way already
        """
        end = start + len(tokens)
        if start != self.filled or start != self.tree.length or self.epoch or end > self.max_length:
            raise FrameError(f"KV of positions {start} to {end}, but {self.filled} of {self.max_length} are here")
        for token in tokens:
            self.tree.commit(token)
        self.scheduled = self.filled = end
        if self.log is not None:
            self.log.skip(end)

    def accept_prefix(self, frame: PrefixFrame, hidden: torch.Tensor | None) -> None:
        """:param hidden: `[len(tokens), hidden]`, None when this stage embeds"""
        if frame.start + len(frame.tokens) > self.max_length or frame.limit > self.max_length:
            end = frame.start + len(frame.tokens)
            raise FrameError(f"prefix ends at {end}, limit {frame.limit}: the session holds {self.max_length} tokens")
        if frame.epoch < self._newest_epoch:
            self._answer(frame.seq, len(frame.tokens))
            return
        if frame.epoch > self._newest_epoch:
            if self._newest_epoch:  # before the first epoch, what waits is the text that this one builds upon
                self._purge()
            self._newest_epoch = frame.epoch
        pending = [item[0] for item in self._queue if isinstance(item, tuple)]
        pending += [item.frame for item in self._waiting if isinstance(item, _WaitingPrefix)]
        if sum(len(f.tokens) for f in pending) + len(frame.tokens) > self.max_length:
            raise FrameError(f"more than {self.max_length} prefix tokens wait: each is sent once per epoch")
        self._waiting.append(_WaitingPrefix(frame, hidden))
        self._admit()

    def accept_nodes(self, frame: NodesFrame, hidden: torch.Tensor | None) -> None:
        """:param hidden: `[len(nodes), hidden]`, None when this stage embeds"""
        self.computed += frame.computed
        self.dropped += frame.dropped
        # An arena of rows that passed, as many that wait for their commits, one correction, one canonical row.
        if self._waiting_nodes + len(frame.nodes) > 2 * self.arena.size + 2:
            raise FrameError(f"{self._waiting_nodes + len(frame.nodes)} candidates wait: more than the credits allow")
        for i, spec in enumerate(frame.nodes):
            self._waiting.append(_WaitingNode(frame.epoch, spec, None if hidden is None else hidden[i]))
        self._waiting_nodes += len(frame.nodes)
        if self._waiting and isinstance(self._waiting[-1], Answer):
            self._waiting.pop()
        self._waiting.append(Answer(frame.seq))
        self._admit()

    def accept_commit(self, frame: CommitFrame) -> list[Commit]:
        """Commits of an older epoch, and tokens that are known already, are ignored."""
        if frame.epoch < self.epoch:
            return []
        if frame.epoch > self.epoch or frame.position > self.tree.length:
            raise FrameError(f"commit at {frame.position}, but only {self.tree.length} tokens are committed")
        commits = [self._commit(token) for token in frame.tokens[self.tree.length - frame.position :]]
        if self._waiting_rewind is not None:
            self.accept_rewind(self._waiting_rewind)
        self._admit()
        return commits

    def accept_rewind(self, frame: RewindFrame) -> None:
        """The client has seen all commits up to `frame.position`, so those that are not here yet are on their way:
        wait for them."""
        if frame.epoch <= self.epoch:
            self._waiting_rewind = None
        elif frame.position > self.max_length:
            raise FrameError(f"rewind to {frame.position}: the session holds {self.max_length} tokens")
        elif frame.position > self.tree.length:
            self._waiting_rewind = frame
        else:
            self._waiting_rewind = None
            self._enter_epoch(frame.epoch)
            self._truncate(frame.position)
            self._admit()

    def set_rule(self, epoch: int, stop_tokens: Sequence[int]) -> None:
        self.rule_epoch, self.stop_tokens = epoch, frozenset(stop_tokens)
        self.look_again()  # a root whose row is here already may have waited for the rule

    def look_again(self) -> None:
        """Something arrived beside the frames: what waits for it is to be looked at in the next forward."""
        self._answer(0, 0)

    @property
    def has_work(self) -> bool:
        return bool(self._queue) or (bool(self._waiting) and bool(self._moves))

    def commit_own(self, token: int) -> Commit:
        """The verifier's own commit."""
        commit = self._commit(token)
        self._admit()
        return commit

    def finish(
        self, batch: LaneBatch, n_computed: int, survivors: Sequence[Row], outputs: torch.Tensor | None = None
    ) -> list[Row]:
        live = super().finish(batch, n_computed, survivors, outputs)
        if batch.epoch == 0:  # a text may have waited for its beginning
            self._admit()
        return live

    def take_moves(self) -> list[tuple[int, int]]:
        moves = super().take_moves()
        if moves:  # columns became free
            self._admit()
        return moves

    def _admit(self) -> None:
        """Apply what waits, in order, for as long as columns are free and ancestors known."""
        while self._waiting:
            item = self._waiting[0]
            if isinstance(item, Answer):
                self._answer(item.seq, 0)
            elif isinstance(item, _WaitingPrefix):
                if item.frame.epoch > self.epoch and item.frame.start > self.tree.length:
                    return  # commits of the old epoch that the client has seen are still on their way
                if self.epoch == 0 and item.frame.epoch and item.frame.start > self.filled:
                    return  # rows of an earlier text are still computed
                self._start_prefix(item.frame, item.hidden)
            elif item.epoch < self.epoch:
                self._waiting_nodes -= 1
                self._drop(1)
            elif item.epoch > self.epoch:
                raise FrameError(f"candidates of epoch {item.epoch} before its prefix (epoch {self.epoch})")
            elif self._insert(item.spec, item.hidden):
                self._waiting_nodes -= 1
            else:
                return
            self._waiting.popleft()

    def _purge(self) -> None:
        """A new epoch is announced: of the older ones only commits still matter. Rows below its start passed this
        stage long ago."""
        seq = 0
        for item in (*self._queue, *self._waiting):
            if isinstance(item, Answer):
                seq = max(seq, item.seq)
            elif isinstance(item, tuple):
                seq = max(seq, item[0].seq)
                self._drop(len(item[1]))
            elif isinstance(item, _WaitingPrefix):
                seq = max(seq, item.frame.seq)
                self._drop(len(item.frame.tokens))
            else:
                self._drop(1)
        self._queue.clear()
        self._waiting.clear()
        self._waiting_nodes = 0
        self._answer(seq, 0)

    def _start_prefix(self, frame: PrefixFrame, hidden: torch.Tensor | None) -> None:
        self._enter_epoch(frame.epoch)
        if frame.epoch < self.epoch:
            self._answer(frame.seq, len(frame.tokens))
            return
        if frame.start > self.scheduled:
            raise FrameError(f"prefix starts at {frame.start}, but only {self.scheduled} rows are here")
        self._truncate(frame.start)
        rows = []
        for i, token in enumerate(frame.tokens):
            position = frame.start + i
            self.tree.commit(token)
            name = committed_ref(position)
            row_hidden = None if hidden is None else hidden[i]
            column = self.arena.size + position
            rows.append(Row(name, committed_ref(position - 1), token, position, frame.epoch, column, None, row_hidden))
        self.scheduled = frame.start + len(frame.tokens)
        self.limit = frame.limit
        self._queue.append((frame, rows))

    def _insert(self, spec: NodeSpec, hidden: torch.Tensor | None) -> bool:
        if spec.id in self.tree.nodes:
            raise FrameError(f"node id {spec.id} is already in use")
        if spec.parent < 0 and spec.parent not in self.tree.nodes and -spec.parent > self.tree.length:
            return False  # the commit that it builds upon is still on its way from the verifier
        if self.arena.free == 0 and self.tree.fate(spec) is Fate.LIVE:
            return False
        (verdict,) = self.tree.extend((spec,))
        if verdict.fate is Fate.COMMITTED:
            if verdict.position == self.scheduled:
                self._queue_canonical(spec.id, spec.parent, spec.token, hidden)
            else:
                twin = self._forwarded.get(verdict.position, committed_ref(verdict.position))
                self._remember(self._renamed, spec.id, twin)
                self._drop(1)
            return True
        if verdict.node is None:
            self._drop(1)
            return True
        if self.scheduled < self.tree.length:
            raise FrameError(f"candidate at {verdict.position} before the row of its ancestor at {self.scheduled}")
        row = Row(
            spec.id, spec.parent, spec.token, verdict.position, self.epoch, self.arena.take(), verdict.node, hidden
        )
        self._rows[spec.id] = row
        self._queue.append(row)
        return True
