"""The books of one decoding stream at one stage: which rows wait, where their KV goes, what is dead.

No tensors are computed here. Columns of the KV buffer: `0 .. arena-1` candidates, `arena + p` the committed token at
position `p`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
import torch

from bloombee_spec.kv.arena import Arena
from bloombee_spec.lane_rows import Answer, LaneBatch, Row, RowLog
from bloombee_spec.tree import Commit, NodeSpec, TokenTree, committed_ref
from bloombee_spec.wire.frames import FrameError, PrefixFrame

FORWARDED_IDS = 256  # canonical ids remembered for parents that a late frame may still name


class LaneBooks:
    """
    :param arena: columns for candidates; the sender keeps at most this many alive (credits)
    :param max_length: committed positions that the KV buffer holds
    :param inject: this stage embeds tokens, so after a miss it starts the canonical row itself instead of waiting for
        the client
    :param log: keeps the output rows of committed tokens, where another stage may need them again
    """

    def __init__(self, *, arena: int, max_length: int, inject: bool, log: RowLog | None = None):
        self.arena, self.max_length, self.inject, self.log = Arena(arena), max_length, inject, log
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
        self._queue: deque[Row | Answer | tuple[PrefixFrame, list[Row]]] = deque()
        self._moves: list[tuple[int, int]] = []
        self._forwarded: OrderedDict[int, int] = OrderedDict()  # position -> id under which its row left this stage
        self._renamed: OrderedDict[int, int] = (
            OrderedDict()
        )  # id of a duplicate canonical node -> the id that was forwarded

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
    def urgent(self) -> bool:
        """The first row that waits is on the committed path."""
        return any(not isinstance(item, Row) or item.node is None for item in list(self._queue)[:1])

    def take(self, max_rows: int) -> LaneBatch:
        """Dequeue the next rows in order, dropping the dead; ancestors always precede descendants."""
        batch = LaneBatch([], self.epoch)
        while self._queue:
            item = self._queue[0]
            if isinstance(item, Answer):
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
        return moves

    def finish(
        self, batch: LaneBatch, n_computed: int, survivors: Sequence[Row], outputs: torch.Tensor | None = None
    ) -> list[Row]:
        """Account for a forward; returns the rows that are still live, to be sent on.

        :param survivors: rows that went through all blocks (others were dropped between two blocks)
        :param outputs: `[len(survivors), hidden]`, for the log
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
        if self.log is not None and outputs is not None:
            self._keep_outputs(survivors, outputs)
        return live

    def _keep_outputs(self, rows: Sequence[Row], outputs: torch.Tensor) -> None:
        """Those of committed rows go to the log, those of candidates wait for the verdict."""
        assert self.log is not None
        at = 0
        while at < len(rows):
            row, end = rows[at], at + 1
            if row.node is None:
                while end < len(rows) and rows[end].node is None and rows[end].position == rows[end - 1].position + 1:
                    end += 1
                if self.is_live(row):
                    self.log.put(row.position, outputs[at:end])
            elif self.is_live(row):
                row.output = outputs[at]
            at = end

    def take_counters(self) -> tuple[int, int]:
        counters = self.computed, self.dropped
        self.computed = self.dropped = 0
        return counters

    def forwarded_spec(self, row: Row) -> NodeSpec:
        """The row's node as the next stage knows it: a parent that was a duplicate goes by the name of its twin."""
        return NodeSpec(row.id, self._renamed.get(row.parent, row.parent), row.token)

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
                if self.log is not None and row.output is not None:
                    self.log.put(commit.position, row.output[None])
                    row.output = None
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
        if self.log is not None:
            self.log.truncate(position)
        kept = [(source, target) for source, target in self._moves if target < self.arena.size + position]
        for move in self._moves:
            if move not in kept:
                self.arena.give(move[0])
        self._moves = kept

    def _answer(self, seq: int, n_dropped: int) -> None:
        self._drop(n_dropped)
        if self._queue and isinstance(self._queue[-1], Answer):
            seq = max(seq, self._queue.pop().seq)  # type: ignore[union-attr]
        self._queue.append(Answer(seq))

    def _drop(self, n: int) -> None:
        self.dropped += n
        self.total_dropped += n

    @staticmethod
    def _remember(book: OrderedDict[int, int], key: int, value: int) -> None:
        book[key] = value
        while len(book) > FORWARDED_IDS:
            book.popitem(last=False)
