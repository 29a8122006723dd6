"""Scores: what transformers' own logits processors make of the logits at one node.

The classes come from the installed transformers and are put in the order of its `generate`, so that a stage computes
the very distribution that a local `generate` would sample from. They look at exactly one prefix: the committed tokens
and the path to the node.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from bloombee_spec.sampling.options import UnsupportedOption
from bloombee_spec.sampling.spec import SamplingSpec

# `(input_ids [1, tokens], scores [1, vocab]) -> scores [1, vocab]`, the signature of transformers' LogitsProcessor.
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Token ids before the node; a function when they are worth building only if some processor looks at them.
Prefix = Sequence[int] | Callable[[], Sequence[int]]


class SamplingError(ValueError):
    """The scores of a node do not determine a token: invalid logits, or options that leave nothing to choose from."""


class ProcessorStack:
    """Logits processors in the order in which they apply. Holds no state between calls, unless a custom processor
    does.

    :param processors: transformers' logits processors, or functions of the same form
    :param needs_prefix: whether any of them looks at the token ids
    :param padding: ids that the processors see in front of every prefix
    """

    def __init__(
        self, processors: Iterable[Processor] = (), *, needs_prefix: bool = True, padding: Sequence[int] = ()
    ):
        self.processors = list(processors)
        self.padding = list(padding)
        self.needs_prefix = needs_prefix and bool(self.processors)

    @classmethod
    def from_spec(cls, spec: SamplingSpec, device: torch.device | str = "cpu") -> ProcessorStack:
        """
        :param device: where the logits will be
        :raises UnsupportedOption: the installed transformers lacks the class for an option of the spec
        """
        processors = [*_processors(spec, device)]
        needs_prefix = bool(processors)
        if spec.renormalize_logits and spec.do_sample and _normalises_twice():
            processors.append(_make("LogitNormalization"))
        if spec.do_sample:
            processors += _warpers(spec, device)
        if spec.renormalize_logits:
            processors.append(_make("LogitNormalization"))
        return cls(processors, needs_prefix=needs_prefix)

    def scores(self, logits: torch.Tensor, prefix: Prefix) -> torch.Tensor:
        """Processed scores at one node; temperature included.

        One node at a time on purpose: reductions over a batch need not round as they do over a single row, and a token
        must not depend on which other nodes were evaluated with it.

        :param logits: `[vocab]`, unchanged on return
        :param prefix: the committed tokens and the path to the node, this node's token included
        :returns: `[vocab]`, float32 (float64 if the logits are)
        :raises SamplingError: a processor failed (a penalty that overflows, NaN)
        """
        scores = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
        if not self.processors:
            return scores
        # Some versions of some processors write into their argument.
        scores = (scores.clone() if scores is logits else scores).unsqueeze(0)
        ids = self._ids(prefix, scores)
        try:
            for processor in self.processors:
                scores = processor(ids, scores)
        except (OverflowError, ValueError) as error:
            raise SamplingError(f"{type(processor).__name__} failed on these logits: {error}") from error
        return scores[0]

    def _ids(self, prefix: Prefix, scores: torch.Tensor) -> torch.Tensor:
        if not self.needs_prefix:
            return torch.empty(1, 0, dtype=torch.int64, device=scores.device)
        ids = torch.tensor([[*self.padding, *(prefix() if callable(prefix) else prefix)]], dtype=torch.int64)
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= scores.shape[-1]):
            raise SamplingError(f"the prefix contains a token outside 0 .. {scores.shape[-1] - 1}")
        return ids.to(scores.device)


class CountPenalty:
    """Presence and frequency penalties over the generated tokens: `score -= presence * [count > 0] + frequency *
    count`.

    Not in transformers. The form is the one of the OpenAI API, and like in other servers the prompt does not count.
    """

    def __init__(self, prompt_length: int, presence: float, frequency: float):
        self.prompt_length = prompt_length
        self.presence = presence
        self.frequency = frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self.prompt_length :], minlength=scores.shape[-1]).to(scores.dtype)
        return scores - self.presence * (counts > 0) - self.frequency * counts


def _processors(spec: SamplingSpec, device: torch.device | str) -> Iterable[Processor]:
    """Those that apply to greedy decoding too; all of them look at the prefix or at its length."""
    eos = list(spec.eos_token_ids)
    if spec.repetition_penalty != 1.0:
        yield _make("RepetitionPenaltyLogitsProcessor", spec.repetition_penalty)
    if spec.presence_penalty or spec.frequency_penalty:
        yield CountPenalty(spec.prompt_length, spec.presence_penalty, spec.frequency_penalty)
    if spec.no_repeat_ngram_size:
        yield _make("NoRepeatNGramLogitsProcessor", spec.no_repeat_ngram_size)
    bad_words = [list(word) for word in spec.bad_words_ids if not (len(word) == 1 and word[0] in eos)]
    if bad_words:
        yield _make("NoBadWordsLogitsProcessor", bad_words, eos)
    if spec.min_length and eos:
        yield _make("MinLengthLogitsProcessor", spec.min_length, eos, device=device)
    if spec.min_new_tokens and eos:
        yield _make("MinNewTokensLengthLogitsProcessor", spec.prompt_length, spec.min_new_tokens, eos, device=device)
    if spec.forced_bos_token_id is not None:
        yield _make("ForcedBOSTokenLogitsProcessor", spec.forced_bos_token_id)
    if spec.forced_eos_token_ids:
        yield _make("ForcedEOSTokenLogitsProcessor", spec.max_length, list(spec.forced_eos_token_ids), device=device)
    if spec.remove_invalid_values:
        yield _make("InfNanRemoveLogitsProcessor")
    if spec.exponential_decay_length_penalty is not None:
        decay = spec.exponential_decay_length_penalty
        yield _make("ExponentialDecayLengthPenalty", decay, eos, spec.prompt_length)
    if spec.suppress_tokens:
        yield _make("SuppressTokensLogitsProcessor", list(spec.suppress_tokens), device=device)
    if spec.begin_suppress_tokens:
        forced_first = spec.prompt_length <= 1 and spec.forced_bos_token_id is not None
        begin = spec.prompt_length + 1 if forced_first else spec.prompt_length
        yield _make("SuppressTokensAtBeginLogitsProcessor", list(spec.begin_suppress_tokens), begin, device=device)


def _warpers(spec: SamplingSpec, device: torch.device | str) -> Iterable[Processor]:
    """Those that shape the sampling distribution; none of them looks at the prefix."""
    if spec.temperature != 1.0:
        yield _make("TemperatureLogitsWarper", spec.temperature)
    if spec.top_k:
        yield _make("TopKLogitsWarper", spec.top_k)
    if spec.top_p < 1.0:
        yield _make("TopPLogitsWarper", spec.top_p)
    if spec.min_p > 0.0:
        yield _make("MinPLogitsWarper", spec.min_p)
    if spec.typical_p < 1.0:
        yield _make("TypicalLogitsWarper", spec.typical_p)
    if spec.epsilon_cutoff > 0.0:
        yield _make("EpsilonLogitsWarper", spec.epsilon_cutoff)
    if spec.eta_cutoff > 0.0:
        yield _make("EtaLogitsWarper", spec.eta_cutoff, device=device)


def _make(name: str, *args: Any, device: torch.device | str | None = None) -> Processor:
    """An instance of transformers' class of this name; `device` is passed on where that version takes it."""
    # Imported here: greedy decoding without options needs nothing of it, and it takes seconds to load.
    from transformers.generation import logits_process

    make: Any = getattr(logits_process, name, None)
    if make is None:
        import transformers

        raise UnsupportedOption(
            f"transformers {transformers.__version__} has no {name}; update it or leave the option out"
        )
    if device is not None and "device" in inspect.signature(make).parameters:
        return make(*args, device=device)  # type: ignore[no-any-return]
    return make(*args)  # type: ignore[no-any-return]


def _normalises_twice() -> bool:
    """Whether this transformers has a separate list of warpers, normalised separately too (up to 4.44)."""
    from transformers.generation.utils import GenerationMixin

    return hasattr(GenerationMixin, "_get_logits_warper")
