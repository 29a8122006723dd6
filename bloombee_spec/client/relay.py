"""Speculation on plain servers, through the host's own sessions: chains, verified here, rolled back by position."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hivemind.utils.logging import get_logger

from bloombee_spec.choose import Chooser, make_chooser
from bloombee_spec.client.chain import Chain, ChainLength, draft_chain
from bloombee_spec.client.connection import STEP_ROWS, Connection, Lap
from bloombee_spec.client.stats import Tally
from bloombee_spec.client.stream import StreamRequest
from bloombee_spec.config import SpecConfig
from bloombee_spec.draft.base import Drafter
from bloombee_spec.hosts.base import Host, Span

logger = get_logger(__name__)

RELAY_MIN_PROBABILITY = 0.05  # of a candidate's path, where the configuration leaves it open


class RelayError(RuntimeError):
    """The host's sessions broke more often than the configuration allows."""


@dataclass(eq=False)
class RelayStream:
    """One row: what is committed, who drafts, and the host session that holds its KV."""

    lane: int
    drafter: Drafter | None
    length: ChainLength
    committed: list[int] = field(default_factory=list)
    held: int = 0  # leading committed tokens whose KV the servers have
    request: StreamRequest = field(default_factory=lambda: StreamRequest((), 0))
    chooser: Chooser | None = None
    finished: bool = True
    tally: Tally = field(default_factory=Tally)
    failures: int = 0
    connection: Connection | None = None
    lap: Lap | None = None  # in flight
    route: list[Span] = field(default_factory=list)

    def begin(self, request: StreamRequest, vocab_size: int) -> None:
        """Start from `request.tokens`; the KV of what they share with the tokens so far stays in use."""
        pairs = enumerate(zip(self.committed, request.tokens))
        self.held = min(self.held, len(request.tokens), next((i for i, (a, b) in pairs if a != b), self.held))
        self.committed, self.request = list(request.tokens), request
        self.finished = len(request.tokens) >= request.limit
        self.chooser = request.chooser or make_chooser(dict(request.sampling or {}), request.row, vocab_size)
        self.tally, self.failures = Tally(), 0
        if self.drafter is not None:
            self.drafter.start(request.tokens)

    def draft(self, config: SpecConfig, vocab_size: int) -> Chain:
        """What to send behind the last committed token: nothing at the limit or beyond, where nothing is verified."""
        left = self.request.limit - len(self.committed) - 1
        most = min(config.max_candidates, config.max_depth, left, STEP_ROWS - 1)
        if self.drafter is None or most <= 0:
            return Chain()
        started = time.perf_counter()
        room = self.length.room(most)
        chain = Chain()
        if room:
            chain = draft_chain(self.drafter, room, vocab_size)
            self.length.learn_drafting(room, time.perf_counter() - started)
        chain = chain.cut(self.length.cut(chain.chances))
        self.tally.draft_s += time.perf_counter() - started
        return chain

    def commit(self, lap: Lap, logits: torch.Tensor) -> list[int]:
        """Verify in order until the first mismatch, the limit or a stop token.

        :param logits: `[len(chain) + 1, vocab]` at the last committed token and at each candidate
        :returns: new tokens, at least one
        """
        assert self.chooser is not None
        chain, tally = lap.chain, self.tally
        new: list[int] = []
        hits, hit = 0, True
        while hit and not self.finished:
            token = self.chooser(logits[hits], self.committed)
            hit = hits < len(chain) and token == chain.tokens[hits]
            self.committed.append(token)
            new.append(token)
            self.finished = len(self.committed) >= self.request.limit or token in self.request.stop_tokens
            if hit:
                hits += 1
                tally.hits_by_depth[hits] += 1
        self.held = lap.start + len(lap.tokens) - len(chain) + hits
        self.length.learn_verdicts(chain.chances[: hits if hit else hits + 1], hits)
        if lap.start and len(lap.tokens) == len(chain) + 1:  # not a prompt
            self.length.laps.learn(len(lap.tokens), lap.seconds)
        tally.tokens += len(new)
        tally.laps += lap.steps
        tally.hits += hits
        tally.misses += len(new) - hits
        tally.proposed += len(chain)
        tally.sent_by_depth.update(range(1, len(chain) + 1))
        tally.rows_computed += len(lap.tokens) * len(self.route)
        if self.drafter is not None:
            self.drafter.observe(new)
        return new

    def stop(self, length: int) -> None:
        """Keep `length` tokens and end."""
        self.tally.tokens -= max(0, len(self.committed) - length)
        del self.committed[length:]
        self.held = min(self.held, length)
        self.finished = True

    def drop(self) -> threading.Thread | None:
        """Forget the host session, whatever it is doing; the thread that ends it, if there is one."""
        ending = None if self.connection is None else self.connection.close()
        self.connection, self.lap, self.held = None, None, 0
        return ending


