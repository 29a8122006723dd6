"""Recomputing a manifest: `python -m bloombee_spec.patching.build PATCH_SET PRISTINE`, after a diff was edited."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bloombee_spec.patching.manifest import MANIFEST, read_bounded, sha256
from bloombee_spec.patching.unified import apply, parse


def build(directory: Path, pristine: Path) -> dict[str, Any]:
    """The manifest of `directory` with every hash recomputed; host, names, order and summaries are kept.

    :param pristine: the folder that holds the host's package exactly as published
    :raises PatchError: a diff does not apply, in order, to the published files
    """
    document: dict[str, Any] = json.loads(read_bounded(directory / MANIFEST))
    contents: dict[str, bytes] = {}
    chains: dict[str, list[str]] = {}
    for entry in document["patches"]:
        text = read_bounded(directory / f"{entry['name']}.patch")
        entry["sha256"] = sha256(text)
        for diff in parse(text):
            if diff.path not in contents:
                contents[diff.path] = read_bounded(pristine / diff.path)
                chains[diff.path] = [sha256(contents[diff.path])]
            contents[diff.path] = apply(diff, contents[diff.path])
            chains[diff.path].append(sha256(contents[diff.path]))
    document["files"] = dict(sorted(chains.items()))
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="a patch set, such as patches/bloombee-0.1.3")
    parser.add_argument("pristine", type=Path, help="folder that holds the host's package as published")
    args = parser.parse_args()
    document = build(args.directory, args.pristine)
    (args.directory / MANIFEST).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
