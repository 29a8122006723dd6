"""The ledger: every byte that was written has one kind, and both ends of a link count the same."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import astuple, fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from swarm_helpers import ROUTES, SUFFIX, VOCAB, client, prompts, respec

from benchmarks.ledger import by_link
from bloombee_spec.tree import NodeSpec
from bloombee_spec.wire.frames import CommitFrame, ControlFrame, Frame, NodesFrame, PrefixFrame, RewindFrame, encode
from bloombee_spec.wire.ledger import (
    CLIENT,
    CLIENT_END,
    COLUMNS,
    DATA,
    MAX_COUNT,
    MAX_WAYS,
    Ledger,
    Traffic,
    Way,
    from_wire,
)
from bloombee_spec.wire.streams import Outbox, read_frame, read_stamped_bytes

NODES = tuple(NodeSpec(9 + i, 8 + i, 40_000) for i in range(3))
FRAMES: list[Frame] = [
    PrefixFrame(0, 1, 1, 0, (5, 6, 7), True, 99, 3, b"r" * 300),
    NodesFrame(0, 1, 2, NODES, 4, 1, 3, b"r" * 60),
    NodesFrame(0, 1, 3, NODES[:1]),
    CommitFrame(0, 1, 3, (8, 40_000), 2),
    RewindFrame(0, 2, 3),
    ControlFrame({"kind": "Ping"}),
]


def test_kinds_are_told_apart() -> None:
    traffic = Traffic()
    for frame in FRAMES:
        traffic.sent(encode(frame))
    assert (traffic.frames, traffic.messages) == (6, 2)
    assert (traffic.n_ids, traffic.n_rows, traffic.n_commits, traffic.rows) == (7, 6, 2, 360)
    assert traffic.ids > 7 and traffic.commits == 1 + 1 + 1 + 1 + 1 + 3 + 3
    assert traffic.headers == 6 * (3 + 1 + 2) + 2, "a longer checksum above 256 bytes"


@pytest.mark.parametrize("stamped", [False, True])
def test_both_ends_count_what_was_written(stamped: bool) -> None:
    async def run() -> tuple[Traffic, Traffic, int]:
        here, there = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=here)
        written: list[bytes] = []
        write, writer.write = writer.write, lambda data: (written.append(data), write(data))  # type: ignore[method-assign,misc,assignment,func-returns-value]
        reader, other = await asyncio.open_connection(sock=there)
        box, received = Outbox(writer, max_bytes=1 << 20, timeout=5, stamped=stamped), Traffic()
        for frame in FRAMES:
            box.put(frame)
            if stamped:
                _, data = await read_stamped_bytes(reader)
                received.received(frame, len(data), stamped=True)
            else:
                await read_frame(reader, 5, received)
        await box.aclose()
        other.close()
        return box.traffic, received, sum(map(len, written))

    sent, received, written = asyncio.run(run())
    assert sent == received and sent.bytes == written


@given(st.lists(st.lists(st.integers(0, 1 << 40), min_size=len(fields(Traffic)), max_size=len(fields(Traffic)))))
def test_a_ledger_comes_back_from_the_wire(counts: list[list[int]]) -> None:
    ledger = Ledger()
    for i, each in enumerate(counts[:40]):
        ledger.keep((CLIENT, DATA)[i % 2], i - 1, Traffic(*each), outgoing=i % 3 == 0)
    assert from_wire(ledger.to_wire()) == ledger.entries
    outgoing = [traffic.bytes for way, traffic in ledger.entries.items() if way.outgoing]
    assert ledger.total(outgoing=True) == sum(outgoing)


@pytest.mark.parametrize(
    "numbers", [(0,) * (COLUMNS - 1), (9,) + (0,) * (COLUMNS - 1), (0, 0, 2) + (0,) * (COLUMNS - 3),
                (0,) * (COLUMNS - 1) + (-1,), (0,) * (COLUMNS - 1) + (MAX_COUNT,), (0,) * COLUMNS * (MAX_WAYS + 1)],
    ids=["length", "role", "direction", "negative", "count", "ways"],
)  # fmt: skip
def test_what_no_ledger_sends_is_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="traffic"):
        from_wire(numbers)


@pytest.mark.swarm
def test_every_frame_is_counted_at_both_ends(swarm: Any) -> None:
    """Between any two parties what one sent is what the other received, kind by kind."""
    ids = torch.tensor([prompts(1, VOCAB)[0]])
    with client(swarm, SUFFIX, ROUTES[4]) as model:
        for codec in ("raw", "lossless"):
            respec(model, codec=codec)
            with model.inference_session(max_length=48) as session:
                model.generate(ids, max_new_tokens=16, do_sample=False)
                time.sleep(0.5)  # what is on its way arrives
                stages = session.close()
            ledgers = {index: from_wire(stage.traffic) for index, stage in enumerate(stages)}
            ledgers[CLIENT_END] = from_wire(session.traffic)
            for index in range(4):  # the message with a stage's figures cannot contain itself
                farewell = ledgers[CLIENT_END][Way(CLIENT, index, False)]
                farewell.frames, farewell.messages = farewell.frames - 1, farewell.messages - 1
                farewell.control = ledgers[index][Way(CLIENT, CLIENT_END, True)].control
                farewell.headers = ledgers[index][Way(CLIENT, CLIENT_END, True)].headers
            sent, received = by_link(ledgers)
            assert sent == received
            links = {(-1, i) for i in range(4)} | {(i, -1) for i in range(4)} | {(i, i + 1) for i in range(3)}
            links |= {(i + 1, i) for i in range(3)} | {(3, 0), (0, 3), (3, 1), (1, 3)}  # commits, and their greetings
            assert set(sent) == links and all(traffic.frames for traffic in sent.values())
            hops = [sent[i, i + 1] for i in range(3)]
            assert all(hop.n_rows >= hop.n_ids >= 24 and hop.rows > hop.headers for hop in hops)
            assert all(astuple(sent[3, i])[2:5] == (0, 0, 16) for i in (0, 1)) and sent[3, CLIENT_END].n_commits == 16
            assert all((hop.rows == 96 * 4 * hop.n_rows) == (codec == "raw") for hop in hops)
