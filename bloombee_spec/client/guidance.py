"""Classifier-free guidance: the model on a second prompt, in a session of its own, one lap for each token."""

from __future__ import annotations

import time
from typing import Any

import torch
from hivemind.utils.logging import get_logger
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from bloombee_spec.client.connection import STEP_ROWS
from bloombee_spec.config import SpecConfig
from bloombee_spec.hosts.base import Host

logger = get_logger(__name__)


def give_second_prompts(model: Any, processors: list[Any], new_tokens: int) -> None:
    """Guidance processors of transformers' run the model by themselves; on a swarm that needs a session of its own."""
    host = model.__dict__.get("_spec_host")
    if host is None:  # a local model
        return
    for one in processors:
        if isinstance(one, UnbatchedClassifierFreeGuidanceLogitsProcessor) and one.model is model:
            ids = one.unconditional_context["input_ids"]
            longest = (1 if ids is None else ids.shape[1]) + new_tokens
            one.model = SecondPrompt(host, model, model.spec, longest)


def second_prompt(processor: Any) -> SecondPrompt | None:
    """What a processor holds at the servers."""
    model = getattr(processor, "model", None)
    return model if isinstance(model, SecondPrompt) else None


class SecondPrompt:
    """Stands in for the model that transformers' guidance processor calls: first with the second prompt, then with
    each new token. Its KV is in a session of the host, opened at the first call; a broken one is replaced.

    :param max_length: most tokens of the second prompt and the output
    """

    def __init__(self, host: Host, model: Any, config: SpecConfig, max_length: int):
        self._host, self._model, self._config, self._max_length = host, model, config, max_length
        self._tokens: list[int] = []
        self._session: Any = None

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> SecondOutput:
        """
        :param input_ids: `[1, n]`, of which the columns without attention are left out
        :raises ValueError: the mask has a gap, or hides the end
        """
        ids = input_ids[0].tolist()
        if self._tokens:
            ids = ids[-1:]
        else:
            seen = attention_mask[0].tolist()
            if 1 not in seen or 0 in seen[seen.index(1) :]:
                raise ValueError("only left padding is understood in negative_prompt_attention_mask")
            ids = ids[seen.index(1) :]
        self._tokens += ids
        hidden = self._advance(len(ids))
        return SecondOutput(self._host.logits(self._model, hidden[-1:])[None])

    def close(self) -> None:
        """End the session; never raises."""
        if self._session is not None:
            self._host.close_session(self._session)
            self._session = None

    def _advance(self, new: int) -> torch.Tensor:
        """Hidden rows of the last chunk of the `new` last tokens."""
        for attempt in range(self._config.max_retries + 1):
            try:
                if self._session is None:
                    timeout = self._config.stall_timeout
                    self._session = self._host.new_session(self._model, self._max_length, timeout=timeout)
                    new = len(self._tokens)
                return self._step(self._tokens[-new:])
            except Exception as e:
                self.close()
                if attempt == self._config.max_retries:
                    raise
                logger.warning(f"The session of the second prompt broke ({e!r}); it starts again")
                time.sleep(min(0.1 * 2**attempt, 5.0))
        raise AssertionError("unreachable")

    def _step(self, tokens: list[int]) -> torch.Tensor:
        hidden = torch.empty(0)
        with torch.inference_mode():
            for at in range(0, len(tokens), STEP_ROWS):
                rows = self._host.embed(self._model, tokens[at : at + STEP_ROWS])
                hidden = self._session.step(rows[None])[0]
        return hidden


class SecondOutput(dict[str, Any]):
    """What transformers reads of a model's output; the cache is ours."""

    def __init__(self, logits: torch.Tensor):
        super().__init__()
        self.logits = logits  # [1, 1, vocab]
