"""Which models can draft for which target: checked on construction, silent where they cannot read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from bloombee_spec.draft.causal_lm import TreeModel
from bloombee_spec.draft.model import ModelDraftConfig, ModelDrafter
from tests.draft_helpers import accepted, assert_probs_are_the_models, greedy, plain_probs, proposed, tiny_llama

VOCAB = 61


@pytest.fixture(scope="module")
def tree_model() -> TreeModel:
    return TreeModel(tiny_llama(vocab_size=VOCAB))


def test_ids_beyond_the_targets_vocabulary_are_never_proposed(tree_model: TreeModel) -> None:
    class Tokenizer:
        def __len__(self) -> int:
            return 40

        def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
            return {"input_ids": [ord(letter) % 40 for letter in text]}

    drafter = ModelDrafter(tree_model, vocab_size=40, tokenizer=Tokenizer(), draft_tokenizer=Tokenizer())
    drafter.start([1, 2, 3])
    tree = proposed(drafter, (), 60, 3, vocab_size=40)
    assert len(tree) == 60
    roots = [each.prob for each in tree if each.parent == -1]
    plain = plain_probs(tree_model.model, [1, 2, 3])[:40]
    assert max(roots) == pytest.approx((plain / plain.sum()).max().item(), abs=1e-5)  # no mass is left on the padding


def test_ids_that_the_drafter_cannot_read_and_long_texts_make_it_silent(tree_model: TreeModel) -> None:
    drafter = ModelDrafter(tree_model)
    drafter.start([1, VOCAB, 2])
    assert proposed(drafter) == []
    drafter.start([1, 2])
    assert proposed(drafter, path=[VOCAB]) == []
    drafter = ModelDrafter(tree_model, config=ModelDraftConfig(siblings=1, min_prob=1e-9))
    drafter.start([1] * 510)
    assert len(proposed(drafter, (), 20, 8)) == 3  # positions 510 and 511 are run, the one behind them is proposed
    drafter.observe([1] * 3)
    assert proposed(drafter) == []


def _config(name: str, **fields: Any) -> Any:
    return getattr(transformers, f"{name}Config")(vocab_size=VOCAB, **fields)


_LLAMA_LIKE = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
FAMILIES: dict[str, Callable[[], Any]] = {
    "Qwen2": lambda: _config("Qwen2", **_LLAMA_LIKE),
    "Mistral": lambda: _config("Mistral", sliding_window=16, **_LLAMA_LIKE),
    "Mixtral": lambda: _config("Mixtral", num_local_experts=4, **_LLAMA_LIKE),
    "Falcon": lambda: _config("Falcon", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=False),
    "GPTNeoX": lambda: _config(
        "GPTNeoX", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    ),
    "GPT2": lambda: _config("GPT2", n_embd=32, n_layer=2, n_head=4),
    "Bloom": lambda: _config("Bloom", hidden_size=32, n_layer=2, n_head=4),
    "Mamba": lambda: _config("Mamba", hidden_size=32, num_hidden_layers=2, state_size=4),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_drafts_correctly_or_is_refused(family: str) -> None:
    config = FAMILIES[family]()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=1.5 / parameter.shape[1] ** 0.5)
    try:
        drafter = ModelDrafter(model)
    except ValueError as error:
        assert "cannot draft trees" in str(error)
        # Falcon, GPT-2 and GPT-NeoX depend on the version of transformers.
        assert family in ("GPT2", "GPTNeoX", "Falcon", "Bloom", "Mamba"), error
        return
    assert family not in ("Bloom", "Mamba")
    drafter.start([1, 2, 3])
    assert_probs_are_the_models(drafter, [1, 2, 3], [4])
    drafter.observe([proposed(drafter)[0].token])
    assert_probs_are_the_models(drafter, drafter._stream.tokens, [])
    if family == "Mistral":
        drafter.start([1] * 17)
        assert proposed(drafter) == []  # beyond the sliding window


@pytest.mark.parametrize("ignored", ["position_ids", "attention_mask"])
def test_a_model_that_ignores_positions_or_masks_is_refused(ignored: str) -> None:
    # Seen to fail without the comparison on construction.
    model = tiny_llama(vocab_size=VOCAB)
    forward = model.forward

    def careless(**arguments: Any) -> Any:
        return forward(**{name: value for name, value in arguments.items() if name != ignored})

    model.forward = careless
    with pytest.raises(ValueError, match="differ from those on a sequence"):
        ModelDrafter(model)


def test_half_precision() -> None:
    model = tiny_llama(vocab_size=VOCAB).to(torch.bfloat16)
    drafter = ModelDrafter(model)
    drafter.start([1, 2, 3])
    assert accepted(proposed(drafter, (), 20), greedy(model, [1, 2, 3], 1)) == 1


@pytest.mark.parametrize(
    "wrong", [{"siblings": 0}, {"batch": 0}, {"decay": 0}, {"decay": 1.1}, {"min_prob": 0}, {"sharpness": 0}]
)
def test_impossible_configurations_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        ModelDraftConfig(**wrong)
