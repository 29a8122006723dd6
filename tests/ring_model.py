"""A whole ring in one thread: the real client, lanes, verifiers, stages, sessions and frames, around a cheap model and no network.

What is replaced: links are queues of encoded frames, the host's cache is a dictionary, and the model is a hash. A row's key hashes
its input and position, its output hashes the sum of all keys that it may see: any wrong mask, position, move, stale or reused
column changes the tokens. A scheduler picks what happens next, also in the middle of a forward.
"""

from __future__ import annotations

import math
import queue
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bloombee_spec.choose import make_chooser
from bloombee_spec.client.decoder import RingDecoder
from bloombee_spec.client.ring import RingError
from bloombee_spec.config import SpecConfig
from bloombee_spec.draft.base import Drafter
from bloombee_spec.kv.buffer import KVShape, LaneView
from bloombee_spec.server.config import SpecServerConfig
from bloombee_spec.server.families.base import BlockFamily
from bloombee_spec.server.session import CLIENT, COMMIT, DATA, StageSession
from bloombee_spec.server.stage import Stage
from bloombee_spec.wire.frames import CommitFrame, ControlFrame, NodesFrame, PrefixFrame, RewindFrame, decode, encode
from bloombee_spec.wire.messages import SESSION_BYTES, Open, Rule

POISON = float((1 << 51) + 12345)
_U = np.uint64


def mix(values: np.ndarray) -> np.ndarray:
    """52 well-mixed bits of uint64 `values`, by the finaliser of SplitMix64 (Steele et al., 2014)."""
    values = (values ^ (values >> _U(30))) * _U(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> _U(27))) * _U(0x94D049BB133111EB)
    return (values ^ (values >> _U(31))) >> _U(12)


