"""One stream's token tree with the KV rows and guesses of a language model, kept across commits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from bloombee_spec.draft.causal_lm import TreeModel
from bloombee_spec.draft.tree_cache import TreeCache

PREFILL_CHUNK = 128  # tokens; bounds the logits and masks of a long prompt, and how long an interruption waits


@dataclass(frozen=True, slots=True)
class Guess:
    """What the model thinks of one next token."""

    token: int
    prob: float


G = TypeVar("G")  # what is kept of the logits after each token


@dataclass(eq=False, slots=True)
class TreeNode(Generic[G]):
    """A token of the tree. `row` is where its KV is, -1 before it was run; `guesses` are for the token after it."""

    token: int
    position: int
    parent: TreeNode[G] | None
    row: int = -1
    guesses: G | None = None
    children: dict[int, TreeNode[G]] = field(default_factory=dict)

    def child(self, token: int) -> TreeNode[G]:
        if token not in self.children:
            self.children[token] = TreeNode(token, self.position + 1, self)
        return self.children[token]

    def computed_below(self) -> Iterator[TreeNode[G]]:
        """Descendants that were run, parents first."""
        for child in self.children.values():
            if child.row >= 0:
                yield child
                yield from child.computed_below()


class LMStream(Generic[G]):
    """Committed tokens and the candidates that were run after them. No token is run twice while it stays possible.

    Invariant: rows `0 .. computed - 1` of the cache are the first `computed` committed tokens, the rows behind them
    belong to descendants of `root`, and there are none of those before every committed token was run.

    :param rank: turns logits `[nodes, outputs]` and the positions of the tokens that they predict into guesses, one
        object per node
    """

    def __init__(self, model: TreeModel, rank: Callable[[torch.Tensor, Sequence[int]], list[G]]) -> None:
        self.model = model
        self.tokens: list[int] = []
        self.computed = 0
        self.root: TreeNode[G] = TreeNode(-1, -1, None)
        self._rank = rank
        self._cache = TreeCache()

    @property
    def tree_rows(self) -> int:
        return self._cache.rows - self.computed

    def start(self, prompt: Sequence[int]) -> None:
        """Replace the committed tokens; what they have in common with the old ones is not run again."""
        common = next((i for i, (old, new) in enumerate(zip(self.tokens, prompt)) if old != new), None)
        if common is None:
            common = min(len(self.tokens), len(prompt))
        if common == len(self.tokens):
            self.observe(prompt[common:])
            return
        self.tokens = list(prompt)
        self.computed = min(self.computed, common)
        self.drop_tree()

    def observe(self, tokens: Sequence[int]) -> None:
        """Commit tokens: rows of candidates that they confirm join the prefix, those they contradict are dropped."""
        if not tokens:
            return
        accepted: list[TreeNode[G]] = []
        node = self.root
        for token in tokens:
            child = node.children.get(token)
            if child is None or child.row < 0:
                break
            accepted.append(child)
            node = child
        self.tokens.extend(tokens)
        survivors: list[TreeNode[G]] = []
        if len(accepted) == len(tokens):
            self.root = node
            self.root.parent = None
            survivors = list(node.computed_below())
        else:
            self.root = TreeNode(self.tokens[-1], len(self.tokens) - 1, None)
        self._cache.keep(self.computed, [node.row for node in (*accepted, *survivors)])
        self.computed += len(accepted)
        for row, node in enumerate(survivors, self.computed):
            node.row = row

    def drop_tree(self, keep_guesses: bool = False) -> None:
        """Forget all candidates and, unless they are to be kept, the guesses at the root."""
        guesses = self.root.guesses if keep_guesses else None
        self.root = TreeNode(self.tokens[-1] if self.tokens else -1, len(self.tokens) - 1, None, guesses=guesses)
        self._cache.keep(self.computed, [])

    def catch_up(self, interrupted: Callable[[], bool]) -> bool:
        """Run the committed tokens that were not run yet; false if interrupted, to be continued at the next call."""
        if self.root.guesses is not None:
            return True
        if self.computed == len(
            self.tokens
        ):  # cropped: the guesses at the root come from its own row, so run it again
            self.computed -= 1
            self._cache.keep(self.computed, [])
        logits = torch.empty(0)
        while self.computed < len(self.tokens):
            if interrupted():
                return False
            chunk = self.tokens[self.computed : self.computed + PREFILL_CHUNK]
            visible = torch.ones(len(chunk), self.computed + len(chunk), dtype=torch.bool).tril(self.computed)
            positions = range(self.computed, self.computed + len(chunk))
            logits = self.model.forward(self._cache, chunk, list(positions), visible)
            self.computed += len(chunk)
        (self.root.guesses,) = self._rank(logits[-1:], [self.computed])
        return True

    def run(self, nodes: Sequence[TreeNode[G]]) -> None:
        """Compute candidates in one pass. Their ancestors were run before, or precede them in `nodes`."""
        first = self._cache.rows
        visible = torch.zeros(len(nodes), first + len(nodes), dtype=torch.bool)
        visible[:, : self.computed] = True
        for i, node in enumerate(nodes):
            node.row = first + i
            ancestor: TreeNode[G] | None = node
            while ancestor is not None and ancestor is not self.root:
                visible[i, ancestor.row] = True
                ancestor = ancestor.parent
        positions = [node.position for node in nodes]
        logits = self.model.forward(self._cache, [node.token for node in nodes], positions, visible)
        for node, guesses in zip(nodes, self._rank(logits, [position + 1 for position in positions])):
            node.guesses = guesses
