"""Candidates as bytes: ids as the step from the previous id, parents relative to the previous node, so that a chain
costs one byte per link."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from bloombee_spec.tree import NodeSpec
from bloombee_spec.wire.varint import Reader, put_int, put_uint

MAX_ID = 1 << 40
MAX_TOKEN = 1 << 24


def is_consecutive(nodes: Sequence[NodeSpec]) -> bool:
    """Then the ids behind the first one need not be told."""
    return all(b.id == a.id + 1 for a, b in pairwise(nodes))


def put_nodes(out: bytearray, nodes: Sequence[NodeSpec], consecutive: bool) -> None:
    previous = 0
    for i, node in enumerate(nodes):
        if i == 0 or not consecutive:
            put_int(out, node.id - previous)
        put_int(out, (node.id if i == 0 else previous) - node.parent)
        put_uint(out, node.token)
        previous = node.id


def read_nodes(read: Reader, count: int, consecutive: bool) -> tuple[NodeSpec, ...]:
    """:raises FrameError: truncated, or a number out of range"""
    nodes: list[NodeSpec] = []
    previous = 0
    for i in range(count):
        node_id = previous + 1 if i and consecutive else previous + read.int(MAX_ID)
        parent = (node_id if i == 0 else previous) - read.int(MAX_ID)
        nodes.append(NodeSpec(node_id, parent, read.uint(MAX_TOKEN)))
        previous = node_id
    return tuple(nodes)
