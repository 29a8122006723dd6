"""The token tree: committed tokens plus the live candidates that continue them.

Every participant of a route holds one and derives the same answer to "what is dead?" from the same committed tokens,
so that
nobody ever sends lists of indices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

ALIAS_WINDOW = 256  # committed nodes whose ids can still be named as a parent


def committed_ref(position: int) -> int:
    """The id that always names the committed token at `position`, whoever created its node."""
    return -(position + 1)


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A candidate as it travels: `parent` is a node id or a `committed_ref`."""

    id: int
    parent: int
    token: int


@dataclass(eq=False, slots=True)
class Node:
    """A live candidate. `parent` is None for a child of the last committed token (the root)."""

    id: int
    token: int
    position: int
    parent: Node | None
    children: list[Node] = field(default_factory=list)

    def child(self, token: int) -> Node | None:
        return next((node for node in self.children if node.token == token), None)

    def path(self) -> list[Node]:
        """Live ancestors from the child of the root down to this node, itself included."""
        path, node = [], self
        while node is not None:
            path.append(node)
            node = node.parent  # type: ignore[assignment]
        return path[::-1]

    def subtree(self) -> Iterator[Node]:
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)


class Fate(Enum):
    LIVE = "live"  # a candidate below the root
    COMMITTED = "committed"  # its position was committed with this very token: the canonical row, possibly late
    DEAD = "dead"  # cannot descend from the committed path, or its parent is unknown


@dataclass(frozen=True, slots=True)
class Verdict:
    fate: Fate
    position: int  # -1 when the parent is unknown
    node: Node | None  # only for LIVE


@dataclass(frozen=True, slots=True)
class Commit:
    """What a commit did: `hit` is the candidate that became the root, `dead` the candidates that it killed."""

    position: int
    token: int
    hit: Node | None
    dead: tuple[Node, ...]


class TokenTree:
    """Committed tokens and live candidates of one stream.

    Node ids are chosen by the creator and unique within an epoch. Children of the root are in `roots`, in arrival
    order.
    """

    def __init__(self, committed: Iterable[int] = ()):
        self.committed: list[int] = list(committed)
        self.nodes: dict[int, Node] = {}
        self.roots: list[Node] = []
        self._aliases: dict[int, int] = {}  # id of a committed node -> position
        self._alias_order: deque[int] = deque()

    def __len__(self) -> int:
        """Number of live candidates."""
        return len(self.nodes)

    @property
    def length(self) -> int:
        """Number of committed tokens; the root is at position `length - 1`."""
        return len(self.committed)

    def extend(self, specs: Iterable[NodeSpec]) -> list[Verdict]:
        """Insert candidates (parents first) and say what became of each.

        :raises ValueError: a live id is used twice
        """
        return [self._insert(spec) for spec in specs]

    def fate(self, spec: NodeSpec) -> Fate:
        """What `extend` would say, without inserting."""
        return self._judge(spec)[0]

    def _judge(self, spec: NodeSpec) -> tuple[Fate, int, Node | None]:
        """Fate, position, and the live parent (None for a child of the root)."""
        parent = self.nodes.get(spec.parent)
        if parent is not None:
            return Fate.LIVE, parent.position + 1, parent
        parent_position = -spec.parent - 1 if spec.parent < 0 else self._aliases.get(spec.parent, -2)
        position = parent_position + 1
        if parent_position >= self.length or position < 0:
            return Fate.DEAD, -1, None
        if position == self.length:
            return Fate.LIVE, position, None
        return (Fate.COMMITTED if self.committed[position] == spec.token else Fate.DEAD), position, None

    def _insert(self, spec: NodeSpec) -> Verdict:
        if spec.id in self.nodes:
            raise ValueError(f"node id {spec.id} is already in use")
        fate, position, parent = self._judge(spec)
        if fate is not Fate.LIVE:
            if fate is Fate.COMMITTED:
                self._alias(spec.id, position)
            return Verdict(fate, position, None)
        node = Node(spec.id, spec.token, position, parent)
        self.nodes[spec.id] = node
        (self.roots if parent is None else parent.children).append(node)
        return Verdict(Fate.LIVE, position, node)

    def commit(self, token: int) -> Commit:
        """Append a committed token; candidates that do not descend from it die."""
        position = self.length
        hit = next((node for node in self.roots if node.token == token), None)
        dead = tuple(node for root in self.roots if root is not hit for node in root.subtree())
        for node in dead:
            del self.nodes[node.id]
        self.roots = []
        if hit is not None:
            del self.nodes[hit.id]
            self._alias(hit.id, position)
            self.roots = hit.children
            for child in self.roots:
                child.parent = None
        self.committed.append(token)
        return Commit(position, token, hit, dead)

    def rewind(self, position: int) -> tuple[Node, ...]:
        """Keep the first `position` committed tokens and no candidate; returns the candidates that died.

        :raises ValueError: `position` is outside 0 .. length
        """
        if not 0 <= position <= self.length:
            raise ValueError(f"cannot rewind to {position}: {self.length} tokens are committed")
        dead = tuple(self.nodes.values())
        del self.committed[position:]
        self.nodes, self.roots = {}, []
        self._aliases, self._alias_order = {}, deque()
        return dead

    def live(self) -> list[Node]:
        return list(self.nodes.values())

    def is_live(self, node: Node) -> bool:
        return self.nodes.get(node.id) is node

    def child_of_root(self, token: int) -> Node | None:
        return next((node for node in self.roots if node.token == token), None)

    def mask(self, rows: Sequence[Node]) -> np.ndarray[Any, np.dtype[Any]]:
        """Ancestor-or-self relation among `rows`: bool `[n, n]`, entry (i, j) true when row i sees row j."""
        index = {id(node): j for j, node in enumerate(rows)}
        mask = np.zeros((len(rows), len(rows)), dtype=bool)
        for i, node in enumerate(rows):
            for ancestor in node.path():
                j = index.get(id(ancestor))
                if j is not None:
                    mask[i, j] = True
        return mask

    def _alias(self, node_id: int, position: int) -> None:
        if node_id not in self._aliases:
            self._alias_order.append(node_id)
        self._aliases[node_id] = position
        while len(self._alias_order) > ALIAS_WINDOW:
            self._aliases.pop(self._alias_order.popleft(), None)
