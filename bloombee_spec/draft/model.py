"""A small causal language model as a drafter: grows the likeliest tree, one batched layer of it at a time.

Best-first growth by cumulative log-probability with a decay per level follows SpecExec (Svirschevski et al., NeurIPS
2024).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from bloombee_spec.draft.base import Drafter, Proposal, never
from bloombee_spec.draft.causal_lm import TreeModel
from bloombee_spec.draft.coupling import NoiseSource
from bloombee_spec.draft.lm_stream import Guess, LMStream, TreeNode
from bloombee_spec.draft.model_sampler import ModelSampler
from bloombee_spec.draft.sampled import Sampler
from bloombee_spec.draft.vocabulary import check_same_vocabulary


@dataclass(frozen=True)
class ModelDraftConfig:
    """How a model drafter grows its tree.

    :param siblings: proposals below one parent, at most
    :param batch: nodes that are run at once, at most
    :param decay: each level counts as this factor less likely, which prefers width a little where depth is uncertain
    :param min_prob: chains of proposals that are less likely than this are not proposed
    :param sharpness: with shared noise, proposal i is expected to win with a chance proportional to `(q_i / E_i) **
        sharpness`
    :param max_rows: candidates whose KV is kept between calls, at most
    """

    siblings: int = 8
    batch: int = 16
    decay: float = 0.95
    min_prob: float = 1e-3
    sharpness: float = 1.0
    max_rows: int = 512

    def __post_init__(self) -> None:
        if self.siblings < 1 or self.batch < 1 or self.max_rows < 0:
            raise ValueError(f"siblings and batch must be at least 1 and max_rows at least 0, got {self}")
        if not 0 < self.decay <= 1 or not 0 < self.min_prob < 1 or self.sharpness <= 0:
            raise ValueError(f"need 0 < decay <= 1, 0 < min_prob < 1 and sharpness > 0, got {self}")


@dataclass(eq=False, slots=True)
class _Candidate:
    """A proposal in the making. `cost` is minus its cumulative log-probability, decay included."""

    cost: float
    age: int
    above: _Candidate | None
    node: TreeNode[tuple[Guess, ...]]
    prob: float
    depth: int
    chain_prob: float
    expanded: bool = False

    def order(self) -> tuple[float, int]:
        return self.cost, self.age


class ModelDrafter(Drafter):
    """Drafts with any transformers causal LM that has the target's vocabulary.

    :param model: the model, the directory or hub name to load it from, or a `TreeModel` that other drafters use too
    :param vocab_size: rows of the target's LM head, by default the drafter's; ids beyond it are never proposed
    :param tokenizer: the target's; compared with `draft_tokenizer`, which is loaded with the model if that is given by
        name
    :raises ValueError: the vocabularies differ, or the model cannot be run on trees
    """

    def __init__(
        self,
        model: Any,
        *,
        vocab_size: int | None = None,
        tokenizer: Any | None = None,
        draft_tokenizer: Any | None = None,
        config: ModelDraftConfig | None = None,
    ) -> None:
        if isinstance(model, (str, PathLike)):
            model, draft_tokenizer = _load(model, tokenizer, draft_tokenizer)
        self.model = model if isinstance(model, TreeModel) else TreeModel(model)
        self.config = config or ModelDraftConfig()
        self.name = f"model({type(self.model.model).__name__})"
        rows = min(self.model.outputs, self.model.embeddings)
        self._usable = check_same_vocabulary(tokenizer, draft_tokenizer, vocab_size or rows, rows)
        self._noise: NoiseSource | None = None
        self._temperature = 0.0
        self._stream: LMStream[tuple[Guess, ...]] = LMStream(self.model, self._rank)

    def fork(self) -> ModelDrafter:
        """A drafter for another stream on the same weights; only the KV cache is its own."""
        twin = copy(self)
        twin._stream = LMStream(self.model, twin._rank)
        return twin

    def sampler(self, vocab_size: int) -> Sampler:
        """For rules that need drafts drawn from a known distribution."""
        return ModelSampler(self.model, self._usable, vocab_size)

    def couple(self, noise: NoiseSource | None, temperature: float) -> None:
        """Rank proposals as the target ranks tokens: the smallest `E / q` first.

        :param noise: position of a token in the sequence (the first one is 0) -> the target's Exp(1) noise `[vocab]`
            for it
        :param temperature: the target's; 0 for greedy, where there is no noise
        """
        if temperature < 0 or (noise is not None and temperature == 0):
            raise ValueError(f"temperature must be positive with noise and not negative without, got {temperature}")
        self._noise, self._temperature = noise, temperature
        self._stream.drop_tree()

    def start(self, prompt: Sequence[int]) -> None:
        self._stream.start([int(token) for token in prompt])

    def observe(self, tokens: Sequence[int]) -> None:
        self._stream.observe([int(token) for token in tokens])

    def close(self) -> None:
        self._stream = LMStream(self.model, self._rank)

    def propose(
        self, path: Sequence[int], budget: int, *, max_depth: int = 64, interrupted: Callable[[], bool] = never
    ) -> list[Proposal]:
        stream = self._stream
        if budget < 1 or max_depth < 1 or not stream.tokens or not self._readable(path):
            return []
        if not stream.catch_up(interrupted):
            return []
        if stream.tree_rows > self.config.max_rows:
            stream.drop_tree(keep_guesses=True)
        anchor, missing = stream.root, []
        for token in path:
            anchor = anchor.child(int(token))
            if anchor.row < 0:
                missing.append(anchor)
        if missing:
            if interrupted():
                return []
            stream.run(missing)
        return _as_proposals(self._grow(anchor, budget, max_depth, interrupted))

    def _readable(self, path: Sequence[int]) -> bool:
        """Whether the model can run what is committed and the path: short enough, and all ids known to it."""
        length = len(self._stream.tokens) + len(path)
        unread = self._stream.tokens[self._stream.computed :]
        return length <= self.model.context and all(0 <= token < self.model.embeddings for token in (*unread, *path))

    def _grow(
        self, anchor: TreeNode[tuple[Guess, ...]], budget: int, max_depth: int, interrupted: Callable[[], bool]
    ) -> list[_Candidate]:
        """The likeliest `budget` candidates. All those whose children could be among them are run, best ones first."""
        pool: list[_Candidate] = []
        self._expand(pool, anchor, None)
        while True:
            best = heapq.nsmallest(budget, pool, key=_Candidate.order)
            worst = best[-1].cost if len(best) == budget else math.inf
            promising = [
                candidate
                for candidate in best
                if not candidate.expanded
                and candidate.depth < max_depth
                and candidate.cost - math.log(self.config.decay) < worst
                and candidate.node.position < self.model.context
            ]
            batch = [candidate for candidate in promising if candidate.node.row >= 0]
            if not batch:
                if not promising or interrupted():
                    return best
                batch = promising[: self.config.batch]
                self._stream.run([candidate.node for candidate in batch])
            for candidate in batch:
                self._expand(pool, candidate.node, candidate)

    def _expand(self, pool: list[_Candidate], node: TreeNode[tuple[Guess, ...]], above: _Candidate | None) -> None:
        depth, cost, chain_prob = 0, 0.0, 1.0
        if above is not None:
            above.expanded = True
            depth, cost, chain_prob = above.depth, above.cost, above.chain_prob
        for guess in node.guesses or ():
            if chain_prob * guess.prob < self.config.min_prob:
                break
            further = cost - math.log(guess.prob) - math.log(self.config.decay)
            child = node.child(guess.token)
            pool.append(_Candidate(further, len(pool), above, child, guess.prob, depth + 1, chain_prob * guess.prob))

    def _rank(self, logits: torch.Tensor, positions: Sequence[int]) -> list[tuple[Guess, ...]]:
        scores = logits[:, : self._usable]
        if self._temperature > 0:
            scores = scores / self._temperature
        probs = torch.softmax(scores, dim=-1)
        if self._noise is not None:
            noise = torch.stack([self._noise(position).float() for position in positions]).to(scores.device)
            if noise.shape[1] < scores.shape[1]:
                raise ValueError(
                    f"noise for {noise.shape[1]} token ids, but the drafter proposes up to {scores.shape[1]}"
                )
            noise = noise[:, : self._usable].clamp_min(torch.finfo(torch.float32).tiny)
            races = torch.log_softmax(scores, dim=-1) - noise.log()
            probs = torch.softmax(races * self.config.sharpness, dim=-1)
        top = probs.topk(min(self.config.siblings, probs.shape[1]))
        return [
            tuple(Guess(token, prob) for token, prob in zip(tokens, values))
            for tokens, values in zip(top.indices.tolist(), top.values.tolist())
        ]


def _as_proposals(candidates: Sequence[_Candidate]) -> list[Proposal]:
    """Parents come before their children, since a child costs more."""
    index = {id(candidate): i for i, candidate in enumerate(candidates)}
    return [
        Proposal(-1 if each.above is None else index[id(each.above)], each.node.token, min(each.prob, 1.0))
        for each in candidates
    ]


def _load(source: str | PathLike[str], tokenizer: Any | None, draft_tokenizer: Any | None) -> tuple[Any, Any | None]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source)
    if tokenizer is not None and draft_tokenizer is None:
        draft_tokenizer = AutoTokenizer.from_pretrained(source)
    return model, draft_tokenizer
