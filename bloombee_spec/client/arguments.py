"""The arguments of a `generate` call, read with the installed transformers' own code wherever it has some."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList


class NotForPlugin(Exception):
    """The call needs the host's own path; the message says why."""


class UnsupportedCall(RuntimeError):
    """Nobody can serve this call on a swarm, or the plugin cannot and the configuration says that it must
    (`SpecConfig(strict=True)`)."""


# Arguments beside the generation config: read by the plugin, served by the host, or used for the config itself.
PLUGIN_ARGUMENTS = (
    "attention_mask", "streamer", "stopping_criteria", "tokenizer", "logits_processor", "prefix_allowed_tokens_fn",
    "assistant_model", "assistant_tokenizer", "negative_prompt_ids", "negative_prompt_attention_mask",
)  # fmt: skip
HOST_ARGUMENTS = (
    "inputs_embeds", "position_ids", "past_key_values", "synced_gpus", "logits_warper", "custom_generate",
)  # fmt: skip
CONFIG_ARGUMENTS = ("generation_config", "use_model_defaults")


def by_name(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Positional arguments of `generate` behind the inputs, under the names that transformers gives them.

    :raises TypeError: too many, or one that is given by name too
    """
    names = [
        name
        for name, parameter in inspect.signature(GenerationMixin.generate).parameters.items()
        if name not in ("self", "inputs") and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    if len(args) > len(names):
        raise TypeError(f"generate takes at most {len(names) + 1} positional arguments, got {len(args) + 1}")
    given = dict(zip(names, args))
    for name in given:
        if kwargs.get(name) is not None:
            raise TypeError(f"generate got two values for {name}")
    return {**kwargs, **given}


def generation_config(model: Any, kwargs: Mapping[str, Any]) -> Any:
    """A `GenerationConfig` of this call's own, defaults and keywords merged as transformers merges them.

    :raises NotForPlugin: a keyword that is no generation option
    :raises ValueError: options that transformers refuses
    """
    options = {
        name: value
        for name, value in kwargs.items()
        if name not in (*PLUGIN_ARGUMENTS, *HOST_ARGUMENTS, *CONFIG_ARGUMENTS, "input_ids")
    }
    given = kwargs.get("generation_config")
    prepare = getattr(model, "_prepare_generation_config", None)
    if prepare is not None:
        known = inspect.signature(prepare).parameters
        extra = {"use_model_defaults": kwargs.get("use_model_defaults")} if "use_model_defaults" in known else {}
        config, unused = prepare(given, **extra, **options)
    else:
        config = copy.deepcopy(given or model.generation_config)
        unused = config.update(**options)
    # The host's from_pretrained leaves its own arguments (initial_peers, …) in the generation config.
    for name in [n for n in vars(config) if not hasattr(type(config)(), n) and hasattr(model.config, n)]:
        delattr(config, name)
    unused = {name: value for name, value in unused.items() if name in options}
    if unused:
        raise NotForPlugin(f"the host decides about {', '.join(sorted(unused))}")
    return config


def new_tokens(config: Any, width: int) -> int:
    """:raises ValueError: nothing says how many, or nothing is left to generate"""
    if config.max_new_tokens is not None:
        count = int(config.max_new_tokens)
    elif config.max_length is not None:
        count = int(config.max_length) - width
    else:
        raise ValueError("set max_new_tokens or max_length")
    if count <= 0:
        raise ValueError(f"nothing to generate: the input has {width} tokens, max_length is {config.max_length}")
    return count


def inferred_mask(config: Any, input_ids: torch.Tensor) -> torch.Tensor | None:
    """What transformers takes for the attention mask where none is given: pad tokens do not count, unless the pad
    token ends texts too."""
    pad = config.pad_token_id
    if pad is None or int(pad) in token_ids(config.eos_token_id) or not bool((input_ids == int(pad)).any()):
        return None
    return (input_ids != int(pad)).long()


def unpadded(input_ids: torch.Tensor, mask: torch.Tensor | None) -> tuple[tuple[int, ...], ...]:
    """
    :param mask: `[batch, length]` as `input_ids`; None: everything counts
    :raises NotForPlugin: it hides more than the beginning of a row
    """
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


def stopping_criteria(model: Any, config: Any, kwargs: Mapping[str, Any], limit: int) -> StoppingCriteriaList:
    """What may end the call before its limit, other than EOS.

    :param limit: length of the padded input and the new tokens
    :raises ValueError: `stop_strings` without a tokenizer; a criterion that the options stand for already
    """
    custom = StoppingCriteriaList(kwargs.get("stopping_criteria") or ())
    asked = config.max_time is not None or getattr(config, "stop_strings", None) is not None
    if not custom and not asked:
        return custom
    config = copy.deepcopy(config)
    config.max_length = limit
    prepare_special_tokens(model, config, None)
    offered = {
        "generation_config": config, "stopping_criteria": custom, "tokenizer": kwargs.get("tokenizer"),
    }  # fmt: skip
    prepared = accepted(model._get_stopping_criteria, offered)
    # The decode loop minds the limit and EOS by itself.
    own = [one for one in prepared if not any(one is other for other in custom)]
    loops = [one for one in own if isinstance(one, MaxLengthCriteria) or hasattr(one, "eos_token_id")]
    return StoppingCriteriaList(one for one in prepared if not any(one is other for other in loops))


def prepare_special_tokens(model: Any, config: Any, device: Any) -> None:
    """What newer versions of transformers keep as tensors in a config that their processors are made of."""
    if hasattr(model, "_prepare_special_tokens"):
        offered = {"generation_config": config, "kwargs_has_attention_mask": True, "device": device}
        accepted(model._prepare_special_tokens, offered)


def accepted(function: Any, offered: Mapping[str, Any]) -> Any:
    """Call a function of transformers with those of the keywords that its version takes."""
    known = inspect.signature(function).parameters
    return function(**{name: value for name, value in offered.items() if name in known})


def token_ids(value: int | Sequence[int] | torch.Tensor | None) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return (int(value),) if isinstance(value, int) else tuple(int(item) for item in value)
