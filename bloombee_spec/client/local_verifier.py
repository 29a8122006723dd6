"""Verification at the client, for routes whose last stage has no LM head, or rules that only the client can
evaluate."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from bloombee_spec.choose import Chooser
from bloombee_spec.lane import Lane
from bloombee_spec.verify import Head, Verifier
from bloombee_spec.wire.frames import CommitFrame, NodesFrame, PrefixFrame, RewindFrame
from bloombee_spec.wire.link_codec import LinkCodec


class LocalVerifier:
    """The last stage's bookkeeping without blocks: hidden rows come in, commits go out.

    :param head: the client's own final norm and LM head
    """

    def __init__(
        self,
        lanes: int,
        *,
        arena: int,
        max_length: int,
        head: Head,
        codec: LinkCodec,
        hidden: int,
        dtype: torch.dtype,
    ):
        lock = threading.Lock()  # single-threaded here; the verifier asks for one
        self._lanes = [Lane(arena=arena, max_length=max_length, inject=False) for _ in range(lanes)]
        self._verifiers = [Verifier(lane, lock, head) for lane in self._lanes]
        self._codec, self._hidden, self._dtype = codec, hidden, dtype

    def set_rule(self, lane: int, epoch: int, stop_tokens: tuple[int, ...], chooser: Chooser) -> None:
        self._lanes[lane].set_rule(epoch, stop_tokens)
        self._verifiers[lane].set_chooser(chooser)

    def fill(self, lane: int, tokens: Sequence[int]) -> None:
        """The text so far, from an earlier ring."""
        self._lanes[lane].fill(0, tokens)

    def rewind(self, lane: int, epoch: int, position: int) -> None:
        self._lanes[lane].accept_rewind(RewindFrame(lane, epoch, position))

    def accept(self, frame: PrefixFrame | NodesFrame) -> CommitFrame:
        """:returns: the commits that these rows allow (possibly none), with counters
        :raises FrameError, CodecError: the last stage sent nonsense
        """
        lane = self._lanes[frame.lane]
        hidden = self._codec.decode(frame.rows, frame.n_rows, self._hidden, self._dtype)
        if isinstance(frame, PrefixFrame):
            missing = len(frame.tokens) - frame.n_rows  # only the row behind the last token is needed
            lane.accept_prefix(frame, torch.cat([hidden.new_zeros(missing, self._hidden), hidden]))
        else:
            lane.accept_nodes(frame, hidden)
        lane.take_moves()
        batch = lane.take(len(lane.tree) + frame.n_rows + 1)
        rows = lane.finish(batch, 0, batch.rows)
        done = self._verifiers[frame.lane].step(rows, [row.hidden for row in rows if row.hidden is not None])
        computed, dropped = lane.take_counters()
        return CommitFrame(frame.lane, done.epoch, done.position, done.tokens, frame.seq, computed, dropped)
