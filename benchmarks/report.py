"""What all benchmarks do with their results: a table for the terminal, JSON for later."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.runner import git_revision

RESULTS = Path(__file__).parent / "results"


def aligned(head: Sequence[object], rows: Sequence[Sequence[object]], *, rule: bool = False) -> str:
    """Columns as wide as their widest cell; `rule` draws a line below the head."""
    lines = [[str(cell) for cell in line] for line in (head, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
    if rule:
        text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)


def earlier(name: str, settings: dict[str, object]) -> dict[str, Any] | None:
    """What a run with the same settings wrote before, for those that go on with it."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return None
    document: dict[str, Any] = json.loads(path.read_text())
    return document if document["settings"] == settings else None


def write(name: str, document: dict[str, object]) -> Path:
    """`benchmarks/results/NAME.json`, with the revision that was measured."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"revision": git_revision(), **document}, indent=1))
    return path
