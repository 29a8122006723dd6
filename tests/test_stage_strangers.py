"""What one client sends never costs another one its forward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch

from bloombee_spec.lane import Lane
from bloombee_spec.server.config import SpecServerConfig
from bloombee_spec.server.stage import Stage
from bloombee_spec.tree import NodeSpec, committed_ref
from bloombee_spec.wire.frames import CommitFrame, NodesFrame, PrefixFrame


def new_lane() -> Lane:
    """A prompt of two tokens was computed."""
    lane = Lane(arena=1, max_length=32, inject=False)
    lane.accept_prefix(PrefixFrame(0, 1, 1, 0, (5, 6), True, 32, 2, b""), torch.zeros(2, 4))
    compute(lane)
    return lane


def compute(lane: Lane) -> None:
    batch = lane.take(16)
    lane.finish(batch, len(batch.rows), batch.rows)


def nodes(lane: Lane, seq: int, *specs: NodeSpec) -> None:
    lane.accept_nodes(NodesFrame(0, 1, seq, specs, 0, 0, len(specs), b""), torch.zeros(len(specs), 4))


def session(lane: Lane, failures: list[str]) -> Any:
    def now(call: Callable[..., None], *args: Any) -> None:
        call(*args)

    return SimpleNamespace(
        lanes=[lane], lock=threading.Lock(), dead=False, served=0.0, fail=failures.append,
        open=SimpleNamespace(start=0, end=1, adapter=None), loop=SimpleNamespace(call_soon_threadsafe=now),
    )  # fmt: skip


def test_an_impossible_frame_ends_its_own_session_only() -> None:
    root = committed_ref(1)
    hostile, honest = new_lane(), new_lane()
    nodes(hostile, 2, NodeSpec(1, root, 7))
    compute(hostile)
    nodes(hostile, 3, NodeSpec(2, 1, 8), NodeSpec(2, 1, 9))  # wait for a free column; then the second is impossible
    hostile.accept_commit(CommitFrame(0, 1, 2, (7,)))
    nodes(honest, 2, NodeSpec(1, root, 7))
    failures: list[str] = []
    sessions = {(b"bad", 0): session(hostile, failures), (b"good", 0): session(honest, [])}
    unused = cast(Any, None)
    stage = Stage(
        [], 0, unused, unused, unused, SpecServerConfig(), device=torch.device("cpu"), dtype=torch.float32,
        adapter=unused, free=unused,
    )  # fmt: skip
    stage.sessions = cast(Any, sessions)
    (work,) = stage._collect()
    assert work.session is sessions[b"good", 0] and len(work.rows) == 1
    assert len(failures) == 1 and "node id 2" in failures[0]
