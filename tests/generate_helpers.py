"""What tests of `generate` share: a small local model, processors of a caller's own, a tokenizer, a call without a
swarm."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerFast, StoppingCriteria

from bloombee_spec.choose import make_chooser
from bloombee_spec.client.call import Call, read_call
from bloombee_spec.client.output import OutputRows


class Banned(LogitsProcessor):
    """Forbids the last token's neighbours; a function of the prefix."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row, last in enumerate(input_ids[:, -1].tolist()):
            scores[row, max(0, last - 20) : last + 20] = -float("inf")
        return scores


class PerRow(LogitsProcessor):
    """Another bias for each row of the batch."""

    def __init__(self, biases: torch.Tensor):
        self.biases = biases  # [batch, vocab]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + self.biases


class Counting(LogitsProcessor):
    """Keeps state: bans another range at each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        start = 17 * self.calls % (scores.shape[-1] - 60)
        scores[:, start : start + 60] = -float("inf")
        self.calls += 1
        return scores


class Seen(StoppingCriteria):
    """Ends a row once it has generated a token of a set; remembers every call."""

    def __init__(self, width: int, tokens: set[int]):
        self.width, self.tokens, self.calls = width, tokens, []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.calls.append(input_ids.tolist())
        return torch.tensor([bool(self.tokens & set(row[self.width :])) for row in input_ids.tolist()])


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def allow_some(batch_id: int, sent: torch.Tensor) -> list[int]:
    """`prefix_allowed_tokens_fn`: depends on the row and on the prefix."""
    return [token for token in range(200) if (token + int(sent[-1]) + batch_id) % 3 == 0]


def word_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Token i is the word `wi`, but for the last one, a word that transformers' stop strings need."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {f"w{i}": i for i in range(vocab - 1)} | {"abcdef": vocab - 1}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", pad_token="w1", eos_token="w2")


def local_generate(model: Any, input_ids: torch.Tensor, seed: int | None = None, **kwargs: Any) -> tuple[Any, Call]:
    """`generate` with the plugin's reading of the call, its rules and its output, around a local model. Rows run ahead
    of each other at random."""
    call = read_call(model, input_ids, kwargs, seed)
    vocab, output, rng = model.config.vocab_size, OutputRows(call), random.Random(0)
    rows = [list(row) for row in call.rows]
    choosers = call.rules or [make_chooser(call.sampling, i, vocab) for i in range(len(rows))]
    limits = [len(row) + call.new_tokens for row in rows]
    while any(len(row) < limit for row, limit in zip(rows, limits)):
        lane = rng.choice([i for i, row in enumerate(rows) if len(row) < limits[i]])
        new = []
        while len(rows[lane]) < limits[lane] and len(new) < rng.randint(1, 4):
            with torch.no_grad():
                logits = model(torch.tensor([rows[lane]])).logits[0, -1].float()
            new.append(choosers[lane](logits, rows[lane]))
            rows[lane].append(new[-1])
            if new[-1] in call.eos:
                limits[lane] = len(rows[lane])
        for stopped, kept in output.append(lane, new):
            limits[stopped] = len(call.rows[stopped]) + kept
            del rows[stopped][limits[stopped] :]
    return output.result(output.finish()), call
