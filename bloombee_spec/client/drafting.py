"""Drafting beside the network: a thread that keeps all streams supplied, and drafts ahead for other outcomes when they
are.

It never holds a stream's lock while the drafter thinks, and the drafter is asked to stop as soon as what it works on
became void.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from hivemind.utils.logging import get_logger

from bloombee_spec.client.stream import Stream
from bloombee_spec.client.think import think
from bloombee_spec.config import SpecConfig
from bloombee_spec.draft.cache import fan_out, whole
from bloombee_spec.tree import Node, NodeSpec

logger = get_logger(__name__)

REUSE = 0.6  # exponent of Saguaro's law: how slowly more guesses of the missed token miss less


class Drafting:
    """
    :param send: passes new candidates of a stream on; called with the stream's lock held
    """

    def __init__(self, streams: Sequence[Stream], config: SpecConfig, send: Callable[[Stream, list[NodeSpec]], None]):
        self._streams, self._config, self._send = streams, config, send
        self._wake = threading.Condition()
        self._news = 0
        self._closed = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="spec-draft", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Something was committed, or a stream began."""
        with self._wake:
            self._news += 1
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(5)

    def _run(self) -> None:
        try:
            while not self._closed:
                with self._wake:
                    seen = self._news
                busy = [stream for stream in self._streams if self._supply(stream)]
                if not busy:
                    busy = [stream for stream in self._streams if self._hedge(stream)]
                with self._wake:
                    while not busy and self._news == seen and not self._closed:
                        pauses = [stream.pause() for stream in self._streams]
                        pause = min((pause for pause in pauses if pause > 0), default=None)
                        if not self._wake.wait(pause):
                            break
        except BaseException as e:
            self.failure = e
            logger.warning("Drafting failed; decoding goes on without candidates", exc_info=True)

    def _supply(self, stream: Stream) -> bool:
        """One question to the drafter, its answer on the way; false when the stream needs nothing."""
        with stream.lock:
            if stream.pause() > 0:
                return False
            ask, drafter = stream.ask(), stream.drafter
            if ask is None or drafter is None:
                return False
            lessons = stream.lessons()
        started = time.perf_counter()
        proposals = think(drafter, lessons, ask, interrupted=self._void(stream, ask.epoch))
        with stream.lock:
            stream.drafted(time.perf_counter() - started, proposals)
            specs = stream.answer(ask, proposals)
            if specs:
                self._send(stream, specs)
        return True

    def _void(self, stream: Stream, epoch: int) -> Callable[[], bool]:
        return lambda: self._closed or stream.candidates.epoch != epoch

    # ---------------------------------------------------------------- hedges

    def _hedge(self, stream: Stream) -> bool:
        """Draft for one outcome that is not expected: after a candidate of the likely path, another token is
        committed.

        :returns: whether there was one left to prepare
        """
        drafter = stream.drafter
        if drafter is None:
            return False
        with stream.lock:
            budget = stream.hedge_budget
            if stream.finished or len(stream.hedges) >= budget:
                return False
            epoch, lessons = stream.candidates.epoch, stream.lessons()
            path, length = _likely_path(stream), stream.tree.length
            tally = stream.tally
            hit = (tally.hits + 1) / (tally.hits + tally.misses + 2)
        for lesson in lessons:
            lesson(drafter)
        void = self._void(stream, epoch)
        shares = whole(fan_out(min(hit, 0.98), len(path), budget, REUSE))
        for depth, share in enumerate(shares):
            if not share or void():
                continue
            above = tuple(node.token for node in path[:depth])
            siblings = stream.tree.roots if depth == 0 else path[depth - 1].children
            sent = {node.token for node in list(siblings)}
            guesses = drafter.propose(above, share + len(sent), max_depth=1, interrupted=void)
            for token in [guess.token for guess in guesses if guess.parent < 0 and guess.token not in sent][:share]:
                if (*above, token) in stream.hedges or void():
                    continue
                return self._prepare(stream, epoch, length, above, token)
        return False

    def _prepare(self, stream: Stream, epoch: int, length: int, above: tuple[int, ...], token: int) -> bool:
        assert stream.drafter is not None
        started = time.perf_counter()
        proposals = stream.drafter.propose(
            (*above, token),
            self._config.burst,
            max_depth=self._config.max_depth,
            interrupted=self._void(stream, epoch),
        )
        with stream.lock:
            stream.tally.hedge_s += time.perf_counter() - started
            if stream.candidates.epoch != epoch or not proposals:
                return False
            passed = stream.tree.committed[length:]
            if tuple(passed) != above[: len(passed)]:
                return True  # the committed path left this outcome behind
            stream.hedges.put(above[len(passed) :], token, proposals)
        return True


def _likely_path(stream: Stream) -> list[Node]:
    """First children from the root down: what the drafter expects to be committed."""
    path: list[Node] = []
    siblings = stream.tree.roots
    while siblings:
        path.append(siblings[0])
        siblings = siblings[0].children
    return path
