"""The distribution of a language model along one stream."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from bloombee_spec.draft.base import never
from bloombee_spec.draft.causal_lm import TreeModel
from bloombee_spec.draft.lm_stream import LMStream
from bloombee_spec.draft.sampled import Sampler, Shape


class ModelSampler(Sampler):
    """
    :param usable: token ids below this are proposed, the others of the target's `vocab` never
    """

    def __init__(self, model: TreeModel, usable: int, vocab: int):
        self._model, self._usable, self._vocab = model, min(usable, vocab), vocab
        self._stream: LMStream[torch.Tensor] = LMStream(model, lambda logits, _: [row.clone() for row in logits])

    def start(self, prompt: Sequence[int]) -> None:
        self._stream.start([int(token) for token in prompt])

    def observe(self, tokens: Sequence[int]) -> None:
        self._stream.observe([int(token) for token in tokens])

    def distribution(self, path: Sequence[int], shape: Shape) -> torch.Tensor | None:
        stream, model = self._stream, self._model
        unread = (*stream.tokens[stream.computed :], *path)
        if len(stream.tokens) + len(path) > model.context or not all(0 <= t < model.embeddings for t in unread):
            return None
        stream.catch_up(never)
        node, missing = stream.root, []
        for token in path:
            node = node.child(int(token))
            if node.row < 0:
                missing.append(node)
        if missing:
            stream.run(missing)
        assert node.guesses is not None
        logits = torch.full((self._vocab,), -math.inf)
        logits[: self._usable] = node.guesses[: self._usable].float().cpu()
        return shape(logits, (*stream.tokens, *path))
