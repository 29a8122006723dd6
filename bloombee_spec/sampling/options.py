"""From a `transformers.GenerationConfig` to a SamplingSpec, without ignoring anything.

Every attribute of the config falls into exactly one group: it is part of the spec; it belongs to the decode loop and
does not touch the scores; it changes the scores in a way that only the client can evaluate (verification moves there);
or it is refused. What no group knows is judged by what transformers would do with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bloombee_spec.sampling.spec import SamplingSpec

# fmt: off
# Read into the spec below.
SPEC_OPTIONS = frozenset({
    "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens", "max_length",
    "max_new_tokens", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
    "exponential_decay_length_penalty", "remove_invalid_values", "renormalize_logits", "eos_token_id",
})

# When to stop, what to return, how to cache, and the knobs of modes that are refused or off: no effect on the scores.
LOOP_OPTIONS = frozenset({
    "max_time", "stop_strings", "early_stopping", "use_cache", "cache_implementation", "cache_config",
    "max_cache_len", "return_legacy_cache", "prefill_chunk_size", "length_penalty", "low_memory", "token_healing",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores", "output_logits",
    "return_dict_in_generate", "pad_token_id", "bos_token_id", "decoder_start_token_id", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind",
    "prompt_lookup_num_tokens", "target_lookbehind", "max_matching_ngram_size", "is_assistant", "compile_config",
    "disable_compile",
    "continuous_batching_config", "transformers_version",
})
# fmt: on

# transformers has a processor for these, but what it needs stays at the client. Name -> values that switch it off.
CLIENT_OPTIONS: dict[str, tuple[Any, ...]] = {
    "sequence_bias": (None,),
    "watermarking_config": (None,),
    "encoder_repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "forced_decoder_ids": (None,),
    "top_h": (None,),
    "guidance_scale": (None, 1, 1.0),
}

_DEFAULT_MAX_LENGTH = 20  # of GenerationConfig

_BEAMS = "beam search is not speculative decoding; use num_beams=1"
_ASSISTED = "this plugin drafts outside the target; pass assistant_model or configure a drafter instead"

# Other decoding algorithms. Name -> (values that switch it off, why it is refused).
REFUSED_OPTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((None, 1), _BEAMS),
    "num_beam_groups": ((None, 1), _BEAMS),
    "diversity_penalty": ((None, 0.0), _BEAMS),
    "constraints": ((None,), _BEAMS),
    "force_words_ids": ((None,), _BEAMS),
    "penalty_alpha": ((None, 0.0), "contrastive search needs the hidden states of all candidates"),
    "dola_layers": ((None,), "DoLa needs the logits of inner layers"),
    "generation_kwargs": ((None, {}), "its contents are unknown here; pass the options themselves"),
    "assistant_early_exit": ((None,), _ASSISTED),
    "assistant_ensemble_weight": ((None,), _ASSISTED),
    "speculation_type": ((None,), _ASSISTED),
    "use_mtp": ((None, False), _ASSISTED),
}


class UnsupportedOption(ValueError):
    """An option that would change the output and that the plugin cannot honour."""


def spec_from_generation_config(
    config: Any,
    *,
    prompt_length: int,
    seed: int,
    max_length: int | None = None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logits_processor: Sequence[Any] = (),
    prefix_allowed_tokens_fn: Any = None,
) -> tuple[SamplingSpec, list[str]]:
    """The spec of this generation, and the names of the options that the last stage cannot evaluate.

    When the list is not empty, the client has to verify, with transformers' own processors; the spec is then
    incomplete and must not be sent to a stage.

    :param config: a `GenerationConfig` of any transformers version since 4.34, as the user gave it or as `generate`
      prepared it
    :param prompt_length: `input_ids.shape[1]`
    :param max_length: prompt and output together, where `generate` resolved it to something else than the config says
    :param logits_processor: custom processors passed to `generate`
    :param prefix_allowed_tokens_fn: as passed to `generate`
    :raises UnsupportedOption: another decoding algorithm is asked for, or an option that this module does not know
    :raises ValueError: a value is out of range
    """
    client = _client_options(config)
    if logits_processor:
        client.append("logits_processor")
    if prefix_allowed_tokens_fn is not None:
        client.append("prefix_allowed_tokens_fn")
    options = {name: _value(config, name) for name in SPEC_OPTIONS}
    if max_length is not None:
        options["resolved_max_length"] = max_length
    spec = SamplingSpec(
        prompt_length=prompt_length,
        seed=seed,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        **_processor_fields(options, prompt_length),
        **(_warper_fields(options) if options["do_sample"] else {}),
    )
    return spec, client


def _client_options(config: Any) -> list[str]:
    """Names of the active options that only the client can evaluate; raises for those that nobody can."""
    client = []
    for name in sorted(vars(config)):
        value = _value(config, name)
        if name.startswith("_") or name in SPEC_OPTIONS or name in LOOP_OPTIONS:
            continue
        if name in REFUSED_OPTIONS:
            off, reason = REFUSED_OPTIONS[name]
            if not _is_any_of(value, off):
                raise UnsupportedOption(f"{name}={value!r} is not supported: {reason}")
        elif name in CLIENT_OPTIONS:
            if not _is_any_of(value, CLIENT_OPTIONS[name]):
                client.append(name)
        elif not _is_any_of(value, (None, getattr(type(config)(), name, None))):
            if hasattr(type(config)(), name):
                raise UnsupportedOption(
                    f"{name}={value!r} is an option of the installed transformers that bloombee-spec does not know"
                )
            client.append(name)  # an attribute of somebody's own: whatever reads it, it is at the client
    return client


def _processor_fields(options: dict[str, Any], prompt_length: int) -> dict[str, Any]:
    forced_eos = _token_list(options["forced_eos_token_id"])
    max_length = _resolved_max_length(options, prompt_length) if forced_eos else None
    min_length, min_new_tokens = options["min_length"], options["min_new_tokens"]
    if min_new_tokens is not None and min_length and new_tokens_take_precedence():
        min_length = 0
    if options["bad_words_ids"] is not None and len(options["bad_words_ids"]) == 0:
        raise ValueError("bad_words_ids is empty; use None")
    forced_bos = options["forced_bos_token_id"]
    decay = options["exponential_decay_length_penalty"]
    return {
        "do_sample": bool(options["do_sample"]),
        "repetition_penalty": _float(options["repetition_penalty"], off=1.0),
        "no_repeat_ngram_size": int(options["no_repeat_ngram_size"] or 0),
        "bad_words_ids": [_token_list(word) for word in options["bad_words_ids"] or ()],
        "min_length": int(min_length or 0),
        "min_new_tokens": int(min_new_tokens or 0),
        "max_length": max_length,
        "forced_bos_token_id": None if forced_bos is None else int(forced_bos),
        "forced_eos_token_ids": forced_eos,
        "suppress_tokens": _token_list(options["suppress_tokens"]),
        "begin_suppress_tokens": _token_list(options["begin_suppress_tokens"]),
        "exponential_decay_length_penalty": None if decay is None else (int(decay[0]), float(decay[1])),
        # transformers compares with `is True`
        "remove_invalid_values": options["remove_invalid_values"] is True,
        "renormalize_logits": options["renormalize_logits"] is True,
        "eos_token_ids": _token_list(options["eos_token_id"]),
    }


def _resolved_max_length(options: dict[str, Any], prompt_length: int) -> int:
    if "resolved_max_length" in options:
        return int(options["resolved_max_length"])
    if options["max_new_tokens"] is not None:
        return prompt_length + int(options["max_new_tokens"])
    if options["max_length"] in (None, _DEFAULT_MAX_LENGTH):
        # Recent versions read the default as "20 new tokens", older ones as "20 in all".
        raise ValueError("forced_eos_token_id needs to know where the output ends: give max_new_tokens or max_length")
    return int(options["max_length"])


def new_tokens_take_precedence() -> bool:
    """Whether the installed `generate` overwrites min_length where min_new_tokens is set (since 4.40)."""
    from transformers.generation.utils import GenerationMixin

    return hasattr(GenerationMixin, "_prepare_generated_length")


def _warper_fields(options: dict[str, Any]) -> dict[str, Any]:
    """Options of the sampling distribution, with transformers' many ways to say "off" made one."""
    fields: dict[str, Any] = {"top_k": int(options["top_k"] or 0)}
    fields["temperature"] = _float(options["temperature"], off=1.0)
    fields["min_p"] = _float(options["min_p"], off=0.0)
    for name in ("top_p", "typical_p"):
        fields[name] = min(_float(options[name], off=1.0), 1.0)
    for name in ("epsilon_cutoff", "eta_cutoff"):
        value = _float(options[name], off=0.0)
        fields[name] = value if 0.0 < value < 1.0 else 0.0
    return fields


def _value(config: Any, name: str) -> Any:
    """The value that `generate` will use: since transformers 5, None means "not set", with defaults filled in late."""
    value = getattr(config, name, None)
    late_defaults = getattr(config, "_get_default_generation_params", None)
    return late_defaults().get(name) if value is None and late_defaults is not None else value


def _is_any_of(value: Any, candidates: tuple[Any, ...]) -> bool:
    return any(
        value is candidate or (type(value) in (bool, int, float, str, dict) and value == candidate)
        for candidate in candidates
    )


def _float(value: Any, *, off: float) -> float:
    return off if value is None else float(value)


def _token_list(value: Any) -> list[int]:
    """A token id, a list or a tensor of them, or None, as a list."""
    if value is None:
        return []
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [int(token) for token in value] if isinstance(value, (list, tuple)) else [int(value)]
