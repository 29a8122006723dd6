"""One generation as text: prompt to tokens, committed tokens to pieces of text, stop strings, counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bloombee_spec.api.errors import ApiError
from bloombee_spec.api.job import Job, Limits
from bloombee_spec.api.text import Detokenizer, StopStrings
from bloombee_spec.client.model import UnsupportedCall
from bloombee_spec.client.stats import SpecStats

# Encoding may change the settings of a fast tokenizer, which fails while another thread encodes.
_ENCODING = threading.Lock()


@dataclass(frozen=True)
class Piece:
    """New text of one choice; the last piece of a choice says why it ended: `stop` or `length`."""

    choice: int
    text: str
    finish: str | None = None


class Choice:
    """One row: its tokens so far, and how they become text."""

    def __init__(self, tokenizer: Any, stops: tuple[str, ...], eos: tuple[int, ...], max_tokens: int):
        self.ids: list[int] = []
        self.finish: str | None = None
        self._words = Detokenizer(
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        )
        self._stops = StopStrings(stops)
        self._eos, self._max_tokens = eos, max_tokens

    @property
    def stopped_early(self) -> bool:
        """Whether it ended for a reason that only this side knows."""
        return self._stops.stopped

    def add(self, tokens: list[int]) -> str:
        """One token at a time, so that the count at a stop string does not depend on how many came together."""
        text = ""
        for token in tokens:
            if self.finish is not None:
                break
            self.ids.append(token)
            if token not in self._eos:
                text += self._stops.add(self._words.add([token]))
            if self._stops.stopped or token in self._eos:
                self.finish = "stop"
            elif len(self.ids) >= self._max_tokens:
                self.finish = "length"
        if self.finish is not None and not self._stops.stopped:
            text += self._stops.add(self._words.finish())
            if self._stops.stopped:
                self.finish = "stop"
            text += self._stops.finish()
        return text


class Generation:
    """Iterate for pieces; `close` ends it early, from the iterating thread. Nothing is sent before the first `next`.

    :param model: has `stream_rows`
    :raises ApiError: the prompt cannot be used, or does not fit
    """

    def __init__(self, model: Any, tokenizer: Any, job: Job, limits: Limits):
        self.prompt = tuple(_prompt_tokens(tokenizer, job, model.config.vocab_size))
        room = limits.max_length - len(self.prompt)
        max_tokens = job.max_tokens if job.max_tokens is not None else min(limits.default_tokens, max(room, 1))
        if max_tokens > room:
            raise ApiError(
                f"the prompt has {len(self.prompt)} tokens and {max_tokens} are asked for, "
                f"but there is room for {limits.max_length} in all",
                param="max_tokens",
                code="context_length_exceeded",
            )
        eos = _ids(model.generation_config.eos_token_id)
        self.choices = [Choice(tokenizer, job.stop, eos, max_tokens) for _ in range(job.n)]
        self.stats: SpecStats | None = None  # when it has ended
        self.seconds = 0.0  # from the first token to the last
        inputs = torch.tensor([self.prompt] * job.n)
        mask = torch.ones_like(inputs)
        try:
            self._rows = model.stream_rows(inputs, attention_mask=mask, max_new_tokens=max_tokens, **job.options())
        except UnsupportedCall as e:
            raise ApiError(str(e), code="unsupported") from e
        except ValueError as e:
            raise ApiError(str(e)) from e

    @property
    def tokens(self) -> int:
        """Generated tokens of all choices."""
        return sum(len(choice.ids) for choice in self.choices)

    @property
    def laps(self) -> int:
        """Round trips so far; 0 where the host decodes."""
        laps: int = self._rows.laps
        return laps

    def __iter__(self) -> Iterator[Piece]:
        started = None
        try:
            for row, tokens in self._rows:
                started = started or time.perf_counter()
                choice = self.choices[row]
                if choice.finish is not None:
                    continue
                text = choice.add(tokens)
                self.seconds = time.perf_counter() - started
                self.stats = self._rows.stats
                yield Piece(row, text, choice.finish)
                if choice.stopped_early and len(self.choices) == 1:
                    return
                if choice.stopped_early:
                    self._rows.stop(row)
        finally:
            self.close()

    def close(self) -> None:
        self._rows.close()
        self.stats = self._rows.stats


def _prompt_tokens(tokenizer: Any, job: Job, vocab_size: int) -> list[int]:
    if job.tokens is not None:
        wrong = [token for token in job.tokens if not 0 <= token < vocab_size]
        if wrong:
            raise ApiError(f"token {wrong[0]} is outside the vocabulary of {vocab_size}", param="prompt")
        tokens = list(job.tokens)
    elif job.messages is not None:
        tokens = _encode(tokenizer, _chat_text(tokenizer, job), "messages", add_special_tokens=False)
    else:
        tokens = _encode(tokenizer, job.text or "", "prompt")
    if not tokens:
        raise ApiError("the prompt is empty", param="prompt" if job.messages is None else "messages")
    return tokens


def _encode(tokenizer: Any, text: str, param: str, **options: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ApiError(f"{param} contains half of a surrogate pair at character {e.start}", param=param) from None
    with _ENCODING:
        tokens: list[int] = tokenizer(text, **options)["input_ids"]
        return tokens


def _chat_text(tokenizer: Any, job: Job) -> str:
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        raise ApiError("this model's tokenizer has no chat template; use /v1/completions", param="messages")
    try:
        return str(tokenizer.apply_chat_template(list(job.messages or ()), add_generation_prompt=True, tokenize=False))
    except TemplateError as e:  # such as "roles must alternate"
        raise ApiError(f"the model's chat template refuses these messages: {e}", param="messages") from e


def _ids(value: Any) -> tuple[int, ...]:
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)