class RelayDecoder:
    """Decodes each stream over a host session of its own; streams keep their history between calls of `decode`.

    Each lap carries the last committed token and a chain of candidates. Rows that were not committed are overwritten
    by the next lap, which starts at its own position. Same interface as `RingDecoder`.
    """

    def __init__(
        self, host: Host, model: Any, config: SpecConfig, *, lanes: int, max_length: int,
        new_drafter: Callable[[], Drafter | None],
    ):  # fmt: skip
        self._host, self._model, self._config, self._max_length = host, model, config, max_length
        self._vocab_size: int = model.config.vocab_size
        least = config.min_probability or 0.0
        drafters = [new_drafter() if host.can_rewind else None for _ in range(lanes)]  # each miss is a step back
        self.streams = [RelayStream(lane, drafter, ChainLength(least)) for lane, drafter in enumerate(drafters)]
        self._answers: queue.SimpleQueue[Lap] = queue.SimpleQueue()  # at most one lap per stream, and abandoned ones
        self.first_token_at: float | None = None

    @property
    def route(self) -> list[Span]:
        """Servers that hold a stream now, by block."""
        spans = {span for stream in self.streams for span in stream.route}
        return sorted(spans, key=lambda span: (span.start, span.peer))

    def decode(self, requests: Sequence[StreamRequest]) -> Iterator[tuple[int, list[int]]]:
        """Yields `(lane, new tokens)` until every stream reached its limit or a stop token, or was stopped.

        :raises RelayError: a stream's sessions failed more than `max_retries` times
        """
        self.first_token_at = None
        for stream, request in zip(self.streams, requests):
            if stream.lap is not None:  # the caller broke the last call off
                stream.drop()
            stream.begin(request, self._vocab_size)
            self._send(stream)
        while any(stream.lap is not None for stream in self.streams):
            lap = self._next_answer()
            stream = self.streams[lap.lane]
            if lap.error is not None:
                self._retry(stream, lap.error)
                continue
            if stream.finished:  # stopped while this lap was on its way; the next one overwrites its rows
                stream.lap = None
                continue
            tokens = self._verified(stream, lap)
            self.first_token_at = self.first_token_at or time.perf_counter()
            yield stream.lane, tokens
            self._send(stream)

    def stop(self, lane: int, length: int) -> None:
        """The caller wants no more of this stream: keep `length` tokens."""
        self.streams[lane].stop(length)

    def close(self, timeout: float = 0.0) -> list[Any]:
        """End all sessions; never raises. Plain servers do not tell what they counted."""
        for stream in self.streams:
            if stream.drafter is not None:
                stream.drafter.close()
        for thread in [stream.drop() for stream in self.streams]:
            if thread is not None:
                thread.join()
        return []

    def _send(self, stream: RelayStream, delay: float = 0.0) -> None:
        if stream.finished:
            return
        if stream.connection is None:
            session = self._host.new_session(self._model, self._max_length, timeout=self._config.stall_timeout)
            stream.connection = Connection(self._host, self._model, session)
        chain = stream.draft(self._config, self._vocab_size)
        start = min(stream.held, len(stream.committed) - 1)
        stream.lap = lap = Lap(stream.lane, chain, (*stream.committed[start:], *chain.tokens), start)
        patience = self._config.connect_timeout + lap.steps * self._config.stall_timeout
        lap.deadline = time.monotonic() + delay + patience
        stream.connection.start(lap, delay, self._answers.put)

    def _next_answer(self) -> Lap:
        """The next lap that is over, because its rows are back, or because it failed or took too long."""
        while True:
            first = min((s.lap for s in self.streams if s.lap is not None), key=lambda lap: lap.deadline)
            try:
                lap = self._answers.get(timeout=max(0.0, first.deadline - time.monotonic()))
            except queue.Empty:
                lap = first
                lap.error = TimeoutError("no answer from the host's session in time")
            if self.streams[lap.lane].lap is lap:
                return lap

    def _verified(self, stream: RelayStream, lap: Lap) -> list[int]:
        assert stream.connection is not None
        stream.lap = None
        stream.route = self._host.session_route(stream.connection.session)
        return stream.commit(lap, self._host.logits(self._model, lap.hidden))

    def _retry(self, stream: RelayStream, error: Exception) -> None:
        """A new session, which computes all committed tokens again."""
        stream.drop()
        stream.failures += 1
        stream.tally.retries += 1
        if stream.failures > self._config.max_retries:
            raise RelayError(f"the host's session failed {stream.failures} times, at last with {error!r}") from error
        delay = min(0.1 * 2**stream.failures, 5.0)
        logger.warning(f"Host session broke ({error!r}); retry {stream.failures} from the last token in {delay:.1f} s")
        self._send(stream, delay)
