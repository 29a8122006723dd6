"""The rule of a row that is verified at the client: transformers' own processors, and those of the caller."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers.generation.logits_process import LogitsProcessorList

from bloombee_spec.client.arguments import accepted, prepare_special_tokens
from bloombee_spec.client.guidance import give_second_prompts, second_prompt
from bloombee_spec.sampling.options import new_tokens_take_precedence
from bloombee_spec.sampling.processors import Processor, ProcessorStack
from bloombee_spec.sampling.rule import KeyedRule
from bloombee_spec.sampling.spec import SamplingSpec


class ClientRule:
    """A `Chooser` of one row, called once for each token that is committed and in their order, so that processors may
    keep state.

    :param keep: whether to remember what each token was chosen from, for `output_scores` and `output_logits`
    """

    def __init__(self, rule: KeyedRule, keep: bool):
        self._rule = rule
        self._seconds = [second for one in rule.processors.processors if (second := second_prompt(one)) is not None]
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        if keep:
            rule.record = self._record

    def __call__(self, logits: torch.Tensor, committed: Sequence[int]) -> int:
        position = len(committed)
        token = self._rule.choose(logits, committed, position)
        self._rule.commit(position)
        return token

    def reseed(self, seed: int) -> None:
        """Sample with another key; before the first token."""
        self._rule.reseed(seed)

    def close(self) -> None:
        """End what processors hold at the servers; never raises."""
        for second in self._seconds:
            second.close()

    def take(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the token at `position` was chosen from, handed out once: logits as the LM head gave them and processed
        scores, `[vocab]` each."""
        return self._kept.pop(position)

    def _record(self, position: int, logits: torch.Tensor, scores: torch.Tensor) -> None:
        raw = logits.clone()  # a row of a larger tensor, or one that a processor writes into
        self._kept[position] = raw, raw if scores is logits else scores.clone()


class RowOfBatch:
    """A caller's processor that expects all rows of the batch: it is shown this row in every place, and asked for its
    own.

    Rows run ahead of each other, so that there is no moment at which all of them have the same length.
    """

    def __init__(self, processor: Processor, row: int, rows: int):
        self._processor, self._row, self._rows = processor, row, rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        everywhere = self._processor(input_ids.repeat(self._rows, 1), scores.repeat(self._rows, 1))
        return everywhere[self._row : self._row + 1]


def client_rules(
    model: Any,
    config: Any,
    spec: SamplingSpec,
    input_ids: torch.Tensor,
    rows: Sequence[Sequence[int]],
    new_tokens: int,
    kwargs: Mapping[str, Any],
    keep: bool,
) -> tuple[ClientRule, ...]:
    """
    :param config: the call's `GenerationConfig`; not changed
    :param spec: for the seed, and whether to sample
    :param input_ids: `[batch, width]`, padded; `rows` without the padding
    :raises ValueError: transformers refuses an option, or a custom processor that an option stands for already
    """
    width = input_ids.shape[1]
    device = model.get_output_embeddings().weight.device
    config = copy.deepcopy(config)
    config.max_length = width + new_tokens
    if config.min_new_tokens is not None and new_tokens_take_precedence():
        config.min_length = width + config.min_new_tokens
    prepare_special_tokens(model, config, device)
    stacks = []
    for i, row in enumerate(rows):
        padding = width - len(row)
        processors = _processors(model, config, input_ids[i : i + 1].to(device), padding, i, len(rows), kwargs)
        give_second_prompts(model, processors, new_tokens)
        stacks.append(ProcessorStack(processors, padding=input_ids[i, :padding].tolist()))
    vocab = model.config.vocab_size
    return tuple(
        ClientRule(KeyedRule(spec, vocab, row=i, device=device, processors=stack), keep)
        for i, stack in enumerate(stacks)
    )


def _processors(
    model: Any, config: Any, input_ids: torch.Tensor, padding: int, row: int, rows: int, kwargs: Mapping[str, Any]
) -> list[Processor]:
    """As `generate` puts them together, for one row.

    :param input_ids: `[1, width]`, of which the first `padding` do not count
    """
    mask = torch.ones_like(input_ids)
    mask[:, :padding] = 0
    custom = list(kwargs.get("logits_processor") or ())
    allowed = kwargs.get("prefix_allowed_tokens_fn")
    offered = {
        "generation_config": config, "input_ids_seq_length": input_ids.shape[1], "encoder_input_ids": input_ids,
        "prefix_allowed_tokens_fn": None if allowed is None else _of_row(allowed, row),
        "logits_processor": LogitsProcessorList(custom), "device": input_ids.device,
        "model_kwargs": {"attention_mask": mask, "use_cache": True},
        "negative_prompt_ids": _row_of(kwargs.get("negative_prompt_ids"), row, rows),
        "negative_prompt_attention_mask": _row_of(kwargs.get("negative_prompt_attention_mask"), row, rows),
    }  # fmt: skip
    prepared: list[Processor] = list(accepted(model._get_logits_processor, offered))
    if config.do_sample and hasattr(model, "_get_logits_warper"):  # up to 4.44
        offered = {"generation_config": config, "device": input_ids.device}
        prepared += accepted(model._get_logits_warper, offered)
    if rows == 1:
        return prepared
    return [RowOfBatch(one, row, rows) if any(one is other for other in custom) else one for one in prepared]


def _of_row(allowed: Callable[[int, torch.Tensor], list[int]], row: int) -> Callable[[int, torch.Tensor], list[int]]:
    return lambda _, sent: allowed(row, sent)


def _row_of(batch: torch.Tensor | None, row: int, rows: int) -> torch.Tensor | None:
    """`[1, …]` of a tensor that was given for the rows before `num_return_sequences` made copies of them.

    :raises ValueError: it has another number of rows
    """
    if batch is None:
        return None
    if batch.shape[0] == 0 or rows % batch.shape[0]:
        raise ValueError(f"the negative prompt has {batch.shape[0]} rows, the call has {rows}")
    at = row // (rows // batch.shape[0])
    return batch[at : at + 1]
