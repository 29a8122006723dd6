"""Families by `config.model_type`; more can be added through the entry-point group `bloombee_spec.families`."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from bloombee_spec.server.families.base import BlockFamily, UnsupportedModel
from bloombee_spec.server.families.bloom import BloomFamily
from bloombee_spec.server.families.falcon import FalconFamily
from bloombee_spec.server.families.llama import LlamaFamily
from bloombee_spec.server.families.mixtral import MixtralFamily
from bloombee_spec.server.families.qwen3 import Qwen3Family

FAMILIES: dict[str, type[BlockFamily]] = {
    "bloom": BloomFamily,
    "falcon": FalconFamily,
    "llama": LlamaFamily,
    "mixtral": MixtralFamily,
    "qwen3": Qwen3Family,
}


def family_for(config: Any) -> BlockFamily:
    """:raises UnsupportedModel: no family knows this model type, or the family refuses this config"""
    model_type = str(getattr(config, "model_type", "unknown"))
    family = FAMILIES.get(model_type)
    if family is None:
        found = [point for point in entry_points(group="bloombee_spec.families") if point.name == model_type]
        family = found[0].load() if found else None
    if family is None:
        raise UnsupportedModel(
            f"model type {model_type!r} has no tree forward; supported: {', '.join(sorted(FAMILIES))}"
        )
    return family(config)
