"""The rules of the protocol, each with an edit of the real code that removes it: the ring simulation must notice every one."""

from __future__ import annotations

import inspect
import sys
import textwrap
from dataclasses import dataclass, field
from typing import Any

import pytest

from bloombee_spec.client.stream import Stream
from bloombee_spec.kv.arena import Arena
from bloombee_spec.lane import Lane
from bloombee_spec.lane_books import LaneBooks
from bloombee_spec.server.outgoing import Outgoing
from bloombee_spec.server.stage import Stage
from bloombee_spec.tree import TokenTree
from bloombee_spec.verify import Verifier


@dataclass(frozen=True)
class Mutant:
    """:param old: a piece of the source of `owner.method`, replaced by `new`
    :param shape: fields of the ring and `game` of the games in which it shows soonest
    :param laps: it costs nothing but time, so the exact times of commits must show it
    """

    rule: str
    owner: type[Any]
    method: str
    old: str
    new: str
    shape: dict[str, Any] = field(default_factory=dict)
    game: dict[str, Any] = field(default_factory=dict)
    laps: bool = False

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        found = inspect.getattr_static(self.owner, self.method)
        function = found.fget if isinstance(found, property) else getattr(found, "__wrapped__", found)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, (
            f"{self.owner.__name__}.{self.method} has changed: {self.old!r} is not there once"
        )
        lines = source.replace(self.old, self.new).split("\n")
        body = "\n".join(lines[next(i for i, line in enumerate(lines) if line.startswith("def ")) :])
        scope: dict[str, Any] = {}
        exec("from __future__ import annotations\n" + body, sys.modules[function.__module__].__dict__, scope)
        patched = scope[self.method]
        patch.setattr(self.owner, self.method, property(patched) if isinstance(found, property) else patched)


RUN = {"ends": ("run",)}
STOP = {"ends": ("stop",), "turns": 3}
CREDITS = {"arena": 2}
BREAK = {"ends": ("break",), "turns": 3, "drafting": "instant"}

