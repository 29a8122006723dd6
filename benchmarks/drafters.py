"""Drafters that only a benchmark has: scripted ones that know the answer, and cut-down copies of the target."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from bloombee_spec.draft.base import Drafter
from bloombee_spec.draft.scripted import Script, ScriptedDrafter


def make_drafter_factory(script: dict[str, Any], job: dict[str, Any]) -> Callable[[], Drafter]:
    """A scripted drafter for the job at hand: it replays `job["target"]`, the tokens that the host decoded before,
    with seeded errors.

    No drafter of production quality exists for the test model; this one shows what the system does with one of a given
    quality.
    """

    def make() -> Drafter:
        return ScriptedDrafter([*job["ids"], *job["target"]], job["vocab_size"], Script(**script))

    return make


def without_layers(model: Any, dropped: int) -> Any:
    """A copy of a Llama without `dropped` of its layers, taken evenly from its inner ones."""
    small = copy.deepcopy(model)
    n = len(small.model.layers)
    gone = {round(1 + (i + 0.5) * (n - 2) / dropped) for i in range(dropped)}
    kept = [layer for i, layer in enumerate(small.model.layers) if i not in gone]
    for i, layer in enumerate(kept):
        layer.self_attn.layer_idx = i
    small.model.layers = type(small.model.layers)(kept)
    small.config.num_hidden_layers = len(kept)
    return small
