"""One client's session at all stages of a `World`, with the real decoder; stands in for `Ring`."""

from __future__ import annotations

import queue
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch

from bloombee_spec.client.codecs import LinkCodecs
from bloombee_spec.client.decoder import RingDecoder
from bloombee_spec.client.info import StageInfo
from bloombee_spec.client.kept import Kept, LanePlan, plans
from bloombee_spec.client.round_decoder import RoundDecoder
from bloombee_spec.client.stage_link import RingError
from bloombee_spec.config import SpecConfig
from bloombee_spec.draft.base import Drafter
from bloombee_spec.hosts.base import Span
from bloombee_spec.kv.buffer import KVShape
from bloombee_spec.server.boundary import BoundaryLog
from bloombee_spec.server.holding import Holding
from bloombee_spec.server.replay import next_rows
from bloombee_spec.server.session import CLIENT, COMMIT, DATA, StageSession
from bloombee_spec.wire.frames import CommitFrame, ControlFrame, NodesFrame, PrefixFrame, RewindFrame, decode
from bloombee_spec.wire.messages import SESSION_BYTES, Open, Opened
from bloombee_spec.wire.messages import Link as WireLink
from bloombee_spec.wire.steering import Rule
from tests.ring_model import POISON
from tests.ring_world import Link, World


