"""Reads a `generate` call as transformers does, and says where each of its options is served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.stopping_criteria import StoppingCriteriaList

from bloombee_spec.client.arguments import (
    HOST_ARGUMENTS,
    NotForPlugin,
    UnsupportedCall,
    generation_config,
    inferred_mask,
    new_tokens,
    stopping_criteria,
    token_ids,
    unpadded,
)
from bloombee_spec.client.assistant import DrafterFactory, call_drafter
from bloombee_spec.client.client_rule import ClientRule, client_rules
from bloombee_spec.client.stream import StreamRequest
from bloombee_spec.sampling.checks import TooLong
from bloombee_spec.sampling.noise import fresh_seed
from bloombee_spec.sampling.options import UnsupportedOption
from bloombee_spec.sampling.spec import SamplingSpec

__all__ = ["Call", "NotForPlugin", "UnsupportedCall", "read_call"]

# What the last stage may evaluate on a row without its padding: it acts on the scores alone.
_IGNORES_PROMPT = frozenset({
    "prompt_length", "do_sample", "seed", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff",
    "eta_cutoff", "bad_words_ids", "suppress_tokens", "remove_invalid_values", "renormalize_logits", "eos_token_ids",
    "max_length",
})  # fmt: skip
_AT_THE_SERVERS = "{}: what the blocks compute stays at the servers"


@dataclass(frozen=True)
class Returned:
    """What the caller wants back beside the tokens."""

    as_dict: bool = False
    scores: bool = False
    logits: bool = False
    sampled: bool = False


@dataclass(frozen=True)
class Call:
    """One `generate` call, in the plugin's terms.

    :param input_ids: `[batch * num_return_sequences, width]`, padded on the left
    :param rows: prompt tokens of each row without padding
    :param width: length of the (padded) input; `new_tokens` most tokens to generate per row
    :param sampling: the rule on the wire; empty means greedy, or that the client has rules of its own
    :param rules: of each row, where the client has to verify
    :param new_drafter: the drafter that the call brings with it, None: the model's
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
    rules: tuple[ClientRule, ...] = ()
    new_drafter: DrafterFactory | None = None
    returned: Returned = Returned()

    @property
    def longest(self) -> int:
        return max(len(row) for row in self.rows) + self.new_tokens

    @property
    def padding(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The input and its mask, `[batch, width]` each, where a row has padding."""
        if all(len(row) == self.width for row in self.rows):
            return None
        mask = torch.ones_like(self.input_ids)
        for i, row in enumerate(self.rows):
            mask[i, : self.width - len(row)] = 0
        return self.input_ids, mask

    @property
    def requests(self) -> list[StreamRequest]:
        return [
            StreamRequest(
                row, len(row) + self.new_tokens, self.eos, self.sampling, i, self.rules[i] if self.rules else None
            )
            for i, row in enumerate(self.rows)
        ]


def read_call(
    model: Any, input_ids: torch.Tensor | None, kwargs: Mapping[str, Any], seed: int | None, *, infer_mask: bool = True
) -> Call:
    """
    :param kwargs: keyword arguments of `generate`, not changed
    :param infer_mask: without an attention mask, take pad tokens for padding, as transformers does
    :raises NotForPlugin: the host has to serve this call
    :raises UnsupportedCall: nobody can serve it on a swarm
    :raises ValueError: arguments that are wrong for all
    """
    for name in ("output_attentions", "output_hidden_states"):
        if kwargs.get(name):
            raise UnsupportedCall(_AT_THE_SERVERS.format(name))
    config = generation_config(model, kwargs)
    _refuse(model, config, kwargs)
    if input_ids is None or input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise NotForPlugin("the plugin starts from token ids [batch, length]")
    mask = kwargs.get("attention_mask")
    if mask is None and infer_mask:
        mask = inferred_mask(config, input_ids)
    copies = int(getattr(config, "num_return_sequences", None) or 1)
    if copies > 1:
        if not config.do_sample:
            raise ValueError(f"num_return_sequences={copies} greedy sequences would all be the same; use do_sample")
        input_ids = input_ids.repeat_interleave(copies, dim=0)
        mask = None if mask is None else mask.repeat_interleave(copies, dim=0)
    width = input_ids.shape[1]
    rows = unpadded(input_ids, mask)
    limit = new_tokens(config, width)
    returned = _returned(config)
    spec, reasons = _rule(config, kwargs, width, limit, seed)
    if any(len(row) < width for row in rows) and not _ignores_prompt(spec):
        reasons.append("options that look at the prompt, on padded rows")
    if returned.scores or returned.logits:
        reasons.append("output_scores or output_logits")
    rules: tuple[ClientRule, ...] = ()
    if reasons:
        keep = returned.scores or returned.logits
        rules = client_rules(model, config, spec, input_ids, rows, limit, kwargs, keep)
    eos = token_ids(config.eos_token_id)
    pad = config.pad_token_id if config.pad_token_id is not None else (eos[0] if eos else 0)
    return Call(
        input_ids=input_ids, rows=rows, width=width, new_tokens=limit, eos=eos, pad=int(pad),
        sampling={} if rules or spec.is_plain_greedy else spec.to_wire(),
        streamer=kwargs.get("streamer"), criteria=stopping_criteria(model, config, kwargs, width + limit),
        rules=rules, new_drafter=call_drafter(model, config, kwargs), returned=returned,
    )  # fmt: skip


def _refuse(model: Any, config: Any, kwargs: Mapping[str, Any]) -> None:
    for name in HOST_ARGUMENTS:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise NotForPlugin(f"{name} is served by the host's own path")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise UnsupportedCall(_AT_THE_SERVERS.format(name))
    if kwargs.get("negative_prompt_ids") is not None and getattr(config, "guidance_scale", None) in (None, 1):
        raise ValueError("negative_prompt_ids has no effect without guidance_scale")
    if getattr(config, "token_healing", False):
        raise UnsupportedCall("token_healing generates on its own before the call; heal the prompt beforehand")
    if getattr(model.config, "tuning_mode", None):
        raise NotForPlugin("prompt tuning is served by the host's own path")


def _returned(config: Any) -> Returned:
    """Without `return_dict_in_generate` transformers keeps no scores."""
    if not getattr(config, "return_dict_in_generate", False):
        return Returned()
    scores, logits = bool(config.output_scores), bool(getattr(config, "output_logits", False))
    return Returned(True, scores, logits, bool(config.do_sample))


def _rule(
    config: Any, kwargs: Mapping[str, Any], width: int, limit: int, seed: int | None
) -> tuple[SamplingSpec, list[str]]:
    """What the last stage would need, and what keeps it from choosing the tokens."""
    key = fresh_seed() if seed is None and config.do_sample else seed or 0
    try:
        return SamplingSpec.from_generation_config(
            config, prompt_length=width, seed=key, max_length=width + limit,
            logits_processor=kwargs.get("logits_processor") or (),
            prefix_allowed_tokens_fn=kwargs.get("prefix_allowed_tokens_fn"),
        )  # fmt: skip
    except UnsupportedOption as e:
        raise NotForPlugin(str(e)) from None
    except TooLong as e:
        return SamplingSpec(width, do_sample=bool(config.do_sample), seed=key), [str(e)]


def _ignores_prompt(spec: SamplingSpec) -> bool:
    """Whether every option acts on the scores alone: with padding, transformers lets the others see pad tokens."""
    plain = SamplingSpec(prompt_length=0).to_wire()
    return all(name in _IGNORES_PROMPT or value == plain.get(name) for name, value in spec.to_wire().items())
