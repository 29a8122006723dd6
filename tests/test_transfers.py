"""KV between two servers: what the client ordered arrives whole or not at all, and nothing else is taken."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloombee_spec.kv.chunk_stream import TransferRefused
from bloombee_spec.kv.chunks import KEY_BYTES, max_chunk_bytes
from bloombee_spec.kv.levels import Level
from bloombee_spec.kv.span import SpanShape
from bloombee_spec.lane import Lane
from bloombee_spec.server.boundary import BoundaryLog, LogBudget
from bloombee_spec.server.pace import Pace
from bloombee_spec.server.transfers import LANE, Transfers, _level_and_tokens
from bloombee_spec.wire.frames import MAX_FRAME_BYTES, FrameError
from bloombee_spec.wire.moving import Export, Import

SHAPE = (2, 2, 2, 8 + 600, 4)  # keys and values, blocks, heads, arena + max_length, head size
KEY, TEXT = b"k" * KEY_BYTES, tuple(range(1, 520))


def session(*, prepared: bool, filled: int = 0) -> Any:
    """What `Transfers` sees of a session: one lane with `filled` tokens, and its buffer."""
    lane = Lane(arena=8, max_length=600, inject=False, log=BoundaryLog(4, 600, torch.float32, LogBudget(1 << 20, 0)))
    lane.fill(0, TEXT[:filled])
    opened = SimpleNamespace(prepared=prepared, donor="donor", arena=8, start=0, end=2)
    return SimpleNamespace(
        lanes=[lane], lock=threading.Lock(), open=opened, key=(b"", 0), dead=False, buffer=torch.randn(SHAPE)
    )


class Pipe:
    """The exporter's outbox, and the importer's reader."""

    def __init__(self) -> None:
        self.reader, self.sent = asyncio.StreamReader(), list[bytes]()
        self.ends = 1  # transfers until the end

    async def room(self, *_: Any) -> None: ...

    async def aclose(self, *_: Any) -> None:
        self.ends -= 1
        if self.ends:
            return
        for data in self.sent:
            self.reader.feed_data(len(data).to_bytes(3, "big") + data)
        self.reader.feed_eof()

    def put_bytes(self, data: bytes) -> None:
        self.sent.append(data)


def transfers(pipe: Pipe) -> Transfers:
    async def on_buffer(session: Any, index: int, job: Any) -> Any:
        return job(session.buffer)

    async def dial(*_: Any) -> Any:
        return pipe

    return Transfers(2, 1000, on_buffer, dial)


async def move(source: Any, target: Any, n: int, tamper: Any = lambda sent: None, start: int = 0) -> None:
    pipe = Pipe()
    server = transfers(pipe)
    await server.expect(target, Import(0, start, TEXT[start:n], KEY))
    server.export(source, Export("kv", "peer", bytes(16), 0, 0, start, n, KEY))
    close = pipe.aclose

    async def aclose(*_: Any) -> None:
        tamper(pipe.sent)
        await close()

    pipe.aclose = aclose  # type: ignore[method-assign]
    await server.receive(target, pipe.reader)


def test_kv_arrives_bit_by_bit_and_the_lane_knows_its_tokens() -> None:
    source, target = session(prepared=False, filled=519), session(prepared=True)
    asyncio.run(move(source, target, 519))
    assert torch.equal(source.buffer[:, :, :, 8 : 8 + 519], target.buffer[:, :, :, 8 : 8 + 519])
    (lane,) = target.lanes
    assert lane.filled == lane.scheduled == 519 and lane.tree.committed == list(TEXT)
    assert lane.log.first == 519, "rows that were never computed here are not promised"


def test_a_later_part_is_added() -> None:
    source, target = session(prepared=False, filled=519), session(prepared=True)
    asyncio.run(move(source, target, 100))
    asyncio.run(move(source, target, 400, start=100))
    assert target.lanes[0].filled == 400
    assert torch.equal(source.buffer[:, :, :, 8:408], target.buffer[:, :, :, 8:408])


def test_some_blocks_go_to_a_server_that_takes_only_those() -> None:
    source, target = session(prepared=False, filled=300), session(prepared=True)
    target.buffer = target.buffer[:, :1].clone()

    async def run() -> None:
        server = transfers(pipe := Pipe())
        await server.expect(target, Import(0, 0, TEXT[:300], KEY))
        with pytest.raises(FrameError, match="blocks"):
            server.export(source, Export("kv", "peer", bytes(16), 0, 0, 0, 300, KEY, blocks=(1, 3)))
        server.export(source, Export("kv", "peer", bytes(16), 0, 0, 0, 300, KEY, blocks=(1, 2)))
        await server.receive(target, pipe.reader)

    asyncio.run(run())
    assert torch.equal(source.buffer[:, 1:, :, 8:308], target.buffer[:, :, :, 8:308])


def lossy_run(lossy: bool) -> tuple[Any, Any]:
    """256 tokens at the level `INT8`, then some exact ones."""
    source, target = session(prepared=False, filled=300), session(prepared=True)

    async def run() -> None:
        server = transfers(pipe := Pipe())
        await server.expect(target, Import(0, 0, TEXT[:300], KEY, lossy))
        server.export(source, Export("kv", "peer", bytes(16), 0, 0, 0, 256, KEY, level=1))
        server.export(source, Export("kv", "peer", bytes(16), 0, 0, 256, 300, KEY))
        pipe.ends = 2
        await server.receive(target, pipe.reader)

    asyncio.run(run())
    return source, target


def test_chunks_of_one_transfer_come_by_several_streams() -> None:
    source, target = session(prepared=False, filled=519), session(prepared=True)
    pipes: list[Pipe] = []

    async def run() -> None:
        async def dial(*_: Any) -> Any:
            pipes.append(Pipe())
            return pipes[-1]

        async def on_buffer(session: Any, index: int, job: Any) -> Any:
            return job(session.buffer)

        server = Transfers(2, 1000, on_buffer, dial)
        await server.expect(target, Import(0, 0, TEXT, KEY, True))
        for start, end, level in ((0, 256, 3), (256, 400, 2), (400, 519, 0)):
            server.export(source, Export("kv", "peer", bytes(16), 0, 0, start, end, KEY, level=level))
        while len(pipes) < 3:
            await asyncio.sleep(0.01)
        await asyncio.gather(*[server.receive(target, pipe.reader) for pipe in pipes])

    asyncio.run(run())
    assert target.lanes[0].filled == 519
    assert torch.equal(source.buffer[:, :, :, 408:527], target.buffer[:, :, :, 408:527])


def test_a_chunk_may_come_before_the_clients_announcement() -> None:
    source, target = session(prepared=False, filled=300), session(prepared=True)

    async def run() -> None:
        server = transfers(pipe := Pipe())
        server.export(source, Export("kv", "peer", bytes(16), 0, 0, 0, 300, KEY))
        receiving = asyncio.ensure_future(server.receive(target, pipe.reader))
        await asyncio.sleep(0.2)
        await server.expect(target, Import(0, 0, TEXT[:300], KEY))
        await receiving

    asyncio.run(run())
    assert target.lanes[0].filled == 300


def test_a_transfer_ends_with_the_session_that_it_is_of() -> None:
    async def run() -> int:
        source = session(prepared=False, filled=300)
        server = transfers(pipe := Pipe())
        for _ in range(3):
            server.export(source, Export("kv", "peer", bytes(16), 0, 0, 0, 300, KEY, rate=1e4))
        await asyncio.sleep(0.3)
        assert server.under_way == 3 and pipe.sent, "they wait for their pace"
        server.ended(source)
        await asyncio.sleep(0.3)
        return server.under_way

    assert asyncio.run(run()) == 0


@pytest.mark.parametrize("blocks", [16, 32])
@pytest.mark.parametrize("level", [Level.LOSSLESS, Level.INT8, Level.COARSE])
def test_kv_of_wide_spans_travels(blocks: int, level: Level) -> None:
    """Of a 7B model without grouped heads: half of it, or all."""
    shape = SpanShape(blocks, 32, 128, torch.bfloat16)
    for rate in (0.0, 1e5):
        order = Export("kv", "peer", bytes(16), 0, 0, 0, 300, KEY, level=level, rate=rate)
        used, tokens = _level_and_tokens(shape, order)
        assert max_chunk_bytes(shape, tokens, used) + LANE.size <= MAX_FRAME_BYTES
        assert used in (level, Level.LOSSLESS) and (rate or tokens >= 8)


def test_lossy_chunks_are_taken_where_the_client_said_so() -> None:
    source, target = lossy_run(True)
    assert target.lanes[0].filled == 300
    assert torch.equal(source.buffer[:, :, :, 8 + 256 : 308], target.buffer[:, :, :, 8 + 256 : 308])
    error = (source.buffer - target.buffer)[:, :, :, 8 : 8 + 256].abs().max()
    assert 0 < error < 0.05
    with pytest.raises(TransferRefused, match="INT8"):
        lossy_run(False)


def test_a_pace_is_kept_and_shared() -> None:
    async def run() -> float:
        pace, loop = Pace(8e4), asyncio.get_running_loop()
        started = loop.time()
        await asyncio.gather(*[pace.spend(250) for _ in range(4)])
        return loop.time() - started

    assert asyncio.run(run()) > 0.09  # 1000 bytes at 10 000 a second: not sooner


@pytest.mark.parametrize(
    "wrong", [{"blocks": (1,)}, {"blocks": (2, 2)}, {"what": "rows", "key": b"", "blocks": (0, 1)}, {"rate": 1.0}]
)
def test_an_order_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    order = {"what": "kv", "peer": "p", "session": bytes(16), "stage": 0, "lane": 0, "start": 0, "end": 1, "key": KEY}
    with pytest.raises(ValueError):
        Export(**{**order, **wrong})


def corrupt(sent: list[bytes]) -> None:
    sent[0] = sent[0][:50] + bytes([sent[0][50] ^ 1]) + sent[0][51:]


def truncate(sent: list[bytes]) -> None:
    sent[-1] = sent[-1][:-40]


def replay(sent: list[bytes]) -> None:
    sent.insert(1, sent[0])


def other_lane(sent: list[bytes]) -> None:
    sent[0] = LANE.pack(7) + sent[0][LANE.size :]


def short(sent: list[bytes]) -> None:
    sent[0] = bytes(5)


@pytest.mark.parametrize("tamper", [corrupt, truncate, replay, other_lane, short], ids=lambda f: f.__name__)
def test_damaged_and_repeated_chunks_are_refused_and_nothing_is_written(tamper: Any) -> None:
    source, target = session(prepared=False, filled=519), session(prepared=True)
    before = target.buffer.clone()
    with pytest.raises(TransferRefused):
        asyncio.run(move(source, target, 519, tamper))
    assert target.lanes[0].filled == 0 and torch.equal(target.buffer, before)


def test_a_transfer_that_ends_early_writes_nothing() -> None:
    source, target = session(prepared=False, filled=519), session(prepared=True)
    before = target.buffer.clone()
    asyncio.run(move(source, target, 519, lambda sent: sent.pop()))
    assert target.lanes[0].filled == 0 and torch.equal(target.buffer, before)


def test_only_what_is_there_can_be_ordered() -> None:
    async def run() -> None:
        server, source, target = transfers(Pipe()), session(prepared=False, filled=100), session(prepared=True)
        with pytest.raises(FrameError, match="are here"):
            server.export(source, Export("kv", "peer", bytes(16), 0, 0, 0, 101, KEY))
        with pytest.raises(FrameError, match="are here"):
            server.export(source, Export("rows", "peer", bytes(16), 0, 0, 0, 100))  # its log begins behind them
        with pytest.raises(FrameError, match="prepared"):
            await server.expect(source, Import(0, 100, TEXT[100:110], KEY))
        with pytest.raises(FrameError, match="are here"):
            await server.expect(target, Import(0, 5, TEXT[5:10], KEY))
        with pytest.raises(FrameError, match="are here"):
            await server.expect(target, Import(0, 0, (1000,), KEY))
        with pytest.raises(FrameError, match="are here"):
            await server.expect(target, Import(0, 0, TEXT + TEXT, KEY))

    asyncio.run(run())


def test_a_text_that_is_under_way_is_not_overwritten() -> None:
    lane = Lane(arena=8, max_length=600, inject=False)
    lane.fill(0, (1, 2, 3))
    with pytest.raises(FrameError):
        lane.fill(2, (3, 4))
    with pytest.raises(FrameError):
        lane.fill(3, TEXT + TEXT)
    lane.fill(3, (4,))
    assert lane.filled == 4
