"""Which candidates a stream has in flight, how likely each path is, and where the drafter should be asked next."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from bloombee_spec.draft.base import Proposal
from bloombee_spec.tree import Commit, Node, NodeSpec, TokenTree, committed_ref


@dataclass(frozen=True, slots=True)
class Ask:
    """A question to the drafter: at most `room` candidates below `anchor` (None: the root), at most `depth` deep.

    :param path: candidate tokens from the root down to the anchor
    :param length: committed tokens when it was asked
    :param epoch: of the candidates; a miss or a new turn starts another, and the answer is void
    """

    anchor: Node | None
    path: tuple[int, ...]
    room: int
    depth: int
    chance: float
    length: int
    epoch: int


class Trust:
    """How much of what the drafter's probabilities promised came true lately; they are multiplied by it.

    A drafter that is never right is silenced after about a dozen misses, whatever it claims. A silent one is probed:
    once
    in `PROBE_LAPS` laps its best candidate is sent all the same.
    """

    PRIOR, MEMORY, PROBE_LAPS = 0.5, 64.0, 24

    def __init__(self) -> None:
        self._promised = self._kept = self.PRIOR
        self._silent = 0

    @property
    def factor(self) -> float:
        return min(1.0, self._kept / self._promised)

    def record(self, chance: float, came_true: bool) -> None:
        """A child of the root was judged; `chance` as the drafter gave it."""
        fade = 1 - 1 / self.MEMORY
        self._promised = max(self._promised * fade + chance, 1e-3)
        self._kept = self._kept * fade + came_true
        self._silent = 0

    def probe(self) -> bool:
        """Asked once per lap without candidates."""
        self._silent += 1
        return self._silent % self.PROBE_LAPS == 0


@dataclass(eq=False, slots=True)
class _Mark:
    """What is known of a candidate beside its place in the tree."""

    chance: float  # of its path below the current root
    promised: float  # the drafter's own probability, given its parent
    depth: int  # below the root of the time when it was sent
    lap: int  # in which its row travels
    asked: bool = False


class Candidates:
    """Bookkeeping of one stream's candidates; the tree itself says what is alive.

    :param min_chance: candidates whose path is less likely are not sent
    :param vocab_size: proposals outside the target's vocabulary are left out
    """

    PROBE = 4  # candidates that a planned probe sends

    def __init__(self, tree: TokenTree, min_chance: float, vocab_size: int):
        self.tree, self.min_chance, self.vocab_size = tree, min_chance, vocab_size
        self.root_ref = 0  # how a child of the root names its parent
        self.root_lap = 0
        self.epoch = 0
        self.trust = Trust()
        self._probing = 0  # candidates to send regardless of trust
        self._root_asked = False
        self._marks: dict[int, _Mark] = {}
        self._next_id = 0

    def restart(self, root_ref: int, lap: int, probe: bool = False) -> None:
        """A new root without candidates.

        :param probe: send what the drafter proposes next, however little it was right lately
        """
        self.root_ref, self.root_lap = root_ref, lap
        self.epoch += 1
        self._probing = 1 if not self._marks and self.trust.probe() else 0
        if probe:
            self._probing = self.PROBE
        self._root_asked, self._marks = False, {}

    def move(self, commit: Commit) -> int:
        """A candidate became the root; returns its depth when it was sent. Call `judge` before."""
        assert commit.hit is not None
        for node in commit.dead:
            self._marks.pop(node.id, None)
        mark = self._marks.pop(commit.hit.id)
        self.root_ref, self.root_lap, self._root_asked = commit.hit.id, mark.lap, mark.asked
        for other in self._marks.values():
            other.chance = min(1.0, other.chance / max(mark.chance, 1e-9))
        return mark.depth

    def judge(self, token: int) -> tuple[int | None, int] | None:
        """The next token is `token`: what that says about the drafter. Call before the tree commits it.

        :returns: rank among the root's children of the one that is right (None: none is), depth at which they were
            drafted; None when there were none
        """
        hit: int | None = None
        for rank, node in enumerate(self.tree.roots):
            self.trust.record(self._marks[node.id].promised, node.token == token)
            hit = rank if node.token == token else hit
        if not self.tree.roots:
            return None
        return hit, self._marks[self.tree.roots[0].id].depth

    def correct(self, token: int) -> NodeSpec:
        """The committed token as a node of our own, for stages that cannot start it: call before `restart`."""
        return NodeSpec(self._take_id(), self.root_ref, token)

    def next_ask(self, room: int, max_depth: int, deepest: int, layers: int = 1 << 16) -> Ask | None:
        """The most likely place where the drafter was not asked yet; it counts as asked from now on.

        :param deepest: largest position a candidate may have; `layers` most layers of one answer
        """
        heap = [] if self._root_asked else [(-1.0, -1)]
        heap += [(-mark.chance, node_id) for node_id, mark in self._marks.items() if not mark.asked]
        heapq.heapify(heap)
        while room > 0 and heap:
            chance, node_id = heapq.heappop(heap)
            if -chance < self.min_chance:
                return None
            anchor = None if node_id < 0 else self.tree.nodes[node_id]
            if anchor is None:
                self._root_asked = True
            else:
                self._marks[node_id].asked = True
            path = () if anchor is None else tuple([node.token for node in anchor.path()])
            depth = min(layers, max_depth - len(path), deepest - (self.tree.length - 1 + len(path)))
            if depth > 0:
                return Ask(anchor, path, room, depth, -chance, self.tree.length, self.epoch)
        return None

    def place(self, ask: Ask, proposals: Sequence[Proposal], room: int, width: int = 1 << 30) -> list[NodeSpec]:
        """Turn an answer into nodes; what is there already, too unlikely, or void by now is left out.

        :param width: most children of one node
        """
        anchor, chance = ask.anchor, ask.chance
        if ask.epoch != self.epoch:
            return []
        if anchor is not None and not self.tree.is_live(anchor):
            if self.root_ref != anchor.id:
                return []
            anchor, chance = None, 1.0  # it became the root meanwhile
        elif anchor is None and ask.length != self.tree.length:
            return []  # the root moved on along a candidate
        specs: list[NodeSpec] = []
        placed: list[Node | None] = []
        trust = 1.0 if self._probing else self.trust.factor
        room = min(room, self._probing) if self._probing else room
        deepest = ask.length - 1 + len(ask.path) + ask.depth
        for proposal in proposals:
            top = proposal.parent < 0
            parent = anchor if top else placed[proposal.parent] if proposal.parent < len(placed) else None
            known = top or parent is not None
            position = self.tree.length if parent is None else parent.position + 1
            known = known and position <= deepest and 0 <= proposal.token < self.vocab_size
            above = chance if parent is anchor else self._marks[parent.id].chance if parent is not None else 0.0
            if not known or above * proposal.prob * trust < self.min_chance:
                placed.append(None)
                continue
            siblings = self.tree.roots if parent is None else parent.children
            node = next((child for child in siblings if child.token == proposal.token), None)
            if node is None and room > len(specs) and len(siblings) < width:
                node = self._add(parent, proposal.token, above * proposal.prob * trust, proposal.prob, specs)
            if node is not None and proposal.parent >= 0 and parent is not None:
                self._marks[parent.id].asked = True
            placed.append(node)
        return specs

    def depth_of(self, spec: NodeSpec) -> int:
        return self._marks[spec.id].depth

    def _add(self, parent: Node | None, token: int, chance: float, promised: float, specs: list[NodeSpec]) -> Node:
        spec = NodeSpec(self._take_id(), self.root_ref if parent is None else parent.id, token)
        (verdict,) = self.tree.extend((spec,))
        assert verdict.node is not None
        lap = self.root_lap if parent is None else self._marks[parent.id].lap
        self._marks[spec.id] = _Mark(chance, promised, verdict.position - self.tree.length + 1, lap)
        specs.append(spec)
        return verdict.node

    def _take_id(self) -> int:
        node_id, self._next_id = self._next_id, self._next_id + 1
        return node_id


def root_ref_of(length: int) -> int:
    """How the last of `length` committed tokens is named when no node of ours stands for it."""
    return committed_ref(length - 1)
