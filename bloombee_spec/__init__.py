"""Many tokens per network lap for BloomBee and Petals swarms, with output identical to the swarm's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bloombee_spec.config import SpecConfig

if TYPE_CHECKING:
    from bloombee_spec.client.model import AutoDistributedSpecModelForCausalLM
    from bloombee_spec.client.stats import SpecStats

__version__ = "0.1.0"
__all__ = ["AutoDistributedSpecModelForCausalLM", "SpecConfig", "SpecStats"]

_LAZY = {
    "AutoDistributedSpecModelForCausalLM": "bloombee_spec.client.model",
    "SpecStats": "bloombee_spec.client.stats",
}


def __getattr__(name: str) -> Any:
    """Public names are loaded when first used: importing the package imports neither torch models nor a host."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
