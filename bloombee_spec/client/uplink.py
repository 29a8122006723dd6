"""The client's way into a ring, and what every decode loop does when it leaves one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from bloombee_spec.client.peers import remember
from bloombee_spec.client.ring import Ring
from bloombee_spec.draft.base import Drafter
from bloombee_spec.hosts.base import Host
from bloombee_spec.wire.frames import NodesFrame, PrefixFrame
from bloombee_spec.wire.link_codec import LinkCodec


class Uplink:
    def __init__(self, host: Host, model: Any, ring: Ring):
        self._host, self._model, self._ring = host, model, ring
        self._codec, self._dtype = LinkCodec(ring.codecs.names[0]), getattr(torch, ring.infos[0].dtype)

    def send(self, frame: PrefixFrame | NodesFrame) -> int:
        """To the first stage, with rows if it does not embed tokens itself; returns the frame's bytes."""
        if not self._ring.embeds:
            tokens = frame.tokens if isinstance(frame, PrefixFrame) else [node.token for node in frame.nodes]
            rows = self._codec.encode(self._host.embed(self._model, tokens).to(self._dtype))
            frame = replace(frame, n_rows=len(tokens), rows=rows)
        return self._ring.send(frame)

    def end(self, drafters: Iterable[Drafter | None]) -> None:
        """The drafters are done, and what was measured is kept for the next session."""
        for drafter in drafters:
            if drafter is not None:
                drafter.close()
        if self._ring.meter is not None:
            remember(self._ring.meter)
