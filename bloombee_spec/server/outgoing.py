"""Where a stage's results go: the next stage or the client, and from a verifier to all other stages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from bloombee_spec.wire.frames import CommitFrame, Frame, encode
from bloombee_spec.wire.streams import Outbox, StreamClosed


class Outgoing:
    """
    :param client_box: takes the results where there is no next stage
    :param stage: whose results they are
    :param lost: told the stage that cannot be reached, and the reason
    """

    def __init__(
        self, client_box: Outbox, stage: int, loop: asyncio.AbstractEventLoop, lost: Callable[[int, str], None]
    ):
        self.links: list[Outbox] = []  # this stage's own outgoing streams
        self._out_box, self._stage, self._loop, self._lost = client_box, stage, loop, lost
        self._listener_boxes: list[Outbox] = []
        self._unsent: list[tuple[list[bytes], list[bytes]]] | None = []  # results from before the link

    def post(self, frames: Sequence[Frame], to_listeners: Sequence[CommitFrame]) -> None:
        """From any thread."""
        encoded: list[bytes] = [encode(frame) for frame in frames]
        broadcast: list[bytes] = [encode(frame) for frame in to_listeners]
        self._loop.call_soon_threadsafe(self._send, encoded, broadcast)

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
