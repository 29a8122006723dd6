"""A session of the drop-in class: several `generate` calls over one ring or relay, and the host's own where needed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from hivemind.utils.logging import get_logger

from bloombee_spec.client.arguments import UnsupportedCall
from bloombee_spec.client.collect import collect
from bloombee_spec.client.decoder import RingDecoder
from bloombee_spec.client.kept import Kept, Ready
from bloombee_spec.client.relay import RelayDecoder
from bloombee_spec.client.ring import Ring
from bloombee_spec.client.round_decoder import RoundDecoder
from bloombee_spec.client.routing import NoPluginRoute, open_ring, watch_leaving
from bloombee_spec.client.stage_link import RingError, RingMoved
from bloombee_spec.client.stats import SpecStats, Tally
from bloombee_spec.client.stream import StreamRequest
from bloombee_spec.config import SpecConfig
from bloombee_spec.draft.base import Drafter
from bloombee_spec.hosts.base import Host, NoRoute

logger = get_logger(__name__)

BROKEN_TIMEOUT = 0.5  # seconds to say goodbye to the stages of a broken ring


class SpecSession:
    """What `model.inference_session(max_length=…)` gives; a context manager that stands in for the host's own.

    :param max_length: most tokens per row, prompts included
    """

    def __init__(self, host: Host, model: Any, config: SpecConfig, max_length: int):
        self._drafters: Callable[[], Drafter | None] | None = None  # what the present decoder drafts with
        self._bytes_before = (0, 0)  # of rings that are gone
        self._host, self._model, self._config = host, model, config
        self._max_length = max_length
        self.output_ids: torch.Tensor | None = None  # [batch, length]: the host appends its next input to these
        self.padding: tuple[torch.Tensor, torch.Tensor] | None = None  # ids and mask of the last call's input
        self.past_key_values = None
        self.traffic: tuple[int, ...] = ()  # of the client's streams for the whole session, once closed
        self._decoder: RingDecoder | RoundDecoder | RelayDecoder | None = None
        self._host_session: Any = None
        self._position = 0
        self._pending: list[StreamRequest] = []
        self._lost: list[Tally] = []  # by lane, counted on rings that broke during the present call
        self._kept: Kept | None = None  # at the servers of a ring that is gone
        self._inexact = 0  # tokens of the text whose KV moved at a lossy level
        self._closed = False
        self.last_stats: SpecStats | None = None  # of the last call
        self._open_s = 0.0

    # ---------------------------------------------------------------- ring

    def decode(
        self, requests: Sequence[StreamRequest], new_drafter: Callable[[], Drafter | None] | None = None
    ) -> Iterator[tuple[int, list[int]]]:
        """`(lane, new tokens)` until all streams end. A broken ring is rebuilt at the last committed token.

        :param new_drafter: instead of the model's own, for this call
        :raises RingError: it broke more often than the configuration allows; the tokens so far stay in the session
        """
        self._check_open()
        longest = max(request.limit for request in requests)
        if longest > self._max_length:
            raise ValueError(
                f"maximum length exceeded: {longest} tokens, the session was opened for {self._max_length}"
            )
        try:
            yield from self._decode(requests, new_drafter or self._model._new_drafter)
        finally:
            for request in requests:
                if request.chooser is not None and hasattr(request.chooser, "close"):
                    request.chooser.close()

    def _decode(
        self, requests: Sequence[StreamRequest], new_drafter: Callable[[], Drafter | None]
    ) -> Iterator[tuple[int, list[int]]]:
        retries = 0
        self._lost = []
        self._pending = pending = list(requests)
        while True:
            decoder = None
            try:
                decoder = self._decoder_for(requests, new_drafter, last=retries >= self._config.max_retries)
                for lane, tokens in decoder.decode(pending):
                    pending[lane] = _continued(pending[lane], tokens)
                    self._position = max(len(request.tokens) for request in pending) - 1
                    yield lane, tokens
                for span in self._ring.spans if self._ring is not None else ():
                    self._host.on_success(self._model, span.peer)
                return
            except RingMoved as e:
                self._lost = self.tallies or [Tally()]
                self._lost[0].moves += 1
                self._leave_ring(e.peer, e.ready)
                logger.info(f"{e}: the ring goes on over another server")
            except RingError as e:
                self._host.on_failure(self._model, e.peer)
                retries += 1
                self._lost = self.tallies or [Tally()]
                self._lost[0].retries = retries
                mover = None if self._ring is None else self._ring.mover
                self._leave_ring(e.peer, Ready() if mover is None else mover.replacement(e.peer))
                if retries > self._config.max_retries or not e.retriable:
                    raise
                # At once where a server is to blame, who is avoided from now on; else ever later, not all at a time.
                again = retries > 1 or e.peer is None
                delay = random.uniform(0.5, 1.0) * min(0.2 * 2**retries, 5.0) if again else 0.0
                logger.warning(f"Ring broke ({e}); retry {retries} from the last committed token in {delay:.1f} s")
                time.sleep(delay)

    def stop(self, lane: int, length: int) -> None:
        """The caller wants no more of this stream: keep `length` tokens."""
        request = self._pending[lane]
        self._pending[lane] = replace(request, tokens=request.tokens[:length], limit=length)
        if self._decoder is not None:
            self._decoder.stop(lane, length)

    def _decoder_for(
        self, requests: Sequence[StreamRequest], drafters: Callable[[], Drafter | None], last: bool
    ) -> RingDecoder | RoundDecoder | RelayDecoder:
        """The present one, or another where the call needs to verify at the client, or drafts with something else."""
        lanes = len(requests)
        if self._decoder is not None and len(self._decoder.streams) != lanes:
            raise ValueError(f"this session has {len(self._decoder.streams)} rows, the call has {lanes}")
        at_client = any(request.chooser is not None for request in requests)
        if (at_client and self._ring is not None and self._ring.verifies) or drafters is not self._drafters:
            self._drop_ring()
        if self._decoder is None:
            started = time.perf_counter()
            config = replace(self._config, client_verifies=True) if at_client else self._config
            self._decoder, self._drafters = self._new_decoder(lanes, config, drafters, last), drafters
            self._kept = None
            if self._lost and self._ring is not None:
                self._lost[0].resumed += sum(plan.start for plan in self._ring.plans)
            self._open_s = time.perf_counter() - started
        return self._decoder

    def _new_decoder(
        self, lanes: int, config: SpecConfig, drafters: Callable[[], Drafter | None], last: bool
    ) -> RingDecoder | RoundDecoder | RelayDecoder:
        """
        :param last: whether there will be no other attempt
        :raises RingError: a ring that broke has no other servers for the moment
        :raises NoPluginRoute: the swarm has no ring, and the configuration insists on one
        """
        sizes: dict[str, Any] = {"lanes": lanes, "max_length": self._max_length}
        reason = "the configuration asks for it"
        if self._config.mode != "relay":
            try:
                texts = [request.tokens for request in self._pending]
                ring = open_ring(self._host, self._model, config, **sizes, kept=self._kept, texts=texts)
                if config.rule != "keyed":
                    return RoundDecoder(self._host, self._model, ring, config, lanes=lanes, new_drafter=drafters)
                decoder = RingDecoder(
                    self._host, self._model, ring, config, **sizes, new_drafter=drafters, texts=texts
                )
                watch_leaving(self._host, self._model, config, ring, decoder.texts, self._max_length)
                return decoder
            except (NoPluginRoute, NoRoute) as e:  # the latter: servers have left since they were asked
                passing = e.passing if isinstance(e, NoPluginRoute) else self._host.has_bans(self._model)
                if not last and (self._lost or passing):  # bans end, servers come back
                    raise RingError(str(e)) from None
                if self._config.rule != "keyed":
                    raise UnsupportedCall(f"the rule {self._config.rule} works with the plugin only: {e}") from None
                if self._config.mode == "ring":
                    raise
                reason = str(e)
        if "relay" not in self._model._spec_said:
            self._model._spec_said.add("relay")
            how = "Speculating" if self._host.can_rewind else f"No speculation ({self._host.name} cannot step back)"
            logger.info(f"{how} in relay mode, through the host's own sessions: {reason}")
        return RelayDecoder(self._host, self._model, config, **sizes, new_drafter=drafters)

    def _leave_ring(self, peer: str | None, ready: Ready) -> None:
        """For another one without `peer`."""
        self._drop_ring()
        if self._kept is not None:
            self._kept.drop(peer)
            self._kept.sources |= ready.sources
            self._inexact += ready.inexact

    def _drop_ring(self) -> None:
        """Another one is going to continue the text."""
        self._bytes_before = self.ring_bytes
        if isinstance(self._decoder, RingDecoder):
            self._kept = self._decoder.kept() if self._config.resume else None
            self._decoder.abandon()
        elif self._decoder is not None:
            self._decoder.close(BROKEN_TIMEOUT)
        self._decoder = None

    # ---------------------------------------------------------------- the host's interface

    @property
    def position(self) -> int:
        """Tokens whose KV is at the servers."""
        return self._position

    @position.setter
    def position(self, value: int) -> None:
        self._position = value
        if self._host_session is not None and self._host_session.position > value:
            self._host_session.position = value

    def step(self, inputs: torch.Tensor, prompts: Any = None, hypo_ids: Any = None) -> torch.Tensor:
        """The host's own step `[batch, n, hidden]`, for calls that the plugin does not serve.

        KV that only the ring holds is computed again on the host's side first.
        """
        self._check_open()
        if self._host_session is None:
            self._host_session = self._host.new_session(self._model, self._max_length)
        behind = self._position - self._host_session.position
        if behind > 0:
            assert self.output_ids is not None
            ids = self.output_ids[:, self._host_session.position : self._position]
            rows = torch.stack([self._host.embed(self._model, row) for row in ids.tolist()])
            self._host_session.step(rows.to(inputs.dtype))
        outputs: torch.Tensor = self._host_session.step(inputs, prompts, hypo_ids=hypo_ids)
        self._position += inputs.shape[1]
        return outputs

    # ---------------------------------------------------------------- life

    def statistics(self, bytes_before: tuple[int, int], started: float) -> SpecStats:
        """Of the present call.

        :param bytes_before: `ring_bytes` when it started; `started` the time, as `time.perf_counter` has it
        """
        up, down = (now - before for now, before in zip(self.ring_bytes, bytes_before))
        return collect(
            self._decoder, self.tallies, mode=self.mode, open_s=self._open_s, started=started, bytes_up=up,
            bytes_down=down, inexact=self._inexact,
        )  # fmt: skip

    @property
    def mode(self) -> str:
        """`ring` or `relay`."""
        return "relay" if isinstance(self._decoder, RelayDecoder) else "ring"

    @property
    def ring_bytes(self) -> tuple[int, int]:
        """Bytes up and down; those of the host's own sessions are not known and count as 0."""
        up, down = self._bytes_before
        if self._ring is not None:
            ledger = self._ring.ledger
            up, down = up + ledger.total(outgoing=True), down + ledger.total(outgoing=False)
        return up, down

    @property
    def _ring(self) -> Ring | None:
        return self._decoder.ring if isinstance(self._decoder, (RingDecoder, RoundDecoder)) else None

    @property
    def tallies(self) -> list[Tally]:
        """Of the present call, by lane, with what was counted on rings that broke."""
        now = [] if self._decoder is None else [stream.tally for stream in self._decoder.streams]
        return [before.plus(after) for before, after in zip_longest(self._lost, now, fillvalue=Tally())]

    def close(self) -> tuple[Any, ...]:
        """End the session at all servers; never raises. Returns what the stages counted."""
        self._closed = True
        statistics: tuple[Any, ...] = ()
        if self._decoder is not None:
            ledger = None if self._ring is None else self._ring.ledger
            statistics = tuple(self._decoder.close())
            self.traffic = () if ledger is None else ledger.to_wire()
            self._decoder = None
        if self._host_session is not None:
            session, self._host_session = self._host_session, None
            self._host.close_session(session)
        return statistics

    def __enter__(self) -> SpecSession:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this session is closed")


def _continued(request: StreamRequest, tokens: list[int]) -> StreamRequest:
    """What is left to do; nothing after a stop token, so that a rebuilt ring does not go on behind it."""
    known = (*request.tokens, *tokens)
    return replace(request, tokens=known, limit=len(known) if tokens[-1] in request.stop_tokens else request.limit)
