"""Reads the arguments of a `generate` call as transformers does, and says what the plugin can do with them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.stopping_criteria import MaxTimeCriteria, StoppingCriteriaList

from bloombee_spec.sampling.noise import fresh_seed
from bloombee_spec.sampling.options import UnsupportedOption
from bloombee_spec.sampling.spec import SamplingSpec

# Arguments of `generate` beside the generation config that need the host's own path.
HOST_ARGUMENTS = (
    "inputs_embeds", "negative_prompt_ids", "negative_prompt_attention_mask",
    "assistant_model", "prefix_allowed_tokens_fn",
    "position_ids", "past_key_values", "synced_gpus", "logits_warper",
)  # fmt: skip
LOOP_ARGUMENTS = (
    "attention_mask",
    "streamer",
    "stopping_criteria",
    "tokenizer",
    "use_model_defaults",
    "logits_processor",
)


class NotForPlugin(Exception):
    """The call needs the host's own path; the message says why."""


@dataclass(frozen=True)
class Call:
    """One `generate` call, in the plugin's terms.

    :param rows: prompt tokens of each row without padding
    :param width: length of the (padded) input; `new_tokens` most tokens to generate per row
    :param sampling: the rule on the wire; empty means greedy
    """

    input_ids: torch.Tensor
    rows: tuple[tuple[int, ...], ...]
    width: int
    new_tokens: int
    eos: tuple[int, ...]
    pad: int
    sampling: dict[str, Any]
    streamer: Any
    criteria: StoppingCriteriaList

    @property
    def longest(self) -> int:
        return max(len(row) for row in self.rows) + self.new_tokens


def read_call(model: Any, input_ids: torch.Tensor | None, kwargs: dict[str, Any], seed: int | None) -> Call:
    """:param kwargs: keyword arguments of `generate`, not changed
    :raises NotForPlugin: the host has to serve this call
    :raises ValueError: arguments that are wrong for both
    """
    config = copy.deepcopy(kwargs.get("generation_config") or model.generation_config)
    for name in [n for n in vars(config) if not hasattr(type(config)(), n) and hasattr(model.config, n)]:
        delattr(config, name)  # the host's from_pretrained leaves its own arguments (initial_peers, …) in here
    known = {
        k: v
        for k, v in kwargs.items()
        if k not in (*HOST_ARGUMENTS, *LOOP_ARGUMENTS, "generation_config", "input_ids")
    }
    unused = config.update(**known)
    if unused:
        raise NotForPlugin(f"the host decides about {', '.join(sorted(unused))}")
    for name in HOST_ARGUMENTS:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise NotForPlugin(f"{name} is served by the host's own path")
    if input_ids is None or input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise NotForPlugin("the plugin starts from token ids [batch, length]")
    for name in (
        "output_scores",
        "output_logits",
        "output_attentions",
        "output_hidden_states",
        "return_dict_in_generate",
    ):
        if getattr(config, name, False):
            raise NotForPlugin(f"{name} is served by the host's own path")
    if (getattr(config, "num_return_sequences", 1) or 1) > 1:
        raise NotForPlugin("num_return_sequences > 1 is served by the host's own path")
    if getattr(model.config, "tuning_mode", None):
        raise NotForPlugin("prompt tuning is served by the host's own path")
    width = input_ids.shape[1]
    new_tokens = _new_tokens(config, kwargs, width)
    rows = _unpadded(input_ids, kwargs.get("attention_mask"))
    sampling = _sampling(config, kwargs, width, new_tokens, seed)
    if sampling and any(len(row) < width for row in rows) and not _ignores_prompt(sampling):
        raise NotForPlugin("padded rows together with options that count or look at prompt tokens")
    eos = _ids(config.eos_token_id)
    pad = config.pad_token_id if config.pad_token_id is not None else (eos[0] if eos else 0)
    return Call(
        input_ids=input_ids, rows=rows, width=width, new_tokens=new_tokens, eos=eos, pad=int(pad),
        sampling=sampling,
        streamer=kwargs.get("streamer"), criteria=_criteria(config, kwargs),
    )  # fmt: skip


def _new_tokens(config: Any, kwargs: dict[str, Any], width: int) -> int:
    if config.max_new_tokens is not None:
        new_tokens = int(config.max_new_tokens)
    elif config.max_length is not None:
        new_tokens = int(config.max_length) - width
    else:
        raise ValueError("set max_new_tokens or max_length")
    if new_tokens <= 0:
        raise ValueError(f"nothing to generate: the input has {width} tokens, max_length is {config.max_length}")
    return new_tokens


def _unpadded(input_ids: torch.Tensor, mask: Any) -> tuple[tuple[int, ...], ...]:
    rows = input_ids.tolist()
    if mask is None:
        return tuple(map(tuple, rows))
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask has shape {list(mask.shape)}, input_ids {list(input_ids.shape)}")
    kept = []
    for row, seen in zip(rows, mask.tolist()):
        first = seen.index(1) if 1 in seen else -1
        if first < 0 or any(not flag for flag in seen[first:]):
            raise NotForPlugin("only left padding is understood in attention_mask")
        kept.append(tuple(row[first:]))
    return tuple(kept)


def _sampling(config: Any, kwargs: dict[str, Any], width: int, new_tokens: int, seed: int | None) -> dict[str, Any]:
    try:
        spec, client = SamplingSpec.from_generation_config(
            config, prompt_length=width, seed=fresh_seed() if seed is None else seed, max_length=width + new_tokens,
            logits_processor=kwargs.get("logits_processor") or (),
        )  # fmt: skip
    except UnsupportedOption as e:
        raise NotForPlugin(str(e)) from None
    if client:
        raise NotForPlugin(f"{', '.join(client)} can only be evaluated at the client")
    return {} if spec.is_plain_greedy else spec.to_wire()


def _ignores_prompt(sampling: dict[str, Any]) -> bool:
    """Whether every option acts on the scores alone: with padding, transformers lets the others see pad tokens."""
    harmless = {
        "prompt_length", "do_sample", "seed", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff",
        "eta_cutoff", "bad_words_ids", "suppress_tokens", "remove_invalid_values", "renormalize_logits",
        "eos_token_ids",
        "max_length",
    }  # fmt: skip
    plain = SamplingSpec(prompt_length=0).to_wire()
    return all(name in harmless or value == plain.get(name) for name, value in sampling.items())


def _criteria(config: Any, kwargs: dict[str, Any]) -> StoppingCriteriaList:
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or ())
    if getattr(config, "max_time", None) is not None:
        criteria.append(MaxTimeCriteria(max_time=config.max_time))
    if getattr(config, "stop_strings", None) is not None:
        from transformers.generation.stopping_criteria import StopStringCriteria

        if kwargs.get("tokenizer") is None:
            raise ValueError("stop_strings needs the tokenizer: generate(..., stop_strings=..., tokenizer=tokenizer)")
        criteria.append(StopStringCriteria(stop_strings=config.stop_strings, tokenizer=kwargs["tokenizer"]))
    return criteria


def _ids(value: int | Sequence[int] | torch.Tensor | None) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return (int(value),) if isinstance(value, int) else tuple(int(item) for item in value)
