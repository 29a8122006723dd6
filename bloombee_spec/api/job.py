"""What one request asks for, checked and in the plugin's terms, whatever it came from: HTTP or the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Message = dict[str, str]
COLDEST = 1e-3  # scores divided by less may overflow, and are greedy decoding but for exact ties


@dataclass(frozen=True)
class Job:
    """Exactly one of `text`, `tokens` and `messages` is the prompt.

    :param messages: `role` and `content` each, for the tokenizer's chat template
    :param max_tokens: most tokens to generate per choice; None: `Limits.default_tokens`, less where the room ends
    :param n: choices, each sampled with noise of its own
    :param temperature: 0, and what is less than `COLDEST`, is greedy
    :param top_k: 0 is off
    :param seed: None draws one
    :param stop: texts that end a choice and are not part of it
    """

    text: str | None = None
    tokens: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    max_tokens: int | None = None
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `stream_rows`, each of them given, so that no default of the checkpoint slips in."""
        sampled = self.temperature >= COLDEST
        options: dict[str, Any] = {"do_sample": sampled}
        if sampled:
            options |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "seed": self.seed}
        else:
            options |= {"temperature": 1.0, "top_p": 1.0}  # unused, and transformers would warn of others
        if self.repetition_penalty is not None:
            options["repetition_penalty"] = self.repetition_penalty
        return options | {
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }


@dataclass(frozen=True)
class Limits:
    """
    :param max_length: most tokens per choice, prompt included; servers reserve cache for what a request may need
    :param max_choices: `n` at most
    :param default_tokens: `max_tokens` where a request does not say
    """

    max_length: int = 2048
    max_choices: int = 8
    default_tokens: int = 512

    def __post_init__(self) -> None:
        for name in ("max_length", "max_choices", "default_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
