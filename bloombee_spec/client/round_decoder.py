"""The decode loop of rules that compare distributions: one round per lap and stream, committed by the client."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from bloombee_spec.client.listener import Listener
from bloombee_spec.client.ring import CLOSE_TIMEOUT, Ring
from bloombee_spec.client.round_stream import RoundStream
from bloombee_spec.client.stage_link import RingError
from bloombee_spec.client.stream import StreamRequest
from bloombee_spec.client.uplink import Uplink
from bloombee_spec.config import SpecConfig
from bloombee_spec.draft.base import Drafter
from bloombee_spec.hosts.base import Host
from bloombee_spec.sampling.round_rules import ROUND_RULES
from bloombee_spec.wire.frames import FrameError, RoundFrame, encode
from bloombee_spec.wire.steering import Rule, Statistics


class RoundDecoder:
    """Same interface as `RingDecoder`, over a ring whose last stage judges rounds by `config.rule`.

    In the tally, `candidate_bytes_up` are all frames of a round that the client sends, commits included, and
    `commit_bytes_down` the answers.
    """

    def __init__(
        self, host: Host, model: Any, ring: Ring, config: SpecConfig, *, lanes: int,
        new_drafter: Callable[[], Drafter | None],
    ):  # fmt: skip
        self.ring = ring
        self.streams = [
            RoundStream(
                lane, new_drafter(), ROUND_RULES[config.rule], budget=min(config.burst, ring.arena),
                max_depth=config.max_depth, inject=ring.embeds, vocab_size=model.config.vocab_size,
            )
            for lane in range(lanes)
        ]  # fmt: skip
        self._uplink = Uplink(host, model, ring)
        self._seq = itertools.count(1)
        self._listener = Listener(ring, config.stall_timeout)
        self.first_token_at: float | None = None

    def decode(self, requests: Sequence[StreamRequest]) -> Iterator[tuple[int, list[int]]]:
        """Yields `(lane, new tokens)` until every stream reached its limit or a stop token, or was stopped.

        :raises RingError: the ring broke or fell silent
        """
        if any(request.chooser is not None for request in requests):
            raise ValueError("options that only the client can evaluate need the keyed rule")
        self.first_token_at = None
        self._listener.begin()
        for stream, request in zip(self.streams, requests):
            self._begin(stream, request)
        while not all(stream.finished for stream in self.streams):
            frame = self._listener.next(decoding=self.first_token_at is not None)
            last = self.ring.spans[-1].peer
            if frame is None:
                continue
            if not isinstance(frame, RoundFrame) or frame.lane >= len(self.streams):
                raise RingError(f"unexpected {type(frame).__name__} from the last stage", last)
            stream = self.streams[frame.lane]
            try:
                commit = stream.settle(frame)
            except FrameError as e:
                raise RingError(f"the last stage sent an answer that cannot be used: {e}", last) from None
            if commit is None:
                continue
            self.ring.commit(commit)
            stream.tally.candidate_bytes_up += len(encode(commit)) * len(self.ring.spans)
            stream.tally.commit_bytes_down += len(encode(frame))
            self._draft(stream)
            self.first_token_at = self.first_token_at or time.perf_counter()
            yield frame.lane, list(commit.tokens)

    def stop(self, lane: int, length: int) -> None:
        """The caller wants no more of this stream: keep `length` tokens."""
        stream = self.streams[lane]
        stream.stop(length)
        self.ring.rewind(lane, stream.epoch, stream.held)

    def close(self, timeout: float = CLOSE_TIMEOUT) -> list[Statistics | None]:
        """End the ring's session within `timeout` seconds; never raises. Returns what the stages counted."""
        self._uplink.end(stream.drafter for stream in self.streams)
        return self.ring.close(timeout)

    def _begin(self, stream: RoundStream, request: StreamRequest) -> None:
        frames = stream.begin(request, self.ring.max_prefill)
        if stream.finished:
            return
        rule = Rule(stream.lane, stream.epoch, request.stop_tokens, dict(request.sampling or {}), request.row)
        self.ring.send_rule(rule)
        for frame in frames:
            self._uplink.send(replace(frame, seq=next(self._seq)))
        self._draft(stream)

    def _draft(self, stream: RoundStream) -> None:
        if stream.finished:
            return
        nodes, announced = stream.draft()
        stream.tally.candidate_bytes_up += self.ring.send(announced, len(self.ring.spans) - 1)
        if nodes is not None:
            stream.tally.candidate_bytes_up += self._uplink.send(replace(nodes, seq=next(self._seq)))
