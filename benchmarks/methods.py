"""The methods that benchmarks compare, as plain data for a client process."""

from __future__ import annotations

from typing import Any

Method = dict[str, Any]

HOST: Method = {"name": "host plain", "kind": "host"}
PLAIN: Method = {"name": "plugin plain", "kind": "plugin", "config": {"speculate": False}}
SUFFIX: Method = {"name": "plugin suffix", "kind": "plugin", "drafter": "suffix"}


def host_speculative(dropped_layers: int) -> Method:
    return {
        "name": f"host speculative (target - {dropped_layers} layers)",
        "kind": "host-speculative",
        "dropped_layers": dropped_layers,
    }


def scripted(acceptance: float, **script: Any) -> Method:
    """A drafter that replays the target's own output and errs on purpose: says what the system does at this
    acceptance."""
    name = f"plugin scripted(h={acceptance:g})"
    return {"name": name, "kind": "plugin", "script": {"acceptance": acceptance, **script}}