class Client:
    """
    :param interrupt_after: steps of the world after which waiting for an event raises KeyboardInterrupt, once
    :param after: a client whose ring broke, and whose text this one goes on with; `lost` stages that broke
    :param texts: by lane, the committed tokens
    """

    def __init__(
        self, world: World, config: SpecConfig, new_drafter: Callable[[], Drafter | None] = lambda: None,
        after: Client | None = None, lost: Collection[int] = (), texts: Sequence[Sequence[int]] = (),
    ):  # fmt: skip
        self.world, shape, number = world, world.shape, len(world.clients)
        self.rule = None if config.rule == "keyed" else config.rule
        self.arena, self.embeds = min(shape.arena, config.max_candidates), shape.embed
        self.verifies = shape.verify and self.rule is None
        self.max_prefill = shape.chunk
        self.meter = None
        self.codecs = LinkCodecs(["raw"] * (len(shape.blocks) + 1))
        ends = list(accumulate(shape.blocks))
        self.spans = [Span(f"stage{i}", end - n, end) for i, (end, n) in enumerate(zip(ends, shape.blocks))]
        self.infos = [
            StageInfo(
                span.peer, span.start, span.end, "hash", shape.embed, shape.verify, "float64", 1, ("raw",), (),
                shape.max_length,
                shape.lanes, shape.arena, shape.chunk, {1: 1e-3, 8: 2e-3, 64: 1e-2},
            )
            for span in self.spans
        ]  # fmt: skip
        self.events = SimpleNamespace(get=self._get)
        self.interrupt_after: int | None = None
        self.received: list[tuple[float, Any]] = []  # (time, frame) from the last stage
        self.sent: list[Any] = []  # prefix and candidate frames
        self.rows: Counter[tuple[int, int]] = (
            Counter()
        )  # (stage, lane) -> rows that arrived there; the client is the last stage
        self._inbox: deque[Any] = deque()
        self.gone = False
        n = len(self.spans)
        self._back = [Link(world, f"stage {i} to client {number}", self._from_stage, None) for i in range(n)]
        self.sessions = [self._session(i, number, after if i not in lost else None, texts) for i in range(n)]
        self.plans = self._plans(after.lengths(texts), texts) if after is not None else []
        self._up = [Link(world, f"client {number} to stage {i}", self._receiver(i, CLIENT), i) for i in range(n)]
        for i, session in enumerate(self.sessions):
            self._link_later(i, session)
        world.clients.append(self)
        host: Any = SimpleNamespace(
            embed=lambda _, tokens: world.model.embed(tokens), logits=lambda _, rows: world.model.logits(rows)
        )
        stand_in: Any = self
        sizes: dict[str, Any] = {"lanes": shape.lanes, "new_drafter": new_drafter}
        self.decoder: Any
        if self.rule is not None:
            self.decoder = RoundDecoder(host, world.model, stand_in, config, **sizes)
        else:
            sizes |= {"max_length": shape.max_length, "texts": texts}
            self.decoder = RingDecoder(host, world.model, stand_in, config, **sizes)

    def lengths(self, texts: Sequence[Sequence[int]]) -> tuple[int, ...]:
        return Kept({}, [tuple(stream.tree.committed) for stream in self.decoder.streams], 0).lengths(texts)

    def _plans(self, lengths: Sequence[int], texts: Sequence[Sequence[int]]) -> list[LanePlan]:
        opened = [Opened(self.arena, 1, *session.held()) for session in self.sessions]
        return plans(opened, lengths, texts)

    def _session(
        self, index: int, number: int, after: Client | None = None, texts: Sequence[Sequence[int]] = ()
    ) -> StageSession:
        shape, n = self.world.shape, len(self.world.shape.blocks)
        first, last = sum(shape.blocks[:index]), index == n - 1
        verify = self.verifies
        opened = Open(
            session=bytes([number]) * SESSION_BYTES, stage=index, stages=n, start=first,
            end=first + shape.blocks[index],
            lanes=shape.lanes, max_length=shape.max_length, arena=self.arena,
            previous=f"stage{index - 1}" if index else None,
            next=None if last else f"stage{index + 1}", verifier=f"stage{n - 1}" if verify else None,
            listeners=tuple(f"stage{i}" for i in range(n - 1)) if verify and last else (),
            embed=shape.embed and index == 0, verify=verify and last, codec="raw", codec_in="raw",
            rule=self.rule if last else None,
        )  # fmt: skip
        new_log = self._log if not last else None
        if after is not None:
            old = after.sessions[index]
            holding = old.give_holding()
            assert holding is not None
            self.world.stages[index].retire(old)
            holding = holding.resumed(after.lengths(texts), opened.embed, new_log)
        else:
            handles = tuple(range(len(self.world.buffers), len(self.world.buffers) + shape.lanes))
            size = KVShape(shape.blocks[index], 1, 1, self.arena, shape.max_length).size
            self.world.buffers.update({handle: torch.full(size, POISON, dtype=torch.float64) for handle in handles})
            holding = Holding.fresh(opened, number, handles, 0, new_log)
        loop: Any = SimpleNamespace(call_soon_threadsafe=lambda function, *args: function(*args))
        box: Any = self._back[index]
        session = StageSession(
            opened, f"client{number}", holding, box,
            hidden_size=1, dtype=torch.float64,
            vocab_size=self.world.model.vocab, max_prefill=shape.chunk, device=torch.device("cpu"),
            head=self.world.head,
            loop=loop,
        )  # fmt: skip
        self.world.stages[index].sessions[session.key] = session
        return session

    def _log(self) -> BoundaryLog:
        return BoundaryLog(1, self.world.shape.max_length, torch.float64, self.world.budget)

    def _link_later(self, index: int, session: StageSession) -> None:
        """Results that a stage has before its outgoing streams are open must wait, not get lost."""
        world, last = self.world, len(self.spans) - 1
        following: Any = None
        if index < last:
            following = Link(world, f"stage {index} to {index + 1}", self._receiver(index + 1, DATA), index + 1)
        targets = range(last) if session.open.verify else ()
        listeners: Any = [Link(world, f"commits to {j}", self._receiver(j, COMMIT), j) for j in targets]

        link = WireLink(
            tuple(plan.next_holds[index] for plan in self.plans), tuple(plan.replay[index] for plan in self.plans)
        )
        session.check_link(link)

        def linked(_: bytes) -> None:
            if self.gone:
                return
            for lane, (at, end) in enumerate(zip(link.next_holds, link.replay)):
                while (chunk := next_rows(session, lane, at, end)) is not None:
                    following.put(session.outgoing.refill_frame(lane, at, *chunk))
                    at += len(chunk[0])
            session.outgoing.link(following, listeners)

        Link(world, f"link stage {index}", linked, index).put_bytes(b"")

    # ---------------------------------------------------------------- frames

    def _receiver(self, index: int, source: str) -> Callable[[bytes], None]:
        def receive(data: bytes) -> None:
            if self.gone:
                return
            session, frame = self.sessions[index], decode(data)
            if isinstance(frame, ControlFrame):
                session.set_rule(Rule.from_wire(frame.message))
            else:
                self._count(index, frame)
                session.accept(frame, source, len(data))
            self.world.stages[index].pool.wake()

        return receive

    def _from_stage(self, data: bytes) -> None:
        frame = decode(data)
        self._count(len(self.spans), frame)
        self.received.append((self.world.now, frame))
        self._inbox.append(RingError(frame.message["reason"]) if isinstance(frame, ControlFrame) else frame)

    def _count(self, stage: int, frame: Any) -> None:
        if isinstance(frame, (PrefixFrame, NodesFrame)):
            self.rows[stage, frame.lane] += len(frame.tokens if isinstance(frame, PrefixFrame) else frame.nodes)

    def _get(self, timeout: float) -> Any:
        while not self._inbox:
            if self.interrupt_after is not None:
                self.interrupt_after -= 1
                if self.interrupt_after < 0:
                    self.interrupt_after = None
                    raise KeyboardInterrupt
            if not self.world.step():
                raise queue.Empty
        return self._inbox.popleft()

    def send(self, frame: Any, stage: int = 0) -> int:
        if self.rule is None:
            assert len(self.decoder.streams[frame.lane].tree) <= self.arena, "more candidates than credits"
        self.sent.append(frame)
        return self._up[stage].put(frame)

    def send_rule(self, rule: Rule) -> None:
        for stage in sorted({0, len(self.spans) - 1}):
            self._up[stage].put(ControlFrame(rule.to_wire()))

    def commit(self, frame: CommitFrame) -> None:
        if not self.verifies:
            self.broadcast(CommitFrame(frame.lane, frame.epoch, frame.position, frame.tokens))

    def broadcast(self, frame: CommitFrame | RewindFrame) -> int:
        return sum(link.put(frame) for link in self._up)

    def rewind(self, lane: int, epoch: int, position: int) -> None:
        self.broadcast(RewindFrame(lane, epoch, position))

    def close(self, timeout: float = 0.0, keep: bool = False) -> list[None]:
        return []

    def vanish(self) -> None:
        """The control streams break: every stage drops the session, at any point of a forward."""

        def retire(index: int) -> Callable[[bytes], None]:
            return lambda _: self.world.stages[index].retire(self.sessions[index])

        self.gone = True
        for index in range(len(self.sessions)):
            Link(self.world, f"client leaves stage {index}", retire(index), index).put_bytes(b"")
