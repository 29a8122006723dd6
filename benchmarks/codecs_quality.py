"""What a codec at every boundary does to the model:

perplexity of prose, and greedy tokens against those of the raw model.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.codecs_rivals import Candidate
from benchmarks.codecs_rows import Transform, english_text, tap
from benchmarks.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Quality:
    """:param loss: mean negative log-likelihood per token, nats
    :param forced: share of raw greedy tokens that are also the codec's choice after the same text
    :param free: share of tokens before the first difference, when each goes on from its own
    :param same: prompts whose tokens are all the same
    """

    name: str
    loss: float
    forced: float
    free: float
    same: int


def through(candidate: Candidate) -> Transform:
    """Rows as the next stage would get them; a batch is one frame."""

    def transform(rows: torch.Tensor, boundary: int) -> torch.Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        return candidate.decode(candidate.encode(flat), flat.shape, flat.dtype).view(rows.shape)

    return transform


@torch.inference_mode()
def text_loss(model: Any, tokenizer: Any, tokens: int, length: int = 512) -> float:
    """Mean loss on the first `tokens` tokens of `english_text`, in windows of `length`."""
    ids = tokenizer(english_text(), return_tensors="pt").input_ids[0, :tokens]
    total, count = 0.0, 0
    for window in ids.split(length):
        logits = model(window[None]).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
        count += len(window) - 1
    return total / count


class GreedyRun:
    """Greedy continuations of all prompts at once, padded on the left."""

    def __init__(self, model: Any, tokenizer: Any, prompts: Sequence[Prompt], new_tokens: int):
        encoded = [prompt.encode(tokenizer) for prompt in prompts]
        self.model, self.new_tokens = model, new_tokens
        self.width = max(map(len, encoded))
        self.ids = torch.tensor([[0] * (self.width - len(ids)) + ids for ids in encoded])
        self.mask = torch.tensor([[0] * (self.width - len(ids)) + [1] * len(ids) for ids in encoded])

    @torch.inference_mode()
    def free(self) -> torch.Tensor:
        """`[prompts, new_tokens]`; what follows an end-of-text token counts too, so that all have the same length."""
        output = self.model.generate(
            self.ids,
            attention_mask=self.mask,
            max_new_tokens=self.new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return output[:, self.width :]

    @torch.inference_mode()
    def forced(self, tokens: torch.Tensor) -> torch.Tensor:
        """The choice at each position of `tokens`, given the ones before it."""
        choices = []
        for ids, mask, own in zip(self.ids, self.mask, tokens):
            text = torch.cat([ids[mask.bool()], own[:-1]])
            choices.append(self.model(text[None]).logits[0, -self.new_tokens :].argmax(-1))
        return torch.stack(choices)


def measure(model: Any, tokenizer: Any, candidates: Sequence[Candidate], run: GreedyRun, tokens: int) -> list[Quality]:
    """The raw model first, then each candidate."""
    raw = run.free()
    results = [Quality("raw", text_loss(model, tokenizer, tokens), 1.0, 1.0, len(raw))]
    for candidate in candidates:
        start = time.monotonic()
        with tap(model, through(candidate)):
            loss = text_loss(model, tokenizer, tokens)
            agree = run.free() == raw
            forced = float((run.forced(raw) == raw).float().mean())
        prefix = agree.int().cumprod(1).sum(1)
        results.append(
            Quality(candidate.name, loss, forced, float(prefix.float().mean()) / raw.shape[1], int(agree.all(1).sum()))
        )
        print(f"{results[-1]} after {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return results


def quality_table(results: Sequence[Quality]) -> str:
    lines = [
        "| codec | perplexity | against raw | same choice after the same text | tokens before the first difference | "
        "prompts without a difference |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        change = math.expm1(result.loss - results[0].loss) * 100
        lines.append(
            f"| {result.name} | {math.exp(result.loss):.3f} | {change:+.3f} % | {result.forced * 100:.2f} % | "
            f"{result.free * 100:.1f} % | {result.same} |"
        )
    return "\n".join(lines)
