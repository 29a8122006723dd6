"""One session across all stages of a route: opens it, sends frames to the stages, hands over what comes back."""

from __future__ import annotations

import asyncio
import queue
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bloombee_spec.client.codecs import LinkCodecs
from bloombee_spec.client.info import StageInfo
from bloombee_spec.client.kept import Kept, LanePlan, plans, resuming
from bloombee_spec.client.measured import RouteMeter
from bloombee_spec.client.stage_link import RingError, StageLink, open_stage
from bloombee_spec.hosts.base import Host, Span
from bloombee_spec.wire.frames import CommitFrame, ControlFrame, Frame, FrameError, RewindFrame, encode
from bloombee_spec.wire.ledger import CLIENT, Ledger
from bloombee_spec.wire.message import Message
from bloombee_spec.wire.messages import SESSION_BYTES, Close, Link, Open
from bloombee_spec.wire.moving import Leaving
from bloombee_spec.wire.steering import Failure, Ping, Report, Rule, Statistics, UseCodec
from bloombee_spec.wire.streams import StreamClosed, read_frame

if TYPE_CHECKING:
    from bloombee_spec.client.moving import Mover

CLOSE_TIMEOUT, ABANDON_TIMEOUT = 5.0, 2.0


class Ring:
    """Use `open`; then `send` and `events` from one thread. Every method is bounded in time.

    :param arena: credits per lane: live candidates that all stages hold
    :param direct_commits: see `open`; false where the client verifies
    """

    def __init__(
        self, host: Host, spans: Sequence[Span], infos: Sequence[StageInfo], *, arena: int, embed: bool, verify: bool,
        direct_commits: bool, codecs: Sequence[str],
    ):  # fmt: skip
        self._host, self.spans, self.infos = host, tuple(spans), tuple(infos)
        self.arena, self.embeds, self.verifies = arena, embed, verify
        self.meter = RouteMeter(spans, infos, embeds=embed, verifies=verify)
        self.max_prefill = min(info.max_prefill for info in infos)
        self.events: queue.Queue[Frame | RingError] = queue.Queue()
        self._stages: list[StageLink] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.direct_commits, self.codecs = direct_commits, LinkCodecs(codecs)
        self.session = secrets.token_bytes(SESSION_BYTES)
        self.plans: list[LanePlan] = []  # by lane, how the stages get at an earlier ring's text
        self.closed = False
        self.prepared: list[StageLink] = []  # to servers that get ready to take a stage over
        self._closing: list[asyncio.Future[None]] = []  # tasks need somebody who remembers them
        self.prefilled = False  # the stages hold the prompt
        self.mover: Mover | None = None  # prepares other servers, where somebody wants that

    @classmethod
    def open(
        cls,
        host: Host,
        model: Any,
        spans: Sequence[Span],
        infos: Sequence[StageInfo],
        *,
        lanes: int,
        max_length: int,
        arena: int,
        embed: bool,
        verify: bool,
        codecs: Sequence[str],
        adapter: str | None,
        timeout: float,
        direct_commits: bool = True,
        rule: str | None = None,
        kept: Kept | None = None,
        texts: Sequence[Sequence[int]] = (),
    ) -> Ring:
        """
        :param spans: the route, covering all blocks in order
        :param codecs: of each link, from the client around to the client, see `wire.link_codec`
        :param embed: let the first stage embed; `verify` let the last stage verify
        :param direct_commits: the last stage tells the other stages itself; otherwise the client has to (`commit`)
        :param kept: what an earlier ring left, to go on with; `texts` by lane, the tokens that this one begins with
        :param rule: let the last stage judge rounds by it instead; the client commits
        :raises RingError: a stage cannot be reached or refuses, or `timeout` seconds passed
        """
        arena = min(arena if kept is None else kept.arena, *(info.max_arena for info in infos))
        direct = verify and direct_commits
        ring = cls(host, spans, infos, arena=arena, embed=embed, verify=verify, direct_commits=direct, codecs=codecs)
        lengths = kept.lengths(texts) if kept is not None else ()
        sources = kept.sources if kept is not None and any(lengths) else {}
        requests = [
            Open(
                session=ring.session, stage=i, stages=len(spans), start=span.start, end=span.end, lanes=lanes,
                max_length=max_length, arena=arena,
                previous=spans[i - 1].peer if i else None,
                next=spans[i + 1].peer if i + 1 < len(spans) else None,
                verifier=spans[-1].peer if direct else None,
                listeners=tuple(s.peer for s in spans[:-1]) if direct and i == len(spans) - 1 else (),
                embed=embed and i == 0, verify=verify and i == len(spans) - 1,
                codec=codecs[i + 1], codec_in=codecs[i], adapter=adapter, rule=rule if i == len(spans) - 1 else None,
            )
            for i, span in enumerate(spans)
        ]  # fmt: skip
        requests = [resuming(request, sources.get(span), lengths) for request, span in zip(requests, spans)]
        try:
            host.run(ring._open(host.p2p(model), requests, timeout, kept, texts), timeout + 5)
        except TimeoutError:
            ring.close(keep=kept is not None)
            raise RingError(f"opening the session took longer than {timeout:.0f} s") from None
        except BaseException:
            ring.close(keep=kept is not None)
            raise
        return ring

    # ---------------------------------------------------------------- frames

    def send(self, frame: Frame, stage: int = 0) -> int:
        """To one stage (the first by default); returns the frame's bytes. Failures arrive as events."""
        return self._send_bytes(encode(frame), [stage])

    def send_rule(self, rule: Rule) -> None:
        """To the first stage, which starts canonical rows, and to the last one, which verifies."""
        self._send_bytes(encode(ControlFrame(rule.to_wire())), sorted({0, len(self.spans) - 1}))

    def broadcast(self, frame: Frame) -> None:
        """A rewind to every stage directly."""
        self._send_bytes(encode(frame), range(len(self.spans)))

    def commit(self, frame: CommitFrame) -> None:
        """Tell the stages what was committed, unless their verifier does."""
        if not self.direct_commits:
            told = range(len(self.spans) - self.verifies)
            self._send_bytes(encode(CommitFrame(frame.lane, frame.epoch, frame.position, frame.tokens)), told)

    def control(self, message: Message, stage: int) -> None:
        """Event loop only."""
        self._put(encode(ControlFrame(message.to_wire())), (stage,))

    def rewind(self, lane: int, epoch: int, position: int) -> None:
        self.broadcast(RewindFrame(lane, epoch, position))

    def _send_bytes(self, data: bytes, stages: Sequence[int]) -> int:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._put, data, tuple(stages))
        return len(data)

    def _put(self, data: bytes, stages: tuple[int, ...]) -> None:
        for index in stages:
            try:
                self._stages[index].box.put_bytes(data)
            except StreamClosed as e:
                self._fail(index, str(e))

    @property
    def ledger(self) -> Ledger:
        """Of the client's streams; goes on counting."""
        ledger = Ledger()
        for index, stage in enumerate(self._stages):
            ledger.keep(CLIENT, index, stage.box.traffic, outgoing=True)
            ledger.keep(CLIENT, index, stage.received, outgoing=False)
        return ledger

    def silent_stages(self, timeout: float) -> list[int]:
        """Ask all stages whether they are there; those that do not say so within `timeout` seconds. A stage answers
        while it computes, so a slow one is not silent."""
        try:
            return list(self._host.run(self._ping(timeout), timeout + 2))
        except TimeoutError:
            return []

    async def _ping(self, timeout: float) -> list[int]:
        for stage in self._stages:
            stage.answered = False
        self._put(encode(ControlFrame(Ping().to_wire())), tuple(range(len(self._stages))))
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and not all(stage.answered for stage in self._stages):
            await asyncio.sleep(0.02)
        return [index for index, stage in enumerate(self._stages) if not stage.answered]

    # ---------------------------------------------------------------- life

    async def _open(
        self, p2p: Any, requests: Sequence[Open], timeout: float, kept: Kept | None, texts: Sequence[Sequence[int]]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        opened = await asyncio.gather(
            *[
                asyncio.wait_for(open_stage(p2p, request, span), timeout)
                for request, span in zip(requests, self.spans)
            ],
            return_exceptions=True,
        )
        self._stages = [stage for stage in opened if isinstance(stage, StageLink)]
        for i, (span, result) in enumerate(zip(self.spans, opened)):
            if kept is not None and isinstance(result, StageLink) and span in kept.sources:
                kept.sources[span] = (self.session, i)  # its old name is gone
        for span, result in zip(self.spans, opened):
            if isinstance(result, RingError):
                raise result
            if isinstance(result, BaseException):
                raise RingError(f"cannot open a session at {span.peer}: {result!r}", span.peer) from result
        if kept is not None:
            self.plans = plans([stage.opened for stage in self._stages], kept.lengths(texts), texts)
        for index, stage in enumerate(self._stages):
            stage.linking_since = time.monotonic()
            link = Link(
                tuple(plan.next_holds[index] for plan in self.plans), tuple(plan.replay[index] for plan in self.plans)
            )
            stage.box.put(ControlFrame(link.to_wire()))
            stage.task = asyncio.ensure_future(self._read(index))

    async def _read(self, index: int) -> None:
        stage = self._stages[index]
        try:
            while True:
                frame = await read_frame(stage.reader, None, stage.received)
                if not isinstance(frame, ControlFrame):
                    self.events.put(frame)
                elif frame.message.get("kind") == "Failure":
                    failure = Failure.from_wire(frame.message)
                    self._fail(index, failure.reason, failure.blame)
                elif frame.message.get("kind") == "Linked":
                    self.meter.answered(index, time.monotonic() - stage.linking_since)
                elif frame.message.get("kind") == "Pong":
                    stage.answered = True
                elif frame.message.get("kind") == "Report":
                    self.meter.reported(index, Report.from_wire(frame.message))
                    self._choose_codec(index)
                elif frame.message.get("kind") == "Leaving":
                    message = Leaving.from_wire(frame.message)
                    if self.mover is not None:
                        self.mover.leaves(index, message.seconds)
                elif frame.message.get("kind") == "Statistics":
                    stage.statistics = Statistics.from_wire(frame.message)
                    return
        except (StreamClosed, FrameError) as e:
            self._fail(index, str(e))

    def _choose_codec(self, index: int) -> None:
        """A stage reported what its codecs cost: the planner's choice for the link behind it."""
        better = self.codecs.better(index + 1, self.meter)
        if better is not None:
            self._put(encode(ControlFrame(UseCodec(better).to_wire())), (index,))

    def _fail(self, index: int, reason: str, blame: int | None = None) -> None:
        if not self.closed:
            span = self.spans[index]
            culprit = span if blame is None or blame >= len(self.spans) else self.spans[blame]
            where = f"stage {index} ({span.start}:{span.end} at {span.peer})"
            self.events.put(RingError(f"{where}: {reason}", culprit.peer))

    def kept(self, texts: Sequence[tuple[int, ...]]) -> Kept:
        """What the stages hold if the ring is closed with `keep`.

        :param texts: by lane, the committed tokens
        """
        return Kept({span: (self.session, i) for i, span in enumerate(self.spans)}, list(texts), self.arena)

    def close(self, timeout: float = CLOSE_TIMEOUT, keep: bool = False) -> list[Statistics | None]:
        """End the session everywhere; what the stages counted comes back, None where a stage did not answer within
        `timeout` seconds. Never raises.

        :param keep: another ring will go on with the stages' KV shortly
        """
        self.closed = True
        if self._loop is not None and self._stages:
            try:
                self._host.run(self._close(timeout, keep), timeout + 2)
            except Exception:
                pass
        return [stage.statistics for stage in self._stages]

    def abandon(self) -> None:
        """As `close` with `keep`, without waiting for anybody."""
        self.closed = True
        if self._loop is not None and self._stages:
            self._loop.call_soon_threadsafe(
                lambda: self._closing.append(asyncio.ensure_future(self._close(ABANDON_TIMEOUT, keep=True)))
            )

    async def _close(self, timeout: float, keep: bool) -> None:
        for stage in (*self._stages, *self.prepared):
            try:
                stage.box.put(ControlFrame(Close(keep).to_wire()))
            except StreamClosed:
                continue
        tasks = [stage.task for stage in self._stages if stage.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*[stage.box.aclose(0.5) for stage in (*self._stages, *self.prepared)])
