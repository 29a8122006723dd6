"""What the tests of drafters share: well-formedness, replay against a known text, tiny models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from bloombee_spec.draft.base import Drafter, Proposal
from bloombee_spec.draft.check import check_proposals

small_texts = st.lists(st.integers(0, 3), max_size=40)


def proposed(
    drafter: Drafter, path: Sequence[int] = (), budget: int = 16, max_depth: int = 64, vocab_size: int = 1 << 20
) -> list[Proposal]:
    """The proposals, checked."""
    proposals = drafter.propose(path, budget, max_depth=max_depth)
    check_proposals(proposals, budget=budget, max_depth=max_depth, vocab_size=vocab_size, name=drafter.name)
    return proposals


def chain_of(proposals: Sequence[Proposal], number: int) -> list[int]:
    """Tokens from the anchor's child down to a proposal."""
    chain: list[int] = []
    while number >= 0:
        chain.append(proposals[number].token)
        number = proposals[number].parent
    return chain[::-1]


def accepted(proposals: Sequence[Proposal], continuation: Sequence[int]) -> int:
    """How many tokens of the true continuation the tree holds."""
    chains = [chain_of(proposals, number) for number in range(len(proposals))]
    return max((len(chain) for chain in chains if list(continuation[: len(chain)]) == chain), default=0)


def verifications(
    drafter: Drafter, prompt: Sequence[int], output: Sequence[int], budget: int, max_depth: int = 64
) -> int:
    """Replay a known output: how many verified trees it takes, each with its bonus token."""
    drafter.start(prompt)
    position = count = 0
    while position < len(output):
        proposals = proposed(drafter, (), budget, max_depth)
        step = min(accepted(proposals, output[position:]) + 1, len(output) - position)
        drafter.observe(output[position : position + step])
        position += step
        count += 1
    return count


def tiny_llama(seed: int = 0, vocab_size: int = 61, layers: int = 2, **changes: Any) -> LlamaForCausalLM:
    """A random model whose logits depend sharply on the whole context (the usual initialisation is nearly flat)."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        **changes,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=2.0 / parameter.shape[1] ** 0.5)
        model.get_input_embeddings().weight.normal_()
    return model


@torch.no_grad()  # type: ignore[untyped-decorator]
def plain_probs(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Next-token probabilities of a plain run without a cache: `[vocab]`."""
    return torch.softmax(model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1].float(), dim=-1)


@torch.no_grad()  # type: ignore[untyped-decorator]
def greedy(model: Any, prompt: Sequence[int], n: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(plain_probs(model, tokens).argmax()))
    return tokens[len(prompt) :]


def assert_probs_are_the_models(drafter: Any, committed: list[int], path: list[int], budget: int = 12) -> None:
    """What a model drafter says of each candidate is what a plain run of its model says."""
    model = drafter.model.model
    proposals = proposed(drafter, path, budget, 4)
    assert proposals
    for number, proposal in list(enumerate(proposals))[::3]:
        plain = plain_probs(model, committed + path + chain_of(proposals, number)[:-1])
        assert plain[proposal.token].item() == pytest.approx(proposal.prob, abs=1e-4)
