"""What a family cannot compute exactly is refused with the reason before anything is served."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from family_helpers import bloom_case, falcon_case, mixtral_case
from test_llama_forward import make as llama_block
from torch import nn

from bloombee_spec.hosts.container import StageContainer
from bloombee_spec.server.families.base import UnsupportedModel
from bloombee_spec.server.families.llama import LlamaFamily
from bloombee_spec.server.families.registry import FAMILIES, family_for
from bloombee_spec.server.families.rotary import inverse_frequencies


def config(model_type: str, **options: Any) -> Any:
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
    falcon = {"alibi": False, "new_decoder_architecture": False, "multi_query": False, "parallel_attn": True}
    return SimpleNamespace(model_type=model_type, **{**sizes, **falcon, **options})


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (config("mixtral", sliding_window=4096), "sliding window of 4096"),
        (config("mixtral", rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "sequence length"),
        (config("falcon", rope_scaling={"type": "linear", "factor": 2.0}), "RoPE scaling"),
        (
            SimpleNamespace(model_type="mamba"),
            "'mamba' has no tree forward; supported: bloom, falcon, llama, mix",
        ),
        (SimpleNamespace(), "'unknown' has no tree forward"),
    ],
)
def test_a_config_is_refused_with_the_reason(refused: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        family_for(refused)


def test_no_sliding_window_is_served() -> None:
    assert family_for(config("mixtral", sliding_window=None)).name == "mixtral"


def test_rope_parameters_of_transformers_5_are_read_and_are_no_scaling() -> None:
    rope = {"rope_type": "default", "rope_theta": 500.0}
    family = family_for(config("falcon", rope_scaling=rope, rope_parameters=rope))
    assert torch.equal(family._frequencies, inverse_frequencies(500.0, family.head_dim))  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [bloom_case, mixtral_case, lambda: falcon_case(multi_query=False)])
def test_a_block_without_a_part_is_refused(make: Any) -> None:
    case = make()
    case.family.check(case.block)
    attention = "self_attn" if case.family.name == "mixtral" else "self_attention"
    delattr(case.block, attention)
    with pytest.raises(UnsupportedModel, match=f"no {attention}.* not a {case.family.name.capitalize()} block"):
        case.family.check(case.block)
    with pytest.raises(UnsupportedModel, match="Linear has no input_layernorm"):
        case.family.check(nn.Linear(2, 2))


def test_a_falcon_whose_host_block_rotates_otherwise_is_refused() -> None:
    """The host's Falcon block always rotates with a theta of 10,000, whatever the config says."""
    case = falcon_case(multi_query=False, rope_theta=500_042.0)
    with pytest.raises(UnsupportedModel, match=r"ignores the config's rope_theta \(500042\)"):
        case.family.check(case.block)


class TwoNormLlama(LlamaFamily):
    name = "twonorm"


def test_an_installed_package_can_add_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    from bloombee_spec.server.families import registry

    point = SimpleNamespace(name="twonorm", load=lambda: TwoNormLlama)
    asked = []

    def entry_points(group: str) -> list[Any]:
        asked.append(group)
        return [point]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    family = family_for(SimpleNamespace(model_type="twonorm", rope_scaling=None))
    assert type(family) is TwoNormLlama and asked == ["bloombee_spec.families"]
    with pytest.raises(UnsupportedModel, match="'rwkv'"):
        family_for(SimpleNamespace(model_type="rwkv"))
    assert "twonorm" not in FAMILIES


def test_blocks_that_are_split_over_devices_are_refused() -> None:
    """Starting such a server takes two GPUs, splitting a block does not."""
    tensor_parallel = pytest.importorskip("tensor_parallel")
    split = tensor_parallel.TensorParallel(llama_block(6, 6, 16)[1], [torch.device("cpu")] * 2)
    assert len(split.module_shards) == 2
    asked = SimpleNamespace(create_args={"block_indices": [0]})
    with pytest.raises(UnsupportedModel, match="tensor-parallel"):
        StageContainer._loaded(asked, {"toy.0": SimpleNamespace(module=split)}, {})
