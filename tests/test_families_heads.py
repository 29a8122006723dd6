"""Both ends of the model from each family's checkpoint, against the transformers model that wrote it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import toy_models
from bloombee_spec.server.families.base import UnsupportedModel
from bloombee_spec.server.heads import Heads

CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda path: toy_models.make_toy_llama(path, num_layers=1),
    "llama-tied": lambda path: toy_models.make_toy_llama(path, num_layers=1, tied=True),
    "mixtral": lambda path: toy_models.make_toy_mixtral(path, num_layers=1),
    "falcon": lambda path: toy_models.make_toy_falcon(path, num_layers=1),
    "falcon-untied": lambda path: toy_models.make_toy_falcon(path, num_layers=1, tied=False),
    "bloom": lambda path: toy_models.make_toy_bloom(path, num_layers=1),
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "mixtral":
        pytest.importorskip("transformers.models.mixtral", reason="this transformers version has no Mixtral")
    return CHECKPOINTS[request.param](tmp_path_factory.mktemp("heads") / request.param)


def heads(path: Path, **changes: Any) -> Heads:
    config = changes.pop("config", None) or AutoConfig.from_pretrained(path)
    wanted = {"embed": True, "lm_head": True, "dtype": torch.float32, "device": torch.device("cpu"), **changes}
    return Heads(str(path), config, **wanted)


@torch.inference_mode()
def test_both_ends_equal_transformers(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, torch_dtype=torch.float32).eval()
    ids = [3, 0, 210, 17, 3]
    into_block: list[torch.Tensor] = []
    into_norm: list[torch.Tensor] = []
    base = model.base_model
    block = (base.layers if hasattr(base, "layers") else base.h)[0]
    norm = base.norm if hasattr(base, "norm") else base.ln_f
    block.register_forward_pre_hook(lambda _, args: into_block.append(args[0]))
    norm.register_forward_pre_hook(lambda _, args: into_norm.append(args[0]))
    logits = model(torch.tensor([ids])).logits[0]
    ends = heads(checkpoint)
    assert torch.equal(ends.embed(ids), into_block[0][0])
    assert (ends.logits(into_norm[0][0]) - logits).abs().max() < 1e-5


def test_a_stage_loads_only_the_end_it_has(checkpoint: Path) -> None:
    first, last = heads(checkpoint, lm_head=False), heads(checkpoint, embed=False)
    assert (first.embeds, first.verifies, last.embeds, last.verifies) == (True, False, False, True)
    with pytest.raises(AssertionError, match="no LM head"):
        first.logits(torch.zeros(1, 96))
    with pytest.raises(AssertionError, match="no embeddings"):
        last.embed([1])


def test_sizes_that_the_config_does_not_say_are_refused(checkpoint: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoint)
    config.vocab_size = 210
    with pytest.raises(UnsupportedModel, match=r"has shape \(211, 96\), the config says \(210, 96\)"):
        heads(checkpoint, config=config)


def test_a_checkpoint_with_other_names_is_refused(tmp_path: Path) -> None:
    path = toy_models.make_toy_llama(tmp_path / "llama", num_layers=1)
    config = AutoConfig.from_pretrained(toy_models.make_toy_bloom(tmp_path / "bloom", num_layers=1))
    with pytest.raises(UnsupportedModel, match=r"has no word_embeddings\.weight, ln_f\.weight"):
        heads(path, config=config)
