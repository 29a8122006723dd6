"""What a built wheel will contain."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def test_every_package_and_the_patches_are_listed_for_the_wheel() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    listed = set(re.findall(r'^    "(bloombee_spec[\w.]*)",$', text, flags=re.MULTILINE))
    folders = {path.parent.relative_to(REPOSITORY) for path in (REPOSITORY / "bloombee_spec").rglob("*.py")}
    expected = {".".join(folder.parts) for folder in folders} | {"bloombee_spec.patches"}
    assert listed == expected, "list every package under [tool.setuptools] packages in pyproject.toml"
    assert '"bloombee_spec.patches" = "patches"' in text
