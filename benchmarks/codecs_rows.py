"""Real activations:

what SmolLM2-135M would send after some of its blocks, while it reads prompts and decodes greedily.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.prompts import Prompt
from benchmarks.smollm2 import ensure_smollm2

BOUNDARIES = (8, 16, 23)  # blocks after which a swarm of four servers (8, 8, 7, 7 blocks) hands over
Transform = Callable[[torch.Tensor, int], "torch.Tensor | None"]


@dataclass(frozen=True, slots=True)
class Recording:
    """The rows of one prompt, by boundary.

    :param prompt: `[tokens, hidden]`
    :param steps: `[steps, siblings, hidden]`: of each step's most likely candidates, best first; all of a step have
        the same parent, which is candidate 0 of the step before
    """

    kind: str
    prompt: dict[int, torch.Tensor]
    steps: dict[int, torch.Tensor]

    def parents(self, boundary: int) -> torch.Tensor:
        """The parent row of each step, `[steps, hidden]`."""
        return torch.cat([self.prompt[boundary][-1:], self.steps[boundary][:-1, 0]])


def load_model(dtype: torch.dtype) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = ensure_smollm2()
    model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=dtype)
    return model.eval(), AutoTokenizer.from_pretrained(path)


@contextmanager
def tap(model: Any, transform: Transform) -> Iterator[None]:
    """While open, `transform(rows [batch, tokens, hidden], boundary)` sees, and may replace, what crosses."""

    def hook(boundary: int) -> Callable[..., Any]:
        def replace(module: Any, inputs: Any, output: Any) -> Any:
            rows = output[0] if isinstance(output, tuple) else output
            new = transform(rows, boundary)
            if new is None:
                return None
            return (new, *output[1:]) if isinstance(output, tuple) else new

        return replace

    handles = [model.model.layers[b - 1].register_forward_hook(hook(b)) for b in BOUNDARIES]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def record(model: Any, tokenizer: Any, prompts: Sequence[Prompt], steps: int, siblings: int) -> list[Recording]:
    """Decodes each prompt greedily for `steps` tokens and computes, at each step, the `siblings` likeliest tokens."""
    from transformers import DynamicCache

    seen: dict[int, torch.Tensor] = {}

    def look(rows: torch.Tensor, boundary: int) -> None:
        seen[boundary] = rows.detach().clone()

    recordings = []
    with tap(model, look):
        for prompt in prompts:
            ids = torch.tensor([prompt.encode(tokenizer)])
            output = model(ids, use_cache=True, past_key_values=DynamicCache())
            of_prompt = {b: seen[b][0] for b in BOUNDARIES}
            cache = output.past_key_values
            cache.batch_repeat_interleave(siblings)
            per_step: dict[int, list[torch.Tensor]] = {b: [] for b in BOUNDARIES}
            for _ in range(steps):
                candidates = output.logits[0, -1].float().topk(siblings).indices
                output = model(candidates[:, None], use_cache=True, past_key_values=cache)
                for b in BOUNDARIES:
                    per_step[b].append(seen[b][:, 0])
                cache.batch_select_indices(torch.zeros(siblings, dtype=torch.long))
            recordings.append(Recording(prompt.kind, of_prompt, {b: torch.stack(per_step[b]) for b in BOUNDARIES}))
    return recordings


def english_text() -> str:
    """About 110k tokens of English prose on Python, which every installation has: the help topics of `pydoc`."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


@torch.inference_mode()
def rows_of_text(model: Any, tokenizer: Any, windows: int, length: int = 512) -> dict[int, torch.Tensor]:
    """Rows `[windows, length, hidden]` at each boundary while the model reads `english_text`."""
    ids = tokenizer(english_text(), return_tensors="pt").input_ids[0]
    seen: dict[int, list[torch.Tensor]] = {b: [] for b in BOUNDARIES}

    def look(rows: torch.Tensor, boundary: int) -> None:
        seen[boundary].append(rows[0].detach().clone())

    with tap(model, look):
        for start in range(0, windows * length, length):
            model.model(ids[None, start : start + length])
    return {b: torch.stack(rows) for b, rows in seen.items()}
