"""Random uses of a ring, and what must hold whatever the order of events was."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bloombee_spec.client.drafting import Drafting
from bloombee_spec.client.stream import StreamRequest, think
from bloombee_spec.config import SpecConfig
from bloombee_spec.draft.base import Drafter, Proposal, never
from bloombee_spec.sampling.spec import SamplingSpec
from bloombee_spec.wire.frames import ControlFrame, PrefixFrame
from tests.ring_client import Client
from tests.ring_model import HashModel
from tests.ring_world import RingShape, World

SAMPLED = {"do_sample": True, "temperature": 0.8, "repetition_penalty": 1.2}


class RandomDrafter(Drafter):
    """:param hit: chance that a proposal is the target's own (greedy) token; `chain` or else a random tree, with
    duplicates"""

    def __init__(self, model: HashModel, rng: random.Random, hit: float, chain: bool, instant: bool = True):
        self.instant = instant
        self._model, self._rng, self._hit, self._chain = model, rng, hit, chain
        self._text: list[int] = []

    def start(self, prompt: Sequence[int]) -> None:
        self._text = list(prompt)

    def observe(self, tokens: Sequence[int]) -> None:
        self._text += tokens

    def propose(
        self, path: Sequence[int], budget: int, *, max_depth: int = 64, interrupted: Callable[[], bool] = never
    ) -> list[Proposal]:
        rng, proposals, texts = self._rng, [], [self._text + list(path)]
        for i in range(budget if self._chain else rng.randint(0, budget)):
            parent = i - 1 if self._chain else rng.choice((-1, i - 1, rng.randint(-1, i - 1)))
            if len(texts[parent + 1]) - len(texts[0]) >= max_depth:
                if self._chain:
                    break
                parent = -1
            text = texts[parent + 1]
            token = self._model.greedy(text) if rng.random() < self._hit else rng.randrange(self._model.vocab)
            proposals.append(Proposal(parent, token, 1.0 if self._chain else rng.uniform(0.4, 1)))
            texts.append([*text, token])
        return proposals


class ErringDrafter(Drafter):
    """Proposes the rest of `text` as one chain, with another token at the positions in `wrong`."""

    instant = True

    def __init__(self, text: Sequence[int], wrong: Collection[int]):
        self._text, self._wrong, self._length = text, wrong, 0

    def start(self, prompt: Sequence[int]) -> None:
        self._length = len(prompt)

    def observe(self, tokens: Sequence[int]) -> None:
        self._length += len(tokens)

    def propose(
        self, path: Sequence[int], budget: int, *, max_depth: int = 64, interrupted: Callable[[], bool] = never
    ) -> list[Proposal]:
        start = self._length + len(path)
        positions = range(start, min(start + min(budget, max_depth), len(self._text)))
        tokens = [self._text[at] ^ (at in self._wrong) for at in positions]
        return [Proposal(i - 1, token, 1.0) for i, token in enumerate(tokens)]


class SteppedDrafting(Drafting):
    """The drafting thread's work as steps of the world, so that anything may happen between a question and its
    answer."""

    stage = None
    name = "drafting"

    def __init__(self, client: Client, config: SpecConfig, weight: float):
        decoder = client.decoder
        self._streams, self._config, self._send, self._closed = decoder.streams, config, decoder._send_specs, False
        self.weight, self.woken, self._answer = weight, False, None
        self.failure = None
        decoder._drafting = self
        client.world.runs.append(self)  # type: ignore[arg-type]

    def wake(self) -> None:
        self.woken = True

    def close(self) -> None:
        self._closed = True

    def run(self) -> None:
        if self._answer is not None:
            stream, ask, proposals = self._answer
            self._answer = None
            with stream.lock:
                self._send(stream, stream.answer(ask, proposals))
            return
        for stream in self._streams:
            with stream.lock:
                ask = stream.ask()
                lessons = stream.lessons() if ask is not None else []
            if ask is not None:
                self._answer = stream, ask, think(stream.drafter, lessons, ask)
                return
        self.woken = any(self._hedge(stream) for stream in self._streams)


@dataclass(frozen=True)
class Game:
    """What a client does: `turns` calls of `decode`, each on a history that may have been edited.

    :param ends: how a turn may end: `run` to its limit or stop token, `stop` by the caller, `interrupt` before that
    """

    seed: int
    turns: int = 2
    ends: tuple[str, ...] = ("run", "run", "stop", "interrupt")
    speculate: bool = True
    drafting: str = (
        "any"  # in the decode loop (`instant`), in `steps` of its own, or in a `thread` that nobody schedules
    )
    longest: int = 10
    hit: float | None = None  # chance that a proposal is right; None: drawn for each client
    sampled: float = 0.1  # chance that a turn samples
    patience: int = 60  # most steps of the world before an interruption
    clients: int = 1
    drain: bool = False  # let everything settle between turns


def random_shape(rng: random.Random, **fixed: Any) -> RingShape:
    shape = RingShape(
        blocks=tuple(rng.choice((1, 1, 2, 3)) for _ in range(rng.randint(1, 5))), embed=rng.random() < 0.5,
        verify=rng.random() < 0.5, arena=rng.choice((1, 2, 3, 8)), lanes=rng.choice((1, 1, 2)),
        max_rows=rng.choice((1, 2, 8)), chunk=rng.choice((1, 3, 256)),
    )  # fmt: skip
    return replace(shape, **fixed)


def play(game: Game, **fixed: Any) -> tuple[World, list[Client]]:
    """Play a game on a random ring (but for `fixed` fields of its shape).

    :raises Exception: whatever went wrong, with the last events as a note
    """
    rng = random.Random(game.seed)
    world = World(random_shape(rng, **fixed), vocab=rng.choice((4, 8)), seed=game.seed)
    try:
        users = [_User(world, game, rng) for _ in range(game.clients)]
        leaving = game.clients > 1 and rng.random() < 0.5
        running = [user.turns() for user in users]
        while running:
            user = rng.choice(running)
            if next(user, None) is None:
                running.remove(user)
            elif leaving and rng.random() < 0.1 and user is running[0]:
                users.pop(0).client.vanish()
                running.pop(0)
                leaving = False
        world.drain()
        for user in users:
            user.check_end()
            user.client.decoder.close()
            assert user.client.decoder._drafting is None or user.client.decoder._drafting.failure is None
        return world, [user.client for user in users]
    except BaseException as e:
        e.args = (*e.args, f"seed {game.seed}", world.shape, "\n".join(world.log))
        raise
    finally:
        world.close()


class _User:
    def __init__(self, world: World, game: Game, rng: random.Random):
        self.world, self.game, self.rng = world, game, rng
        hit, chain = rng.choice((0.0, 0.5, 0.9, 1.0)) if game.hit is None else game.hit, rng.random() < 0.3
        config = SpecConfig(plan="none", min_probability=rng.choice((0.0, 0.0, 0.3)), burst=rng.choice((1, 4, 16)))
        self.config = config
        how = rng.choice(("instant", "steps")) if game.drafting == "any" else game.drafting
        drafters = [RandomDrafter(world.model, rng, hit, chain, how != "thread") for _ in range(world.shape.lanes)]
        giving = itertools.cycle(drafters if game.speculate and rng.random() < 0.9 else [None] * len(drafters))
        self.new_drafter = lambda: next(giving)
        self.client = Client(world, config, self.new_drafter)
        if how == "steps":
            SteppedDrafting(self.client, config, rng.choice(world.weights))
            for drafter in drafters:
                drafter.instant = False
        self._settled: list[int] = []  # lanes whose last turn ran to its end
        self.histories = [self._tokens(1, 6) for _ in range(world.shape.lanes)]

    def _tokens(self, fewest: int, most: int) -> list[int]:
        return [self.rng.randrange(self.world.model.vocab) for _ in range(self.rng.randint(fewest, most))]

    def turns(self) -> Iterator[bool]:
        """Plays; yields whenever another client may go on."""
        for turn in range(self.game.turns):
            for history in self.histories:
                if turn and self.rng.random() < 0.5:
                    del history[self.rng.randint(1, len(history)) :]
                history += self._tokens(0, 4) if turn else []
            yield from self._turn([self._request(lane, history) for lane, history in enumerate(self.histories)])
            if self.game.drain:
                self.world.drain()

    def _request(self, lane: int, history: list[int]) -> StreamRequest:
        rng = self.rng
        del history[self.world.shape.max_length - 1 :]
        limit = min(
            len(history) + rng.choices((0, 1, rng.randint(2, self.game.longest)), (1, 1, 10))[0],
            self.world.shape.max_length,
        )
        stops = (rng.randrange(self.world.model.vocab),) if rng.random() < 0.4 else ()
        spec = SamplingSpec(prompt_length=len(history), seed=rng.randrange(99), **SAMPLED)  # type: ignore[arg-type]
        sampling = spec.to_wire() if rng.random() < self.game.sampled else {}
        return StreamRequest(tuple(history), limit, stops, sampling, lane)

    def _turn(self, requests: list[StreamRequest]) -> Iterator[bool]:
        rng, client, end = self.rng, self.client, self.rng.choice(self.game.ends)
        client.interrupt_after = rng.randint(0, self.game.patience) if end == "interrupt" else None
        got: list[list[int]] = [[] for _ in requests]
        kept: dict[int, int] = {}
        complete = True
        self._settled = []
        if end == "break":
            self._break(requests, got)
            client = self.client
        try:
            for lane, tokens in client.decoder.decode(_continued(requests, got)):
                got[lane] += tokens
                if end == "stop" and lane not in kept and rng.random() < 0.3:
                    kept[lane] = rng.randint(1, len(got[lane]))
                    client.decoder.stop(lane, len(requests[lane].tokens) + kept[lane])
                yield True
        except KeyboardInterrupt:
            complete = False
        client.interrupt_after = None
        for lane, request in enumerate(requests):
            stream, new = client.decoder.streams[lane], got[lane]
            text = self.world.model.decode(request.tokens, request.limit, request.stop_tokens, request.sampling, lane)
            assert new == (text if complete and lane not in kept else text[: len(new)]), f"{new} instead of {text}"
            assert stream.tally.hits + stream.tally.misses == stream.tally.tokens
            assert stream.tally.tokens == len(new) or end == "break"
            self.histories[lane] = [*request.tokens, *new[: kept.get(lane)]]
            if not complete and rng.random() < 0.5:
                client.decoder.stop(lane, stream.tree.length)
            elif complete and lane not in kept and stream.tally.tokens:
                self._settled.append(lane)

    def _break(self, requests: list[StreamRequest], got: list[list[int]]) -> None:
        """Somewhere in the turn stages are lost, once or several times; another ring goes on."""
        for _ in range(self.rng.choice((1, 1, 3))):
            old = self.client
            old.interrupt_after = self.rng.randint(0, self.game.patience)
            try:
                for lane, tokens in old.decoder.decode(_continued(requests, got)):
                    got[lane] += tokens
            except KeyboardInterrupt:
                pass
            old.gone = True
            self.world.clients.remove(old)
            n = len(old.spans)
            lost = self.rng.sample(range(n), self.rng.choice((0, 1, 1, min(2, n))))
            for i in lost:
                self.world.stages[i].retire(old.sessions[i])
            texts = [request.tokens for request in _continued(requests, got)]
            self.client = Client(self.world, self.config, self.new_drafter, after=old, lost=lost, texts=texts)

    def check_end(self) -> None:
        """Everything settled: everybody agrees, all is answered and counted, and nothing is held once the streams
        end."""
        check_ledger(self.client)
        for lane in self._settled:
            for session in self.client.sessions:
                assert session.lanes[lane].tree.committed == self.client.decoder.streams[lane].tree.committed
        for lane, stream in enumerate(self.client.decoder.streams):
            self.client.decoder.stop(lane, stream.tree.length)
        self.world.drain()
        check_ledger(self.client)
        for session in self.client.sessions:
            for lane, state in enumerate(session.lanes):
                stream = self.client.decoder.streams[lane]
                assert state.tree.committed == stream.tree.committed[: stream.held] and state.epoch == stream.epoch
                assert not state.has_work and not state._waiting and not state.tree.nodes
                state.take_moves()
                assert not state.arena.used
                state.check()


def _continued(requests: list[StreamRequest], got: list[list[int]]) -> list[StreamRequest]:
    """What is left to do, nothing behind a stop token."""
    left = []
    for request, new in zip(requests, got):
        tokens = (*request.tokens, *new)
        over = bool(new) and new[-1] in request.stop_tokens
        left.append(replace(request, tokens=tokens, limit=len(tokens) if over else request.limit))
    return left


def check_ledger(client: Client) -> None:
    """Rule 4: stages answer for every frame; and what they say that they computed is what they computed."""
    frames = [frame for _, frame in client.received]
    failures = [frame.message for frame in frames if isinstance(frame, ControlFrame)]
    assert not failures, failures
    lanes = [session.lanes for session in client.sessions]
    for lane in range(len(lanes[0])):
        answers = [frame.seq for frame in frames if frame.lane == lane]
        assert answers == sorted(answers)
        sent = [frame.seq for frame in client.sent if frame.lane == lane and frame.epoch]
        assert sent == sorted(set(sent)) and sent[-1:] == answers[-1:], f"{sent[-1:]} sent, {answers[-1:]} answered"
        counted = [frame for frame in frames if frame.lane == lane and not isinstance(frame, PrefixFrame)]
        states = [stage[lane] for stage in lanes]
        for stage in range(1 if client.embeds else 0, len(states) - 1 if client.verifies else len(states)):
            came, left = client.rows[stage, lane], client.rows[stage + 1, lane]
            same = came == left + states[stage].total_dropped
            assert client.plans or same, f"stage {stage}: {came} rows came, {left} left"
        for name in ("computed", "dropped"):
            told = sum(getattr(frame, name) for frame in counted) + sum(getattr(state, name) for state in states)
            assert told == sum(getattr(state, f"total_{name}") for state in states), f"{name} rows do not add up"


def commit_times(
    shape: RingShape, wrong: Collection[int] | None, n: int, commit_delay: float = 1.0
) -> tuple[list[float], list[int]]:
    """When each of `n` tokens reaches a client whose guess at the positions in `wrong` misses, once. Links take a
    second, compute nothing.

    :param wrong: None does not speculate
    :param commit_delay: seconds from the verifier to the other stages
    :returns: times, and the rows that each stage computed
    """
    world = World(shape, vocab=16, timed=True)
    prompt = (3, 1, 2)
    text = [*prompt, *world.model.decode(prompt, len(prompt) + n)]
    config = SpecConfig(plan="none", min_probability=0.0, hedges=0)
    client = Client(
        world, config, lambda: None if wrong is None else ErringDrafter(text, {len(prompt) + i for i in wrong})
    )
    for link in world.links:
        link.delay = commit_delay if link.name.startswith("commits") else 1.0
    times = []
    try:
        for _, tokens in client.decoder.decode([StreamRequest(prompt, len(text))]):
            times += [world.now] * len(tokens)
        world.drain()
        check_ledger(client)
    finally:
        world.close()
    return times, [session.lanes[0].total_computed for session in client.sessions]
