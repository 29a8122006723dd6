"""A whole ring in one thread: real stages and sessions, links that are queues of encoded frames, and a scheduler that
picks
what happens next, also in the middle of a forward.

What is not real: the network, the host's cache (a dictionary of buffers) and the model (a hash).
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from bloombee_spec.server.boundary import LogBudget
from bloombee_spec.server.config import SpecServerConfig
from bloombee_spec.server.stage import Stage
from bloombee_spec.wire.frames import encode
from tests.ring_model import POISON, HashFamily, HashModel

if TYPE_CHECKING:
    from tests.ring_client import Client


@dataclass(frozen=True)
class RingShape:
    """:param blocks: of each stage; `arena` credits; `max_rows` candidate rows per forward; `chunk` tokens per prefix
    frame"""

    blocks: tuple[int, ...] = (1, 1)
    embed: bool = True
    verify: bool = True
    arena: int = 8
    lanes: int = 1
    max_length: int = 48
    max_rows: int = 8
    chunk: int = 256


class Link:
    """Frames of one stream, in order. The sender's side looks like an `Outbox`.

    :param stage: who receives; None is a client
    """

    def __init__(self, world: World, name: str, deliver: Callable[[bytes], None], stage: int | None):
        self.name, self.deliver, self.stage, self._world = name, deliver, stage, world
        self.queue: deque[tuple[float, bytes]] = deque()  # (time of arrival, frame)
        self.weight = world.rng.choice(world.weights)
        self.delay = 1.0  # seconds, in timed worlds
        self.bytes_sent = 0
        world.links.append(self)

    def put(self, frame: Any) -> int:
        return self.put_bytes(encode(frame))

    def put_bytes(self, data: bytes) -> int:
        self.queue.append((self._world.now + self.delay, data))
        self.bytes_sent += len(data)
        return len(data)

    def run(self) -> None:
        self.deliver(self.queue.popleft()[1])


class StageRun:
    """One pass of a stage's pool, whenever it was woken."""

    def __init__(self, world: World, index: int):
        self.weight, self.stage, self._pool = world.rng.choice(world.weights), index, world.stages[index].pool
        self.name = f"step of stage {index}"

    @property
    def woken(self) -> bool:
        return self._pool.priority[1] < math.inf

    def run(self) -> None:
        self._pool.load_batch_to_runtime()
        self._pool.process_func()


class World:
    """:param timed: frames arrive one second after they were sent and compute takes no time; else anything may be next
    :param interleave: chance that a frame arrives at each point inside a forward
    """

    weights: Sequence[float] = (0.02, 0.2, 1.0, 5.0)  # some links and stages are much slower than others

    def __init__(
        self, shape: RingShape, vocab: int = 8, seed: int = 0, *, timed: bool = False, interleave: float = 0.4
    ):
        self.shape, self.rng, self.timed, self._interleave = shape, random.Random(seed), timed, interleave
        self.now = 0.0
        self.model = HashModel(vocab, sum(shape.blocks), seed)
        self.links: list[Link] = []
        self.budget = LogBudget(1 << 20, 0)
        self.buffers: dict[int, torch.Tensor] = {}  # by cache handle
        self.clients: list[Client] = []
        self.log: deque[str] = deque(maxlen=60)
        self.stages = [self._stage(i) for i in range(len(shape.blocks))]
        self.runs = [StageRun(self, i) for i in range(len(self.stages))]

    def _stage(self, index: int) -> Stage:
        first = sum(self.shape.blocks[:index])
        family = HashFamily(self.model, lambda: self._poison(index), self.meanwhile)
        return Stage(
            range(first, first + self.shape.blocks[index]),  # type: ignore[arg-type]
            first,
            family,
            SimpleNamespace(embed=self.model.embed),  # type: ignore[arg-type]
            SimpleNamespace(use_cache=self._use_cache),
            SpecServerConfig(max_rows=self.shape.max_rows),
            device=torch.device("cpu"),
            dtype=torch.float64,
            adapter=lambda _: nullcontext(),
            free=lambda ticket: None,
        )

    @contextmanager
    def _use_cache(self, *handles: int) -> Iterator[list[torch.Tensor]]:
        yield [self.buffers[handle] for handle in handles]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        self.meanwhile()
        return self.model.logits(hidden)

    # ---------------------------------------------------------------- scheduling

    def step(self) -> bool:
        """Let one thing happen; False when nothing can."""
        ready: list[Any] = [run for run in self.runs if run.woken]
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
        if action.stage is not None:
            self.check(action.stage)
        return True

    def meanwhile(self) -> None:
        """Inside a forward: frames may arrive at any stage."""
        while not self.timed and self.rng.random() < self._interleave:
            ready = [link for link in self.links if link.queue and link.stage is not None]
            if not ready:
                return
            link = self.rng.choices(ready, [item.weight for item in ready])[0]
            self.log.append(f"  meanwhile {link.name}")
            link.run()

    def drain(self) -> None:
        while self.step():
            pass

    def check(self, stage: int) -> None:
        """Integrity of all lanes at one stage; a stage that sleeps has nothing to do."""
        for client in self.clients:
            for lane in client.sessions[stage].lanes:
                lane.check()
                idle = not lane._queue and not (lane._waiting and lane._moves)
                assert idle or self.runs[stage].woken or client.gone, f"stage {stage} sleeps, but rows wait"

    def _poison(self, stage: int) -> None:
        """Columns that hold nothing valid hold something that shows."""
        for client in self.clients:
            session = client.sessions[stage]
            for lane, handle in zip(session.lanes, session.handles):
                columns = self.buffers[handle].numpy()[0, :, 0, :, 0]
                columns[:, sorted(set(range(lane.arena.size)) - lane.arena.used)] = POISON
                columns[:, lane.arena.size + lane.filled :] = POISON

    def close(self) -> None:
        for stage in self.stages:
            stage.pool._sender.close()
            stage.pool.batch_receiver.close()
