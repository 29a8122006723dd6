"""SamplingSpec: what the last stage must know to turn logits into tokens, as plain data that a peer may send.

Everything is checked in the constructor, so a spec that exists is a spec that can be run, whoever made it.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any

from bloombee_spec.sampling import checks
from bloombee_spec.sampling.noise import MAX_POSITION, MAX_SEED

MAX_LISTED_TOKENS = 8192  # per list of token ids
MAX_EOS_TOKENS = 64
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 32
MAX_NGRAM = 1024

_WITHOUT_EFFECT_ON_GREEDY = (
    *("prompt_length", "seed", "max_length", "eos_token_ids"),
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
)


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How one generation chooses its tokens. Names and meanings are those of `transformers.GenerationConfig`.

    Options that only matter when sampling (`temperature` to `eta_cutoff`) have no effect with `do_sample=False`.

    :param prompt_length: tokens (padding included) that were there before the first generated one;
      `input_ids.shape[1]`
    :param seed: key of the noise, see `noise.py`; unused with `do_sample=False`
    :param top_k: 0 is off
    :param presence_penalty: subtracted from the score of each token that was generated before (not from the prompt's)
    :param frequency_penalty: the same, times how often it was generated
    :param min_length: tokens, prompt included, before which the end of the sequence cannot be chosen
    :param min_new_tokens: the same, prompt not included
    :param max_length: tokens, prompt included; only needed for `forced_eos_token_ids`
    :raises ValueError: a value has the wrong type or is out of range, or two options do not fit together
    """

    prompt_length: int
    do_sample: bool = False
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    min_length: int = 0
    min_new_tokens: int = 0
    max_length: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_ids: tuple[int, ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    exponential_decay_length_penalty: tuple[int, float] | None = None
    remove_invalid_values: bool = False
    renormalize_logits: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("do_sample", "remove_invalid_values", "renormalize_logits"):
            self._set(name, checks.boolean)
        self._set("seed", checks.integer, 0, MAX_SEED)
        for name in ("prompt_length", "min_length", "min_new_tokens"):
            self._set(name, checks.integer, 0, MAX_POSITION)
        self._set("top_k", checks.integer, 0, checks.MAX_TOKEN_ID + 1)
        self._set("no_repeat_ngram_size", checks.integer, 0, MAX_NGRAM)
        for name in ("temperature", "repetition_penalty"):
            self._set(name, checks.positive)
        for name in ("top_p", "min_p", "typical_p"):
            self._set(name, checks.number, 0.0, 1.0)
        if self.typical_p == 0:
            raise ValueError("typical_p must be greater than 0, got 0")
        for name in ("epsilon_cutoff", "eta_cutoff"):
            self._set(name, checks.number, 0.0, 1.0, below_high=True)
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, checks.number, -100.0, 100.0)
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            self._set(name, checks.token_ids, MAX_LISTED_TOKENS)
        for name in ("eos_token_ids", "forced_eos_token_ids"):
            self._set(name, checks.token_ids, MAX_EOS_TOKENS)
        self._set("bad_words_ids", checks.token_sequences, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)
        if self.max_length is not None:
            self._set("max_length", checks.integer, 1, MAX_POSITION)
        if self.forced_bos_token_id is not None:
            self._set("forced_bos_token_id", checks.integer, 0, checks.MAX_TOKEN_ID)
        if self.exponential_decay_length_penalty is not None:
            self._set("exponential_decay_length_penalty", checks.start_and_factor, MAX_POSITION)
        self._check_together()

    def _check_together(self) -> None:
        if self.forced_eos_token_ids and self.max_length is None:
            raise ValueError(
                "forced_eos_token_ids needs max_length: the token is forced at the last position before it"
            )
        if self.exponential_decay_length_penalty is not None and not self.eos_token_ids:
            raise ValueError(
                "exponential_decay_length_penalty needs eos_token_ids: it raises the score of those tokens"
            )

    def _set(self, name: str, check: Any, *limits: Any, **options: Any) -> None:
        object.__setattr__(self, name, check(name, getattr(self, name), *limits, **options))

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the token is the argmax of the unprocessed logits."""
        inert = {name: getattr(self, name) for name in _WITHOUT_EFFECT_ON_GREEDY}
        return not self.do_sample and self == SamplingSpec(**inert)

    @property
    def largest_token_id(self) -> int:
        """The largest token id that an option names, -1 when none does."""
        return max(
            (
                *self.eos_token_ids,
                *self.forced_eos_token_ids,
                *self.suppress_tokens,
                *self.begin_suppress_tokens,
                *(token for word in self.bad_words_ids for token in word),
                -1 if self.forced_bos_token_id is None else self.forced_bos_token_id,
            )
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """:raises ValueError: an option names a token id that the model does not have"""
        if self.largest_token_id >= vocab_size:
            raise ValueError(f"an option names token {self.largest_token_id}, the vocabulary has {vocab_size} tokens")

    def to_wire(self) -> dict[str, Any]:
        """Only the options that differ from their default, as numbers, booleans and lists (ready for msgpack)."""
        wire: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.default is MISSING or value != field.default:
                wire[field.name] = _plain(value)
        return wire

    @classmethod
    def from_generation_config(
        cls, config: Any, *, prompt_length: int, seed: int, **options: Any
    ) -> tuple[SamplingSpec, list[str]]:
        """The spec, and the names of options that move verification to the client: see `options.py`."""
        from bloombee_spec.sampling.options import spec_from_generation_config

        return spec_from_generation_config(config, prompt_length=prompt_length, seed=seed, **options)

    @classmethod
    def from_wire(cls, wire: Any) -> SamplingSpec:
        """Decode and check what a peer sent.

        :raises ValueError: anything but a dict of known options with values in range. An option that this version does
          not know is an error too: applying the rest of them would silently sample from another distribution.
        """
        if not isinstance(wire, dict):
            raise ValueError(f"sampling options must be a dict, got {type(wire).__name__}")
        known = {field.name for field in fields(cls)}
        unknown = [key for key in wire if not isinstance(key, str) or key not in known]
        if unknown:
            shown = ", ".join(repr(key)[:40] for key in unknown[:5])
            raise ValueError(
                f"{len(unknown)} unknown sampling options: {shown}; both sides must run versions that know them"
            )
        if "prompt_length" not in wire:
            raise ValueError("sampling options lack prompt_length")
        return cls(**wire)


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