class HashModel:
    """:param blocks: total number of blocks; hidden states are single float64 values that hold 52-bit integers"""

    def __init__(self, vocab: int, blocks: int, seed: int = 0):
        self.vocab, self.blocks, self.seed = vocab, blocks, seed
        self.config = SimpleNamespace(vocab_size=vocab, hidden_size=1)
        self._memo: dict[tuple[int, ...], tuple[np.ndarray, torch.Tensor]] = {
            (): (np.zeros(blocks, _U), torch.empty(0))
        }

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        values = mix(np.asarray(tokens, _U) * _U(0x9E3779B97F4A7C15) + _U(self.seed * 977 + 1))
        return torch.from_numpy(values.astype(np.float64))[:, None]

    @staticmethod
    def key(hidden: np.ndarray, position: np.ndarray, block: int) -> np.ndarray:
        return mix(hidden * _U(0x9E3779B97F4A7C15) + position * _U(0xD1B54A32D192ED03) + _U(block + 1))

    @staticmethod
    def output(hidden: np.ndarray, position: np.ndarray, seen: np.ndarray, block: int) -> np.ndarray:
        return mix(
            hidden * _U(0xAEF17502108EF2D9)
            + seen * _U(0x9FB21C651E98DF25)
            + position * _U(0x2545F4914F6CDD1D)
            + _U(block)
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.numpy().astype(_U) * _U(0x9E3779B97F4A7C15) + np.arange(self.vocab, dtype=_U)[None] * _U(
            0xD1B54A32D192ED03
        )
        return torch.from_numpy(mix(rows) / float(1 << 50)).float()

    def after(self, prefix: tuple[int, ...]) -> tuple[np.ndarray, torch.Tensor]:
        """Sums of keys per block, and `[vocab]` logits, after a non-empty prefix, computed one token at a time."""
        if prefix not in self._memo:
            sums = self.after(prefix[:-1])[0].copy()
            hidden, position = self.embed(prefix[-1:])[:, 0].numpy().astype(_U), np.array([len(prefix) - 1], _U)
            for block in range(self.blocks):
                sums[block : block + 1] += self.key(hidden, position, block)
                hidden = self.output(hidden, position, sums[block : block + 1], block)
            self._memo[prefix] = sums, self.logits(torch.from_numpy(hidden.astype(np.float64))[:, None])[0]
        return self._memo[prefix]

    def greedy(self, prefix: Sequence[int]) -> int:
        return int(self.after(tuple(prefix))[1].argmax())

    def chain(
        self, tokens: Sequence[int], limit: int, stops: Sequence[int] = (), sampling: Any = None, row: int = 0
    ) -> list[int]:
        """What plain decoding generates: the reference for everything else."""
        choose = make_chooser(sampling or {}, row, self.vocab)
        text = list(tokens)
        while len(text) < limit and (len(text) == len(tokens) or text[-1] not in stops):
            text.append(choose(self.after(tuple(text))[1], text))
        return text[len(tokens) :]


class _HashFamily(BlockFamily):
    name = "hash"
    kv_heads = head_dim = 1  # type: ignore[assignment]

    def __init__(self, world: World, stage: int):
        super().__init__(world.model.config)
        self._world, self._stage = world, stage

    def check(self, block: Any) -> None:
        pass

    def prepare(self, block: Any, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor]:
        self._world.poison_free(self._stage)
        return (positions,)

    def forward(
        self, index: int, block: Any, hidden: torch.Tensor, shared: Any, lanes: Sequence[LaneView]
    ) -> torch.Tensor:
        self._world.meanwhile()
        x, position = hidden[:, 0].numpy().astype(_U), shared[0].numpy().astype(_U)
        keys, out = HashModel.key(x, position, block), np.zeros_like(x)
        for lane in lanes:
            column, rows = lane.buffer[0, index, 0, :, 0].numpy(), lane.rows
            column[lane.columns.numpy()] = keys[rows]
            visible = column[lane.begin : lane.end].astype(_U)
            mask = np.ones((len(x[rows]), len(visible)), _U) if lane.mask is None else lane.mask.numpy().astype(_U)
            out[rows] = HashModel.output(x[rows], position[rows], mask @ visible, block)
        self._world.meanwhile()
        return torch.from_numpy(out.astype(np.float64))[:, None]


class Link:
    """Frames of one stream, in order; the sender's side looks like an `Outbox`."""

    def __init__(self, world: World, name: str, deliver: Callable[[bytes], None], to_client: bool = False):
        self.world, self.name, self.deliver, self.to_client = world, name, deliver, to_client
        self.queue: deque[tuple[float, bytes]] = deque()  # (time of arrival, frame)
        self.weight = world.rng.choice(world.weights)
        self.bytes_sent = 0
        world.links.append(self)

    def put(self, frame: Any) -> int:
        return self.put_bytes(encode(frame))

    def put_bytes(self, data: bytes) -> int:
        self.queue.append((self.world.now + 1.0, data))
        self.bytes_sent += len(data)
        return len(data)

    def run(self) -> None:
        self.deliver(self.queue.popleft()[1])


class _StageRun:
    def __init__(self, world: World, index: int):
        self.weight = world.rng.choice(world.weights)
        self.stage = world.stages[index]
        self.name = f"step of stage {index}"

    def run(self) -> None:
        self.stage.pool.load_batch_to_runtime()
        self.stage.step()


@dataclass(frozen=True)
class RingShape:
    """:param blocks: of each stage; `arena` credits; `max_rows` candidate rows per forward; `chunk` tokens per prefix frame"""

    blocks: tuple[int, ...] = (1, 1)
    embed: bool = True
    verify: bool = True
    arena: int = 8
    lanes: int = 1
    max_length: int = 48
    max_rows: int = 8
    chunk: int = 256


class World:
    """:param timed: frames arrive one second after they were sent and compute takes no time; else anything may happen next
    :param interleave: chance that a frame arrives at each point inside a forward
    """

    weights = (0.02, 0.2, 1.0, 5.0)  # some links and stages are much slower than others

    def __init__(
        self, shape: RingShape, vocab: int = 8, seed: int = 0, *, timed: bool = False, interleave: float = 0.4
    ):
        self.shape, self.rng, self.timed, self.interleave, self.now = (
            shape,
            random.Random(seed),
            timed,
            interleave,
            0.0,
        )
        self.model = HashModel(vocab, sum(shape.blocks), seed)
        self.links: list[Link] = []
        self.buffers: dict[int, torch.Tensor] = {}
        self.clients: list[Client] = []
        self.log: deque[str] = deque(maxlen=60)
        self.stages = [self._stage(i) for i in range(len(shape.blocks))]
        self.runs = [_StageRun(self, i) for i in range(len(self.stages))]

    def _stage(self, index: int) -> Stage:
        shape = self.shape
        first = sum(shape.blocks[:index])
        heads = SimpleNamespace(embed=self.model.embed)
        memory = SimpleNamespace(use_cache=self._use_cache)
        return Stage(
            range(first, first + shape.blocks[index]), first, _HashFamily(self, index), heads, memory,  # type: ignore[arg-type]
            SpecServerConfig(max_rows=shape.max_rows), device=torch.device("cpu"), dtype=torch.float64,
            adapter=lambda _: nullcontext(), free=lambda _: None,
        )  # fmt: skip

    @contextmanager
    def _use_cache(self, *handles: int) -> Iterator[list[torch.Tensor]]:
        yield [self.buffers[handle] for handle in handles]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        self.meanwhile()
        return self.model.logits(hidden)

    # ---------------------------------------------------------------- scheduling

    def step(self) -> bool:
        """Let one thing happen; False when nothing can."""
        ready: list[Any] = [run for run in self.runs if run.stage.pool.priority[1] < math.inf]  # woken
        ready += [link for link in self.links if link.queue]
        if not ready:
            return False
        if self.timed:
            action = min(ready, key=lambda item: item.queue[0][0] if isinstance(item, Link) else -1.0)
            self.now = max(self.now, action.queue[0][0]) if isinstance(action, Link) else self.now
        else:
            action = self.rng.choices(ready, [item.weight for item in ready])[0]
        self.log.append(action.name)
        action.run()
        self.check()
        return True

    def meanwhile(self) -> None:
        """Inside a forward: frames may arrive at any stage."""
        while not self.timed and self.rng.random() < self.interleave:
            ready = [link for link in self.links if link.queue and not link.to_client]
            if not ready:
                return
            link = self.rng.choices(ready, [item.weight for item in ready])[0]
            self.log.append(f"  meanwhile {link.name}")
            link.run()

    def drain(self) -> None:
        while self.step():
            pass

    def check(self) -> None:
        for client in self.clients:
            for session in client.sessions:
                for lane in session.lanes:
                    lane.check()

    def poison_free(self, stage: int) -> None:
        """Columns that hold nothing valid hold something that shows."""
        for client in self.clients:
            session = client.sessions[stage]
            for lane, handle in zip(session.lanes, session.handles):
                columns = self.buffers[handle].numpy()[0, :, 0, :, 0]
                columns[:, sorted(set(range(lane.arena.size)) - lane.arena.used)] = POISON
                columns[:, lane.arena.size + lane.scheduled :] = POISON

    def close(self) -> None:
        for stage in self.stages:
            stage.pool._sender.close()
            stage.pool.batch_receiver.close()


class Client:
    """One client's session at all stages of a world, with the real decoder; stands in for `Ring` as well."""

    def __init__(self, world: World, config: SpecConfig, new_drafter: Callable[[], Drafter | None]):
        self.world, shape = world, world.shape
        self.arena, self.embeds, self.verifies = min(shape.arena, config.max_candidates), shape.embed, shape.verify
        self.max_prefill = shape.chunk
        self.spans = [SimpleNamespace(peer=f"stage{i}") for i in range(len(shape.blocks))]
        self.infos = [SimpleNamespace(dtype="float64", hidden=1)]
        self.events = SimpleNamespace(get=self._get)
        self.inbox: deque[Any] = deque()
        self.received: list[tuple[float, Any]] = []  # frames from the last stage with their time
        self.sent_seq: dict[int, int] = {}  # lane -> last number sent
        self.frames_sent: list[PrefixFrame | NodesFrame] = []
        n = len(self.spans)
        number = len(world.clients)
        self._back = [Link(world, f"stage {i} to client {number}", self._from_stage, to_client=True) for i in range(n)]
        self.sessions = [self._session(i, number) for i in range(n)]
        self._up = [Link(world, f"client {number} to stage {i}", self._receiver(i, CLIENT)) for i in range(n)]
        for i, session in enumerate(self.sessions):
            after = None if i + 1 == n else Link(world, f"stage {i} to {i + 1}", self._receiver(i + 1, DATA))
            listeners = range(n - 1) if session.open.verify else ()
            session.link(after, [Link(world, f"commits to {j}", self._receiver(j, COMMIT)) for j in listeners])  # type: ignore[arg-type, misc]
        world.clients.append(self)
        host = SimpleNamespace(
            embed=lambda model, tokens: model.embed(tokens), logits=lambda model, rows: model.logits(rows)
        )
        self.decoder = RingDecoder(
            host, world.model, self, config, lanes=shape.lanes, max_length=shape.max_length, new_drafter=new_drafter  # type: ignore[arg-type]
        )  # fmt: skip

    def _session(self, index: int, number: int) -> StageSession:
        shape, n = self.world.shape, len(self.world.shape.blocks)
        first, last = sum(shape.blocks[:index]), index == n - 1
        opened = Open(
            session=bytes([number]) * SESSION_BYTES, stage=index, stages=n, start=first, end=first + shape.blocks[index],
            lanes=shape.lanes, max_length=shape.max_length, arena=self.arena, previous=f"stage{index - 1}" if index else None,
            next=None if last else f"stage{index + 1}", verifier=f"stage{n - 1}" if shape.verify else None,
            listeners=tuple(f"stage{i}" for i in range(n - 1)) if shape.verify and last else (),
            embed=shape.embed and index == 0, verify=shape.verify and last, codec="raw", codec_in="raw",
        )  # fmt: skip
        handles = tuple(range(len(self.world.buffers), len(self.world.buffers) + shape.lanes))
        size = KVShape(shape.blocks[index], 1, 1, self.arena, shape.max_length).size
        self.world.buffers.update({handle: torch.full(size, POISON, dtype=torch.float64) for handle in handles})
        loop = SimpleNamespace(call_soon_threadsafe=lambda function, *args: function(*args))
        session = StageSession(
            opened, f"client{number}", number, handles, self._back[index], hidden_size=1, dtype=torch.float64,  # type: ignore[arg-type]
            vocab_size=self.world.model.vocab, max_prefill=shape.chunk, device=torch.device("cpu"), head=self.world.head,
            loop=loop,  # type: ignore[arg-type]
        )  # fmt: skip
        self.world.stages[index].sessions[session.key] = session
        return session

    # ---------------------------------------------------------------- frames

    def _receiver(self, index: int, source: str) -> Callable[[bytes], None]:
        def receive(data: bytes) -> None:
            session, frame = self.sessions[index], decode(data)
            if isinstance(frame, ControlFrame):
                session.set_rule(Rule.from_wire(frame.message))
            else:
                if isinstance(frame, PrefixFrame) and frame.epoch >= session.lanes[frame.lane].epoch:
                    buffer = self.world.buffers[session.handles[frame.lane]]
                    buffer[:, :, :, self.arena + frame.start :] = POISON
                session.accept(frame, source, len(data))
            self.world.stages[index].pool.wake()

        return receive

    def _from_stage(self, data: bytes) -> None:
        frame = decode(data)
        self.received.append((self.world.now, frame))
        self.inbox.append(RingError(frame.message["reason"]) if isinstance(frame, ControlFrame) else frame)

    def _get(self, timeout: float) -> Any:
        while not self.inbox:
            if not self.world.step():
                raise queue.Empty
        return self.inbox.popleft()

    def send(self, frame: Any, stage: int = 0) -> int:
        assert len(self.decoder.streams[frame.lane].tree) <= self.arena, "more candidates than credits"
        self.sent_seq[frame.lane] = max(self.sent_seq.get(frame.lane, 0), frame.seq)
        self.frames_sent.append(frame)
        return self._up[stage].put(frame)

    def send_rule(self, rule: Rule) -> None:
        for stage in sorted({0, len(self.spans) - 1}):
            self._up[stage].put(ControlFrame(rule.to_wire()))

    def broadcast(self, frame: CommitFrame | RewindFrame) -> int:
        return sum(link.put(frame) for link in self._up)

    def rewind(self, lane: int, epoch: int, position: int) -> None:
        self.broadcast(RewindFrame(lane, epoch, position))

    def close(self) -> list[None]:
        return []
