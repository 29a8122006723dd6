"""Where a stage's results go: the next stage or the client, and from a verifier to all other stages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from bloombee_spec.lane import Lane, LaneBatch, Row
from bloombee_spec.verify import Committed
from bloombee_spec.wire.frames import CommitFrame, Frame, NodesFrame, PrefixFrame, RoundFrame, encode
from bloombee_spec.wire.link_codec import LinkCodec
from bloombee_spec.wire.messages import Open
from bloombee_spec.wire.streams import Outbox, StreamClosed


class Outgoing:
    """
    :param client_box: takes the results where there is no next stage
    :param opened: the session; `lanes` its books, under `lock`; `codec` of the link behind the stage
    :param lost: told the stage that cannot be reached, and the reason
    """

    def __init__(
        self, opened: Open, lanes: Sequence[Lane], lock: threading.Lock, codec: LinkCodec, client_box: Outbox,
        loop: asyncio.AbstractEventLoop, lost: Callable[[int, str], None],
    ):  # fmt: skip
        self.links: list[Outbox] = []  # this stage's own outgoing streams
        self.next_holds = [0] * opened.lanes  # tokens whose KV the next stage has, from before this session
        self._opened, self._lanes, self._lock, self._codec = opened, lanes, lock, codec
        self._out_box, self._stage, self._loop, self._lost = client_box, opened.stage, loop, lost
        self._listener_boxes: list[Outbox] = []
        self._unsent: list[tuple[list[bytes], list[bytes]]] | None = []  # results from before the link

    def post(self, frames: Sequence[Frame], to_listeners: Sequence[CommitFrame]) -> None:
        """From any thread."""
        encoded: list[bytes] = [encode(frame) for frame in frames]
        broadcast: list[bytes] = [encode(frame) for frame in to_listeners]
        self._loop.call_soon_threadsafe(self._send, encoded, broadcast)

    # ---------------------------------------------------------------- results (runtime thread)

    def emit(self, index: int, batch: LaneBatch, rows: list[Row], hidden: torch.Tensor) -> None:
        """Send what a forward left: to the next stage, or as hidden rows to a verifying client.

        :param rows: survivors in batch order; `hidden` `[len(rows), hidden]`
        """
        lane = self._lanes[index]
        if batch.prefix is not None and batch.prefix.epoch == 0:
            n = sum(row.position < batch.prefix.start + batch.prefix_rows for row in rows)
            self._pass_refill(index, batch.prefix.tokens, rows[:n], hidden)
            if batch.seq == 0:
                return
            rows, hidden, batch.prefix = rows[n:], hidden[n:], None
        prefix = batch.prefix if rows and batch.prefix is not None and rows[0].position == batch.prefix.start else None
        n_prefix = batch.prefix_rows if prefix is not None else 0
        to_client = self._opened.next is None
        frames: list[Frame] = []
        with self._lock:
            nodes = tuple([lane.forwarded_spec(row) for row in rows[n_prefix:]])
            seq = lane.answered
            counters = lane.take_counters() if nodes or prefix is None or batch.seq > prefix.seq else None
        if prefix is not None:
            first = (n_prefix - 1 if prefix.last else n_prefix) if to_client else 0
            data = self._codec.encode(hidden[first:n_prefix])
            frames.append(
                PrefixFrame(
                    index, prefix.epoch, prefix.seq, prefix.start, prefix.tokens, prefix.last, prefix.limit,
                    n_prefix - first, data,
                )
            )  # fmt: skip
        if counters is not None:
            data = self._codec.encode(hidden[n_prefix:]) if nodes else b""
            frames.append(NodesFrame(index, batch.epoch, seq, nodes, *counters, len(nodes), data))
        self.post(frames, [])

    def _pass_refill(self, index: int, tokens: Sequence[int], rows: list[Row], hidden: torch.Tensor) -> None:
        """Rows of an earlier text, as far as the next stage needs them; nobody waits for an answer."""
        if not rows or self._opened.next is None:
            return
        n, first = len(rows), max(0, self.next_holds[index] - rows[0].position)
        if first < n:
            self.post([self.refill_frame(index, rows[first].position, tokens[first:n], hidden[first:n])], [])

    def refill_frame(self, index: int, start: int, tokens: Sequence[int], rows: torch.Tensor) -> PrefixFrame:
        """For the next stage: committed tokens of an earlier session with the rows `[n, hidden]` that left here."""
        data = self._codec.encode(rows)
        return PrefixFrame(index, 0, 0, start, tuple(tokens), False, self._opened.max_length, len(tokens), data)

    def emit_commits(self, index: int, done: Committed) -> None:
        """Verifier: tokens to the client with counters, and to every other stage without."""
        lane = self._lanes[index]
        with self._lock:
            seq = lane.answered
            if done.epoch == 0 and seq == 0:  # rows of an earlier text: nobody waits for an answer
                return
            computed, dropped = lane.take_counters()
        commit = CommitFrame(index, done.epoch, done.position, done.tokens)
        to_client = replace(commit, seq=seq, computed=computed, dropped=dropped)
        to_stages = [commit] if done.tokens else []
        self.post([to_client], to_stages)

    def emit_answer(self, answer: RoundFrame | None) -> None:
        """Judge: what the session's rule says to a round, to the client."""
        if answer is not None:
            self.post([answer], [])

    # ---------------------------------------------------------------- streams

    def link(self, next_box: Outbox | None, listeners: list[Outbox]) -> None:
        """The outgoing streams are open: send what waited for them. Event loop only."""
        self._out_box = next_box or self._out_box
        self._listener_boxes = listeners
        self.links = [*([next_box] if next_box else []), *listeners]
        unsent, self._unsent = self._unsent or [], None
        for encoded, broadcast in unsent:
            self._send(encoded, broadcast)

    def _send(self, encoded: list[bytes], broadcast: list[bytes]) -> None:
        if self._unsent is not None:
            self._unsent.append((encoded, broadcast))
            return
        for data in broadcast:  # first of all: the commit overtakes the frames that it makes useless
            for stage, box in enumerate(self._listener_boxes):
                self._pass_on(data, box, stage)
        for data in encoded:
            self._pass_on(data, self._out_box, self._stage + 1)

    def _pass_on(self, data: bytes, box: Outbox, stage: int) -> None:
        try:
            box.put_bytes(data)
        except StreamClosed as e:
            self._lost(stage, f"stage {self._stage} cannot pass on its results to stage {stage}: {e}")
