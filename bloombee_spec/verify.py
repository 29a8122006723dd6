"""The verifier: turns hidden rows into committed tokens, at the last stage or at the client, with the same code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from bloombee_spec.choose import Chooser
from bloombee_spec.lane import Lane, Row
from bloombee_spec.tree import Commit

Head = Callable[[torch.Tensor], torch.Tensor]
"""Final norm and LM head: `[n, hidden]` to `[n, vocab]`, fp32."""


@dataclass(frozen=True, slots=True)
class Committed:
    """What one walk committed: `tokens` at `position`, `position + 1`, ... in `epoch`; possibly nothing."""

    epoch: int
    position: int
    tokens: tuple[int, ...]


class Verifier:
    """Walks one lane's tree as far as hidden rows reach. The LM head is applied to a row only once that row is the
    root.

    :param lock: guards the lane; not held while the head computes
    """

    def __init__(self, lane: Lane, lock: threading.Lock, head: Head):
        self._lane, self._lock, self._head = lane, lock, head
        self._root: torch.Tensor | None = None  # [hidden]: row of the last committed token
        self._waiting: dict[int, torch.Tensor] = {}  # rows of live candidates by node id
        self._epoch = -1
        self._chooser: Chooser | None = None
        self.head_rows = 0

    def set_chooser(self, chooser: Chooser) -> None:
        """The rule of the epoch that the lane's `rule_epoch` names."""
        self._chooser = chooser

    def step(self, rows: Sequence[Row], hidden: Iterable[torch.Tensor]) -> Committed:
        """Take the rows of a forward (`hidden`: one `[hidden]` each), then commit what can be committed."""
        lane = self._lane
        with self._lock:
            epoch, position = lane.epoch, lane.tree.length
            if self._epoch != epoch:
                self._root, self._waiting, self._epoch = None, {}, epoch
            for row, part in zip(rows, hidden):
                if row.node is not None:
                    self._waiting[row.id] = part
                elif row.position == position - 1 and lane.prefix_complete:
                    self._root = part
            ready = self._chooser is not None and lane.rule_epoch == epoch
        tokens: list[int] = []
        while ready and self._root is not None and not lane.stopped:
            commit = self._commit_next(epoch)
            if commit is None:  # rewound meanwhile: the client ignores commits of an older epoch
                return Committed(epoch, position, ())
            tokens.append(commit.token)
        return Committed(epoch, position, tuple(tokens))

    def _commit_next(self, epoch: int) -> Commit | None:
        assert self._root is not None and self._chooser is not None
        with self._lock:
            if self._lane.epoch != epoch:
                return None
            prefix = list(self._lane.tree.committed)
        logits = self._head(self._root[None])[0]
        self.head_rows += 1
        token = self._chooser(logits, prefix)
        with self._lock:
            if self._lane.epoch != epoch:
                return None
            commit = self._lane.commit_own(token)
        for node in commit.dead:
            self._waiting.pop(node.id, None)
        self._root = None if commit.hit is None else self._waiting.pop(commit.hit.id, None)
        return commit