# Two rules are not here because no honest play depends on them: a prefix that became stale while it waited, and the verifier's
# own look at the limit (no row arrives behind it). They are kept against peers that do not play by the rules.
MUTANTS = [
    # ---- rule 1: order, ancestors, positions
    Mutant("rows leave in order of arrival", Lane, "_insert", "self._queue.append(row)", "self._queue.appendleft(row)"),
    Mutant("a row sees itself and its ancestors", Lane, "_place", "row.node.path()]", "row.node.path()[-1:]]"),
    Mutant("a row sees no other branch", Lane, "_place", "mask[i, np.asarray(path, dtype=np.int64) - batch.begin] = True", "mask[i, : size - batch.begin] = bool(path)"),
    Mutant("a row sees the whole committed prefix", Lane, "_place", "else length for row", "else length - 1 for row"),
    Mutant("a prefix row sees nothing behind it", Lane, "_place", "row.position + 1 if row.node is None", "length if row.node is None"),
    Mutant("a node's position is its parent's plus one", TokenTree, "_judge", "return Fate.LIVE, parent.position + 1, parent", "return Fate.LIVE, parent.position + 2, parent"),
    # ---- rule 2: epochs
    Mutant("commits of an older epoch are ignored by stages", Lane, "accept_commit", "if frame.epoch < self.epoch:", "if False:", game=STOP),
    Mutant("commits of an older epoch are ignored by the client", Stream, "commit", "frame.epoch < self.epoch or self.finished", "self.finished", game=STOP),
    Mutant("candidates of an older epoch are dropped", Lane, "_admit", "elif item.epoch < self.epoch:", "elif False:", game=STOP),
    Mutant("rows of an older epoch are dead", Lane, "is_live", "row.epoch == self.epoch and row.position < self.tree.length", "row.position < self.tree.length", shape={"blocks": (3, 3), "arena": 1}, game={"ends": ("interrupt",), "turns": 5, "patience": 8}),
    Mutant("a verifier forgets the rows of an older epoch", Verifier, "step", "if self._epoch != epoch:", "if False:", game=STOP),
    Mutant("a verifier waits for the epoch's rule", Verifier, "step", "and lane.rule_epoch == epoch", "", shape={"blocks": (1, 1, 1), "verify": True}, game={"ends": ("run",), "turns": 4, "sampled": 0.5}),
    Mutant("a verifier waits for the whole prefix", Verifier, "step", "and lane.prefix_complete", "", shape={"chunk": 1}),
    Mutant("a rewind waits for the commits that it keeps", Lane, "accept_rewind", "elif frame.position > self.tree.length:", "elif False:", game=STOP),
    Mutant("a prefix waits for the commits that it builds upon", Lane, "_admit", "item.frame.epoch > self.epoch and item.frame.start > self.tree.length", "False", shape={"blocks": (1, 1, 1), "verify": True}, game={"ends": ("run",), "turns": 4}),
    Mutant("a new epoch starts from computed rows only", Lane, "_enter_epoch", "self.scheduled = self.filled", "self.scheduled = max(self.tree.length - 1, 0)", game={"ends": ("interrupt",)}),
    Mutant("a rewind forgets what is behind it", Lane, "_truncate", "self.filled = min(self.filled, position)", "pass"),
    # ---- rule 3: the client decides what was emitted
    Mutant("the client counts on computed rows only", Stream, "begin", "min(same, self.held, len(tokens) - 1)", "min(same, max(len(known) - 1, 0), len(tokens) - 1)", game={"ends": ("interrupt",)}),
    Mutant("an edited history is sent again from the edit", Stream, "begin", "min(same, self.held, len(tokens) - 1)", "min(self.held, len(tokens) - 1)"),
    Mutant("a stop token ends the stream at the client", Stream, "commit", "or token in self.request.stop_tokens", "", game=RUN),
    Mutant("a stop token ends the stream at the verifier", Lane, "stopped", "and self.tree.committed[-1] in self.stop_tokens", "and False", game=RUN),
    # ---- rule 4: every frame is answered, credits
    Mutant("dead frames are answered too", Outgoing, "emit", "if nodes or prefix is None or batch.seq > prefix.seq", "if nodes"),
    Mutant("dropped rows are counted", LaneBooks, "finish", "self._drop(len(survivors) - len(live))", "pass", shape={"arena": 8, "blocks": (3, 3, 3), "max_rows": 8}, game={"hit": 0.5}),
    Mutant("no more candidates than credits", Stream, "room", "self.credits", "self.credits * 2", shape=CREDITS, game=RUN),
    Mutant("candidates wait for a free column", Lane, "_insert", "if self.arena.free == 0 and self.tree.fate(spec) is Fate.LIVE:", "if False:", shape=CREDITS),
    Mutant("two arenas may wait for late commits", Lane, "accept_nodes", "> 2 * self.arena.size + 2", "> self.arena.size", shape=CREDITS),
    Mutant("a stage that only moves columns wakes those who wait", Lane, "has_work", "or (bool(self._waiting) and bool(self._moves))", "", shape={"arena": 1}),
    # ---- columns
    Mutant("a column is free only after its move", Lane, "_commit", "self._moves.append((row.column, target))", "self._moves.append((row.column, target)); self.arena.give(row.column); self.arena._used.add(row.column)", shape=CREDITS),
    Mutant("moves are carried out", Stage, "_run", "move_columns(buffer, item.moves)", "pass"),
    Mutant("a computed row is moved", Lane, "_commit", "if row.started:", "if False:"),
    Mutant("columns of moved rows are given back", LaneBooks, "take_moves", "self.arena.give(source)", "pass", shape=CREDITS),
    Mutant("columns of dead rows are given back", Lane, "_commit", "self.arena.give(self._rows.pop(node.id).column)", "self._rows.pop(node.id)"),
    Mutant("one column, one row", Arena, "take", "column = -heapq.heappop(self._free)", "column = -self._free[0]"),
    # ---- dead and committed nodes
    Mutant("candidates of other roots die", TokenTree, "commit", "if root is not hit", "if False"),
    Mutant("the right candidate becomes the root", TokenTree, "commit", "if node.token == token), None)", "), None)"),
    Mutant("ids of committed nodes can be named", TokenTree, "_insert", "self._alias(spec.id, position)", "pass"),
    Mutant("ids of committed candidates can be named", TokenTree, "commit", "self._alias(hit.id, position)", "pass"),
    Mutant("rows that died in a forward are not sent on", LaneBooks, "finish", "[row for row in survivors if self.is_live(row)]", "list(survivors)", shape={"blocks": (3, 3)}, game={"ends": ("interrupt", "stop"), "turns": 3}),
    Mutant("rows that died between blocks leave the batch whole", Stage, "_prune", "self.family.select(shared, index)", "shared", shape={"blocks": (3, 3), "max_rows": 8, "arena": 8}, game={"hit": 0.5}),
    Mutant("duplicates are known by the name of their twin", Lane, "forwarded_spec", "self._renamed.get(row.parent, row.parent)", "row.parent", shape={"embed": True, "blocks": (1, 1, 1)}, game={"ends": ("run",), "hit": 0.9}),
    Mutant("a duplicate of a canonical row is not computed again", Lane, "_insert", "if verdict.position == self.scheduled:", "if True:", shape={"embed": True, "blocks": (1, 1, 1)}, game={"ends": ("run",), "hit": 0.9}),
    Mutant("children of commits that are on their way wait", Lane, "_insert", "-spec.parent > self.tree.length", "False", laps=True),
    # ---- the root
    Mutant("the first stage starts the row after a miss", Lane, "_commit", "elif self.inject", "elif False", shape={"embed": True}),
    Mutant("the client starts the row after a miss", Stream, "commit", "[] if self.finished else specs", "[]", shape={"embed": False}),
    Mutant("the next root is the hit's own row", Verifier, "_commit_next", "self._waiting.pop(commit.hit.id, None)", "self._waiting.pop(commit.hit.id, self._root)"),
    Mutant("results wait for the outgoing streams", Outgoing, "_send", "self._unsent.append((encoded, broadcast))", "pass"),
    Mutant("a text waits for the rows of an earlier one", Lane, "_admit", "item.frame.start > self.filled", "False", game=BREAK),
    Mutant("what an earlier text still computes is not purged", Lane, "accept_prefix", "if self._newest_epoch:", "if True:", game=BREAK),
    Mutant("a text that waited is looked at again", Lane, "finish", "self._admit()", "pass", game=BREAK),
    Mutant("rows that are yet to be moved are moved for the next session", Lane, "resumed", "lane._moves = [", "lane._moves = [] and [", shape={"arena": 8}, game={**BREAK, "hit": 0.9}),
    Mutant("only computed rows are gone on with", Lane, "resumed", "length = min(length, old.filled)", "length = min(length, old.tree.length)", game=BREAK),
    Mutant("the log keeps the rows of candidates that are committed", Lane, "_commit", "self.log.put(commit.position, row.output[None])", "pass", game={**BREAK, "hit": 0.9}),
]  # fmt: skip
