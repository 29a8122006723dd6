"""The decode loop over a ring: prefixes and candidates out, commits in, tokens to the caller."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from bloombee_spec.choose import make_chooser
from bloombee_spec.client.drafting import Drafting
from bloombee_spec.client.kept import Kept
from bloombee_spec.client.listener import Listener
from bloombee_spec.client.local_verifier import LocalVerifier
from bloombee_spec.client.prefix import prefix_frames
from bloombee_spec.client.ring import CLOSE_TIMEOUT, Ring
from bloombee_spec.client.stage_link import RingError
from bloombee_spec.client.stream import Stream, StreamRequest
from bloombee_spec.client.uplink import Uplink
from bloombee_spec.config import SpecConfig
from bloombee_spec.draft.base import Drafter
from bloombee_spec.hosts.base import Host
from bloombee_spec.tree import NodeSpec
from bloombee_spec.wire.activations import CodecError
from bloombee_spec.wire.frames import (
    CommitFrame,
    ControlFrame,
    Frame,
    FrameError,
    PrefixFrame,
    RewindFrame,
    RoundFrame,
    encode,
)
from bloombee_spec.wire.link_codec import LinkCodec
from bloombee_spec.wire.steering import Rule, Statistics


class RingDecoder:
    """Decodes up to `lanes` streams over one ring; streams keep their history between calls of `decode`."""

    def __init__(
        self, host: Host, model: Any, ring: Ring, config: SpecConfig, *, lanes: int, max_length: int,
        new_drafter: Callable[[], Drafter | None], texts: Sequence[Sequence[int]] = (),
    ):  # fmt: skip
        """:param texts: by lane, what the ring goes on with, if it follows another one"""
        self._host, self._model, self.ring, self._config = host, model, ring, config
        self.streams = [
            Stream(
                lane, new_drafter(), config, credits=ring.arena, inject=ring.embeds,
                vocab_size=model.config.vocab_size, meter=ring.meter,
            )
            for lane in range(lanes)
        ]  # fmt: skip
        info = ring.infos[0]
        self._uplink = Uplink(host, model, ring)
        self._verifier: LocalVerifier | None = None
        if not ring.verifies:
            self._verifier = LocalVerifier(
                lanes, arena=ring.arena, max_length=max_length, head=lambda rows: host.logits(model, rows),
                codec=LinkCodec(ring.codecs.names[-1]), hidden=info.hidden, dtype=getattr(torch, info.dtype),
            )  # fmt: skip
        self._seq = itertools.count(1)
        self.first_token_at: float | None = None
        self._listener = Listener(ring, config.stall_timeout)
        # A drafter that answers at once is asked in the decode loop itself; any other thinks beside it.
        slow = any(stream.drafter is not None and not stream.drafter.instant for stream in self.streams)
        self._drafting = Drafting(self.streams, config, self._send_specs) if slow else None
        self._missing: list[PrefixFrame] = []  # what the first stage lacks of an earlier ring's text
        for stream, plan, text in zip(self.streams, ring.plans, texts):
            stream.resume(text[: plan.start])
            if self._verifier is not None:
                self._verifier.fill(stream.lane, text[: plan.start])
            self._missing += prefix_frames(
                stream.lane, 0, text[: plan.start], plan.first, ring.max_prefill, max_length
            )

    def decode(self, requests: Sequence[StreamRequest]) -> Iterator[tuple[int, list[int]]]:
        """Yields `(lane, new tokens)` until every stream reached its limit or a stop token, or was stopped.

        :raises RingError: the ring broke or fell silent
        """
        self.first_token_at = None
        self._listener.begin()
        while self._missing:
            self._uplink.send(self._missing.pop(0))
        for stream, request in zip(self.streams, requests):
            self._begin(stream, request)
        while not all(stream.finished for stream in self.streams):
            frame = self._next_event()
            if frame is None:
                for stream in self.streams:
                    self._supply(stream)
                continue
            commit = self._verified(frame)
            stream = self.streams[commit.lane]
            if commit.tokens:
                self.ring.commit(commit)  # first of all: it overtakes the frames that it makes useless
            try:
                with stream.lock:
                    tokens, specs = stream.commit(commit)
                    self._send_specs(stream, specs)
            except FrameError as e:
                raise RingError(f"the verifier sent nonsense: {e}", self.ring.spans[-1].peer) from None
            if tokens:
                stream.tally.commit_bytes_down += len(encode(commit))
                self._supply(stream)
                self.first_token_at = self.first_token_at or time.perf_counter()
                self.ring.prefilled = True
                yield commit.lane, tokens

    def stop(self, lane: int, length: int) -> None:
        """The caller wants no more of this stream: keep `length` tokens, and let the stages drop the rest now."""
        stream = self.streams[lane]
        with stream.lock:
            stream.stop(length)
        if self._verifier is not None:
            self._verifier.rewind(lane, stream.epoch, stream.held)
        self.ring.rewind(lane, stream.epoch, stream.held)

    def kept(self) -> Kept:
        """What the stages hold of the streams' texts."""
        return self.ring.kept(self.texts())

    def texts(self) -> list[tuple[int, ...]]:
        """By lane, the committed tokens."""
        return [tuple(stream.tree.committed) for stream in self.streams]

    def close(self, timeout: float = CLOSE_TIMEOUT) -> list[Statistics | None]:
        """End the ring's session within `timeout` seconds; never raises. Returns what the stages counted."""
        self._end()
        return self.ring.close(timeout)

    def abandon(self) -> None:
        """Another ring is going to continue the texts; waits for nobody."""
        self._end()
        self.ring.abandon()

    def _end(self) -> None:
        if self._drafting is not None:
            self._drafting.close()
        self._uplink.end(stream.drafter for stream in self.streams)

    def _begin(self, stream: Stream, request: StreamRequest) -> None:
        with stream.lock:  # until the prefix is on its way, so that no candidate overtakes it
            frames = stream.begin(request, self.ring.max_prefill)
            if stream.finished:
                return
            sampling = dict(request.sampling or {})
            self.ring.send_rule(Rule(stream.lane, stream.epoch, request.stop_tokens, sampling, request.row))
            if self._verifier is not None:
                chooser = request.chooser or make_chooser(sampling, request.row, self._model.config.vocab_size)
                self._verifier.set_rule(stream.lane, stream.epoch, request.stop_tokens, chooser)
            for frame in frames:
                self._uplink.send(replace(frame, seq=next(self._seq)))
        self._supply(stream)

    def _supply(self, stream: Stream) -> None:
        """Keep candidates flowing: now, or by the drafting thread."""
        if self._drafting is not None:
            self._drafting.wake()
            return
        while specs := stream.draft():
            self._send_specs(stream, specs)

    def _send_specs(self, stream: Stream, specs: list[NodeSpec]) -> None:
        """Under the stream's lock, or where no other thread drafts."""
        if specs:
            stream.tally.candidate_bytes_up += self._uplink.send(stream.frame(specs, next(self._seq)))

    def _next_event(self) -> Frame | None:
        """None: a link that was busy is free again, and candidates wait for it."""
        pauses = [] if self._drafting is not None else [stream.pause() for stream in self.streams]
        pause = min((pause for pause in pauses if pause > 0), default=0.0)
        return self._listener.next(decoding=self.first_token_at is not None, pause=pause)

    def _verified(self, frame: Frame) -> CommitFrame:
        """The commit that a frame carries, or that its hidden rows lead to."""
        last = self.ring.spans[-1].peer
        if isinstance(frame, (ControlFrame, RewindFrame, RoundFrame)) or frame.lane >= len(self.streams):
            raise RingError(f"unexpected {type(frame).__name__} from the last stage", last)
        if isinstance(frame, CommitFrame) == (self._verifier is not None):
            raise RingError(f"the last stage sent a {type(frame).__name__}: not what was agreed", last)
        if isinstance(frame, CommitFrame):
            if any(token >= self._model.config.vocab_size for token in frame.tokens):
                raise RingError("the verifier committed a token outside the vocabulary", last)
            return frame
        assert self._verifier is not None
        try:
            commit = self._verifier.accept(frame)
        except (FrameError, CodecError) as e:
            raise RingError(f"the last stage sent rows that cannot be used: {e}", last) from None
        return commit
