"""A causal language model that can be run on the nodes of a token tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bloombee_spec.draft.tree_cache import TreeCache


class TreeModel:
    """Any transformers causal LM whose attention honours a 4-D mask and explicit positions (Llama, Qwen, Mistral,
    Falcon, ...).

    This is checked, not assumed: on construction a small tree is run and compared with the same tokens as a plain
    sequence. One object may serve several threads; each stream brings its own cache.

    :param model: a transformers `...ForCausalLM`, in evaluation mode from here on
    :raises ValueError: the model keeps recurrent state, or ignores masks or positions, so that it cannot be run on
        trees
    """

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.device = model.get_input_embeddings().weight.device
        self.dtype: torch.dtype = model.dtype
        self.embeddings = int(model.get_input_embeddings().weight.shape[0])  # ids from here on cannot be read
        self.outputs = int(_text_config(model.config).vocab_size)
        self.context = _context_length(model.config)  # positions from here on cannot be run
        self._mask_style = self._probe_mask_style()

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def forward(
        self, cache: TreeCache, tokens: Sequence[int], positions: Sequence[int], visible: torch.Tensor
    ) -> torch.Tensor:
        """Run new nodes and keep their KV rows.

        :param positions: of each token in its own sequence
        :param visible: bool `[nodes, cache.rows + nodes]`, the rows that each node attends to, itself included
        :returns: fp32 logits `[nodes, outputs]`
        """
        return self._run(cache, tokens, positions, visible, self._mask_style)

    def _run(
        self,
        cache: TreeCache,
        tokens: Sequence[int],
        positions: Sequence[int],
        visible: torch.Tensor,
        style: tuple[float, float],
    ) -> torch.Tensor:
        mask = torch.full(visible.shape, style[1], dtype=self.dtype).masked_fill(visible, style[0])
        output = self.model(
            input_ids=torch.tensor([tokens], device=self.device),
            attention_mask=mask[None, None].to(self.device),
            position_ids=torch.tensor([positions], device=self.device),
            past_key_values=cache,
            use_cache=True,
        )
        cache.advance(len(tokens))
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def _probe_mask_style(self) -> tuple[float, float]:
        """Mask values for "attend" and "do not attend". Some families add a 4-D mask, others take 1 and 0."""
        errors: list[str] = []
        for style in ((0.0, torch.finfo(self.dtype).min), (1.0, 0.0)):
            try:
                self._compare_tree_with_sequence(style)
                return style
            except Exception as error:  # whatever a model's code raises at a mask that it does not support
                errors.append(f"{type(error).__name__}: {error}")
        raise ValueError(
            f"{type(self.model).__name__} cannot draft trees: it would have to honour 4-D attention masks, "
            'position_ids and a row-wise KV cache (attn_implementation "sdpa" or "eager", no recurrent layers). '
            f"Tried: {'; then '.join(errors)}"
        )

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _compare_tree_with_sequence(self, style: tuple[float, float]) -> None:
        """A prefix of two, then in one go a wrong branch in between the nodes of the right one."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randperm(min(self.outputs, self.embeddings), generator=generator)[:6].tolist()
        plain = self.model(input_ids=torch.tensor([ids[:4]], device=self.device), use_cache=False).logits[0].float()
        cache = TreeCache()
        prefix = self._run(cache, ids[:2], [0, 1], torch.ones(2, 2, dtype=torch.bool).tril(), style)
        if cache.rows != 2 or len(cache) == 0:
            raise ValueError("the KV cache was not used")
        nodes = [ids[4], ids[2], ids[5], ids[3]]
        ancestry = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]], dtype=torch.bool)
        visible = torch.cat([torch.ones(4, 2, dtype=torch.bool), ancestry], dim=1)
        tree = self._run(cache, nodes, [2, 2, 3, 3], visible, style)
        error = (torch.cat([prefix, tree[[1, 3]]]) - plain).abs().max() / plain.std()
        allowed = 1e-3 if self.dtype == torch.float32 else 0.2
        if not error < allowed:
            raise ValueError(f"logits on a tree differ from those on a sequence by {error:.2g} standard deviations")


def _context_length(config: Any) -> int:
    """Longest context that is drafted in: within a sliding window, so that a window never has to be masked."""
    text = _text_config(config)
    lengths = [getattr(text, "max_position_embeddings", None)]
    if getattr(text, "use_sliding_window", True):
        lengths.append(getattr(text, "sliding_window", None))
    return min((int(length) for length in lengths if length), default=1 << 30)


def _text_config(config: Any) -> Any:
    return getattr(config, "text_config", config)
