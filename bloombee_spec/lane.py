"""Bookkeeping of one decoding stream at one stage: which rows wait, where their KV goes, what is dead.

No tensors are computed here. The event loop calls `accept_*`, the runtime thread calls `take` and `finish`; the
session's lock
is held around each call. Columns of the KV buffer: `0 .. arena-1` candidates, `arena + p` the committed token at
position `p`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from bloombee_spec.kv.arena import Arena
from bloombee_spec.tree import Commit, Fate, Node, NodeSpec, TokenTree, committed_ref
from bloombee_spec.wire.frames import CommitFrame, FrameError, NodesFrame, PrefixFrame, RewindFrame

FORWARDED_IDS = 256  # canonical ids remembered for parents that a late frame may still name


@dataclass(eq=False, slots=True)
class Row:
    """One row to compute. `node` is None for a canonical row: its position is committed and its KV goes to the
    prefix."""

    id: int
    parent: int
    token: int
    position: int
    epoch: int
    column: int
    node: Node | None
    hidden: torch.Tensor | None = None  # [hidden]; None when this stage embeds the token
    started: bool = False
    computed: bool = False


@dataclass(frozen=True, slots=True)
class _Answer:
    """End of a client frame in the queue: once everything before it left, `seq` is answered."""

    seq: int


@dataclass(frozen=True, slots=True)
class _WaitingNode:
    epoch: int
    spec: NodeSpec
    hidden: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _WaitingPrefix:
    frame: PrefixFrame
    hidden: torch.Tensor | None


@dataclass(eq=False, slots=True)
class LaneBatch:
    """What one forward computes for one lane: a prefix chunk, if any, then candidate rows."""

    rows: list[Row]
    epoch: int
    prefix: PrefixFrame | None = None
    prefix_rows: int = 0
    seq: int = 0
    columns: np.ndarray[Any, np.dtype[Any]] = field(
        default_factory=lambda: np.empty(0, dtype=np.int64)
    )  # [n] destination of each row
    mask: np.ndarray[Any, np.dtype[Any]] | None = None  # [n, end - begin]; None when every row sees the whole slice
    begin: int = 0  # the attended slice of the KV buffer
    end: int = 0

    @property
    def canonical(self) -> bool:
        return bool(self.rows) and self.rows[0].node is None


class Lane:
    """
    :param arena: columns for candidates; the sender keeps at most this many alive (credits)
    :param max_length: committed positions that the KV buffer holds
    :param inject: this stage embeds tokens, so after a miss it starts the canonical row itself instead of waiting for
        the client
    """

    def __init__(self, *, arena: int, max_length: int, inject: bool):
        self.arena, self.max_length, self.inject = Arena(arena), max_length, inject
        self.tree = TokenTree()
        self.epoch = 0
        self.limit = 0
        self.stop_tokens: frozenset[int] = frozenset()
        self.prefix_complete = False  # the last prefix chunk of this epoch was computed
        self._after_prefix = False  # the last committed token was generated, not given
        self.rule_epoch = -1  # epoch for which the client has sent the generation rule
        self.scheduled = 0  # prefix rows that are computed, queued or running: always a contiguous range from 0
        self.filled = 0  # prefix rows that are computed: always a contiguous range from 0
        self.computed = self.dropped = 0  # since the last frame that left
        self.answered = 0
        self.total_computed = self.total_dropped = 0
        self._rows: dict[int, Row] = {}  # live node id -> its row
        self._queue: deque[Row | _Answer | tuple[PrefixFrame, list[Row]]] = deque()
        # In order of arrival: what has no free column yet, or builds upon commits that are still on their way.
        self._waiting: deque[_WaitingNode | _WaitingPrefix | _Answer] = deque()
        self._waiting_nodes = 0
        self._waiting_rewind: RewindFrame | None = None
        self._newest_epoch = 0  # announced by a prefix; `epoch` follows once the commits before it are here
        self._moves: list[tuple[int, int]] = []
        self._forwarded: OrderedDict[int, int] = OrderedDict()  # position -> id under which its row left this stage
        self._renamed: OrderedDict[int, int] = (
            OrderedDict()
        )  # id of a duplicate canonical node -> the id that was forwarded

    # ---------------------------------------------------------------- frames in

    def accept_prefix(self, frame: PrefixFrame, hidden: torch.Tensor | None) -> None:
        """:param hidden: `[len(tokens), hidden]`, None when this stage embeds"""
        if frame.start + len(frame.tokens) > self.max_length or frame.limit > self.max_length:
            end = frame.start + len(frame.tokens)
            raise FrameError(f"prefix ends at {end}, limit {frame.limit}: the session holds {self.max_length} tokens")
        if frame.epoch < self._newest_epoch:
            self._answer(frame.seq, len(frame.tokens))
            return
        if frame.epoch > self._newest_epoch:
            self._newest_epoch = frame.epoch
            self._purge()
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
        if self._waiting and isinstance(self._waiting[-1], _Answer):
            self._waiting.pop()
        self._waiting.append(_Answer(frame.seq))
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
        self._answer(0, 0)  # a root whose row is here already may have waited for the rule

    # ---------------------------------------------------------------- compute

    def is_live(self, row: Row) -> bool:
        if row.node is None:
            return row.epoch == self.epoch and row.position < self.tree.length
        return self.tree.is_live(row.node)

    @property
    def stopped(self) -> bool:
        """The verifier commits nothing more in this epoch: the limit is reached, or a stop token was committed."""
        length = self.tree.length
        return length >= self.limit or (
            length > 0 and self._after_prefix and self.tree.committed[-1] in self.stop_tokens
        )

    @property
    def has_work(self) -> bool:
        return bool(self._queue) or (bool(self._waiting) and bool(self._moves))

    @property
    def urgent(self) -> bool:
        """The first row that waits is on the committed path."""
        return any(not isinstance(item, Row) or item.node is None for item in list(self._queue)[:1])

    def take(self, max_rows: int) -> LaneBatch:
        """Dequeue the next rows in order, dropping the dead; ancestors always precede descendants."""
        batch = LaneBatch([], self.epoch)
        while self._queue:
            item = self._queue[0]
            if isinstance(item, _Answer):
                batch.seq = max(batch.seq, item.seq)
            elif isinstance(item, tuple):
                if batch.rows or batch.prefix is not None:
                    break
                frame, rows = item
                if frame.epoch == self.epoch:
                    batch.prefix, batch.prefix_rows = frame, len(rows)
                    batch.rows.extend(rows)
                    for row in rows:
                        row.started = True
                else:
                    self._drop(len(rows))
                batch.seq = max(batch.seq, frame.seq)
            elif not self.is_live(item):
                self._drop(1)
            elif len(batch.rows) >= max_rows:
                break
            else:
                item.started = True
                batch.rows.append(item)
            self._queue.popleft()
        self._place(batch)
        return batch

    def take_moves(self) -> list[tuple[int, int]]:
        """Committed rows whose KV is to be copied `(from column, to column)`; the caller copies before the next
        forward."""
        moves, self._moves = self._moves, []
        for source, _ in moves:
            self.arena.give(source)
        if moves:
            self._admit()
        return moves

    def finish(self, batch: LaneBatch, n_computed: int, survivors: Sequence[Row]) -> list[Row]:
        """Account for a forward; returns the rows that are still live, to be sent on.

        :param survivors: rows that went through all blocks (others were dropped between two blocks)
        """
        self.computed += n_computed
        self.total_computed += n_computed
        self._drop(len(batch.rows) - len(survivors))
        live = [row for row in survivors if self.is_live(row)]
        self._drop(len(survivors) - len(live))
        self.answered = max(self.answered, batch.seq)
        if batch.prefix is not None and batch.prefix.last and batch.prefix.epoch == self.epoch:
            self.prefix_complete = True
        for row in live:
            row.computed = True
            if row.node is None:
                self._remember(self._forwarded, row.position, row.id)
                self.filled = max(self.filled, row.position + 1)
        return live

    def take_counters(self) -> tuple[int, int]:
        counters = self.computed, self.dropped
        self.computed = self.dropped = 0
        return counters

    def forwarded_spec(self, row: Row) -> NodeSpec:
        """The row's node as the next stage knows it: a parent that was a duplicate goes by the name of its twin."""
        return NodeSpec(row.id, self._renamed.get(row.parent, row.parent), row.token)

    def commit_own(self, token: int) -> Commit:
        """The verifier's own commit."""
        commit = self._commit(token)
        self._admit()
        return commit

    def check(self) -> None:
        """Integrity: every arena column belongs to exactly one live row or one pending move; the ledger adds up."""
        held = [row.column for row in self._rows.values()] + [source for source, _ in self._moves]
        if sorted(held) != sorted(self.arena.used):
            raise AssertionError(f"arena columns {sorted(self.arena.used)} are used, {sorted(held)} are accounted for")
        if set(self._rows) != set(self.tree.nodes):
            raise AssertionError("live nodes and rows differ")
        if not self.filled <= self.scheduled <= self.tree.length:
            raise AssertionError(
                f"{self.filled} rows computed, {self.scheduled} scheduled, {self.tree.length} tokens committed"
            )

    # ---------------------------------------------------------------- inside

    def _commit(self, token: int) -> Commit:
        if self.scheduled != self.tree.length:
            raise FrameError(f"commit at {self.tree.length} before the row of {self.scheduled} arrived")
        if self.tree.length >= self.limit:
            raise FrameError(f"commit at {self.tree.length} beyond the client's limit {self.limit}")
        commit = self.tree.commit(token)
        self._after_prefix = True
        for node in commit.dead:
            self.arena.give(self._rows.pop(node.id).column)
        if commit.hit is not None:
            row = self._rows.pop(commit.hit.id)
            target = self.arena.size + commit.position
            row.node = None
            if row.computed:
                self.filled = commit.position + 1
            if row.started:
                self._moves.append((row.column, target))
            else:
                self.arena.give(row.column)
                row.column = target
            self._remember(self._forwarded, commit.position, row.id)
            self.scheduled += 1
        elif self.inject and not self.stopped and commit.position < self.limit - 1:
            self._queue_canonical(committed_ref(commit.position), committed_ref(commit.position - 1), token, None)
        return commit

    def _queue_canonical(self, name: int, parent: int, token: int, hidden: torch.Tensor | None) -> None:
        column = self.arena.size + self.scheduled
        self._queue.append(Row(name, parent, token, self.scheduled, self.epoch, column, None, hidden))
        self._remember(self._forwarded, self.scheduled, name)
        self.scheduled += 1

    def _admit(self) -> None:
        """Apply what waits, in order, for as long as columns are free and ancestors known."""
        while self._waiting:
            item = self._waiting[0]
            if isinstance(item, _Answer):
                self._answer(item.seq, 0)
            elif isinstance(item, _WaitingPrefix):
                if item.frame.epoch > self.epoch and item.frame.start > self.tree.length:
                    return  # commits of the old epoch that the client has seen are still on their way
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
            if isinstance(item, _Answer):
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

    def _place(self, batch: LaneBatch) -> None:
        """Columns and visibility of a batch, as of now: what is committed later moves only after this forward."""
        rows = batch.rows
        if not rows:
            return
        batch.columns = np.fromiter((row.column for row in rows), dtype=np.int64, count=len(rows))
        size, length = self.arena.size, self.tree.length
        seen = np.fromiter((row.position + 1 if row.node is None else length for row in rows), np.int64, len(rows))
        paths = [[] if row.node is None else [self._rows[node.id].column for node in row.node.path()] for row in rows]
        batch.begin = min((min(path) for path in paths if path), default=size)
        batch.end = size + int(seen.max())
        if len(rows) == 1 and batch.begin == size:
            return
        mask = np.zeros((len(rows), batch.end - batch.begin), dtype=bool)
        mask[:, size - batch.begin :] = np.arange(batch.end - size)[None, :] < seen[:, None]
        for i, path in enumerate(paths):
            mask[i, np.asarray(path, dtype=np.int64) - batch.begin] = True
        batch.mask = mask

    def _enter_epoch(self, epoch: int) -> None:
        if epoch <= self.epoch:
            return
        self.epoch = epoch
        self._after_prefix = self.prefix_complete = False
        self.scheduled = self.filled  # what was queued or running is lost with the old epoch
        self._forwarded.clear()
        self._renamed.clear()

    def _truncate(self, position: int) -> None:
        """Forget everything from `position` on, and every candidate."""
        for node in self.tree.rewind(min(position, self.tree.length)):
            self.arena.give(self._rows.pop(node.id).column)
        self.scheduled = min(self.scheduled, position)
        self.filled = min(self.filled, position)
        kept = [(source, target) for source, target in self._moves if target < self.arena.size + position]
        for move in self._moves:
            if move not in kept:
                self.arena.give(move[0])
        self._moves = kept

    def _answer(self, seq: int, n_dropped: int) -> None:
        self._drop(n_dropped)
        if self._queue and isinstance(self._queue[-1], _Answer):
            seq = max(seq, self._queue.pop().seq)  # type: ignore[union-attr]
        self._queue.append(_Answer(seq))

    def _drop(self, n: int) -> None:
        self.dropped += n
        self.total_dropped += n

    @staticmethod
    def _remember(book: OrderedDict[int, int], key: int, value: int) -> None:
        book[key] = value
        while len(book) > FORWARDED_IDS:
            book.popitem(last=False)
