"""The client's candidates: a real `TokenTree`, and for each candidate what the scripted drafter thinks of it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from bloombee_spec.plan.acceptance import Rates
from bloombee_spec.plan.sim.ring import TRUTH
from bloombee_spec.plan.sim.script import Script
from bloombee_spec.plan.trees import TreeNode
from bloombee_spec.tree import Commit, Node, NodeSpec, TokenTree, committed_ref


@dataclass(slots=True)
class Belief:
    """:param reach: relative chance of being committed; :param right: the whole path is what the target will say
    :param asked: depth at which the drafter listed its children, 0 before; :param children: how many of them are
        candidates
    """

    reach: float
    right: bool
    asked: int = 0
    children: int = 0


@dataclass(frozen=True, slots=True)
class Judged:
    """What a commit says about the drafter.

    :param depth: at which the committed position was drafted, 0 when the drafter was not asked in time
    :param rank: of the committed token in the drafter's list, None when it is not in it
    :param sent: how many of the list were candidates
    """

    commit: Commit
    depth: int
    rank: int | None
    sent: int


class Drafts:
    """Candidates of one stream below the committed tokens.

    :param beliefs: what the drafter thinks of its ranks, `[depth][rank]`, all above 0: it orders the candidates
    """

    def __init__(self, script: Script, beliefs: Rates, prompt: Iterable[int]):
        self.tree = TokenTree(prompt)
        self._script, self._rates = script, beliefs
        self._ids = count()
        self._beliefs: dict[int, Belief] = {}
        self.root = Belief(1.0, True)
        self._root_id = -1

    def belief(self, node: Node | None) -> Belief:
        """Of a live candidate, or of the root (None)."""
        return self.root if node is None else self._beliefs[node.id]

    def new_id(self) -> int:
        return next(self._ids)

    def commit(self, token: int) -> Judged:
        """A committed token came: judge the root's list, move the root, forget the dead."""
        position, root = self.tree.length, self.root
        rank = self._script.rank(position, root.asked) if root.asked else None
        judged = Judged(self.tree.commit(token), root.asked, rank, root.children)
        for node in judged.commit.dead:
            del self._beliefs[node.id]
        hit = judged.commit.hit
        self.root = self._beliefs.pop(hit.id) if hit is not None else Belief(1.0, True)
        self._root_id = hit.id if hit is not None else -1
        return judged

    def layer(self, parents: list[Node | None], width: int) -> list[Node]:
        """The `width` most likely children of `parents`, as new candidates."""
        offers: list[tuple[float, int, int]] = []
        for index, parent in enumerate(parents):
            depth = self._depth(parent)
            self.belief(parent).asked = depth
            reach = self.belief(parent).reach
            row = self._rates[min(depth, len(self._rates)) - 1]
            offers += [(-reach * chance, index, rank) for rank, chance in enumerate(row[:width])]
        best = heapq.nsmallest(width, offers)
        top = -best[0][0]
        return [self._add(parents[index], rank, -negative / top) for negative, index, rank in best]

    def grow(self, shape: list[TreeNode], depth: int, nodes: dict[int, Node]) -> None:
        """Add one layer of a tree of this shape; commits may have moved the root into it or past it meanwhile.

        :param nodes: what was made of the layers above, by index in `shape`; the new ones are added
        """
        for index, planned in enumerate(shape):
            if planned.depth != depth:
                continue
            parent = nodes.get(planned.parent)
            if parent is None and planned.parent >= 0:
                continue
            if parent is not None and parent.id == self._root_id:
                parent = None  # it was committed meanwhile, and is the root now
            elif parent is not None and not self.tree.is_live(parent):
                continue
            self.belief(parent).asked = planned.depth
            nodes[index] = self._add(parent, planned.rank, planned.reach)

    def spec(self, node: Node) -> NodeSpec:
        """The candidate as it is sent; a child of the root names the committed position."""
        parent = node.parent.id if node.parent is not None else committed_ref(node.position - 1)
        return NodeSpec(node.id, parent, node.token)

    def _depth(self, parent: Node | None) -> int:
        root = self.tree.length - 1
        return (parent.position if parent is not None else root) + 1 - root

    def _add(self, parent: Node | None, rank: int, reach: float) -> Node:
        above = self.belief(parent)
        position = (parent.position if parent is not None else self.tree.length - 1) + 1
        right = above.right and self._script.rank(position, above.asked) == rank
        token = TRUTH if right else rank + 1
        identity = self.new_id()
        reference = parent.id if parent is not None else committed_ref(position - 1)
        node = self.tree.extend([NodeSpec(identity, reference, token)])[0].node
        assert node is not None
        above.children = max(above.children, rank + 1)
        self._beliefs[identity] = Belief(reach, right)
        return node
