"""The real `patch` command, and what is compared before and after it. Shared by the tests of patching."""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.metadata
import json
import stat
from pathlib import Path

import pytest
from host_helpers import INFO, PACKAGE, VERSION

from bloombee_spec.cli import patch as patch_command
from bloombee_spec.patching.manifest import MANIFEST

REPOSITORY = Path(__file__).resolve().parents[1]
SET_FOLDER = next(
    manifest.parent
    for manifest in (REPOSITORY / "patches").glob(f"*/{MANIFEST}")
    if json.loads(manifest.read_bytes())["host"] == {"distribution": PACKAGE, "version": VERSION, "package": PACKAGE}
)
DOCUMENT = json.loads((SET_FOLDER / MANIFEST).read_bytes())
NAMES = [patch["name"] for patch in DOCUMENT["patches"]]
PLUGINS = "server-plugins"
OTHER = next(name for name in NAMES if name != PLUGINS)
PATCHED = sorted(DOCUMENT["files"])
FILES = len(PATCHED)
SERVER_FILE = f"{PACKAGE}/server/server.py"  # changed by server-plugins, and last by it
ORDERED = len(DOCUMENT["files"][SERVER_FILE]) > 2  # server-plugins builds on another patch


def differences_from_record(root: Path) -> list[str]:
    """Files of the package whose hash is not the one that the wheel came with."""
    wrong = []
    for record in importlib.metadata.PathDistribution(root / INFO).files or ():
        if record.hash is not None and record.parts[0] == PACKAGE:
            digest = hashlib.new(record.hash.mode, (root / record).read_bytes()).digest()
            if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != record.hash.value:
                wrong.append(str(record))
    return wrong


def snapshot(root: Path) -> dict[str, tuple[bytes, int, int]]:
    """Content, mode and owner of every file below `root`."""
    files = ((path, path.stat()) for path in root.rglob("*") if path.is_file())
    return {str(p.relative_to(root)): (p.read_bytes(), stat.S_IMODE(s.st_mode), s.st_uid) for p, s in files}


def run_patch(root: Path, *words: str) -> int:
    """Run the real command."""
    parser = argparse.ArgumentParser()
    patch_command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["patch", *words, "--host-path", str(root)])
    return int(args.run(args))


def patch_status(root: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    capsys.readouterr()
    run_patch(root, "status")
    lines = capsys.readouterr().out.splitlines()[1:]
    return {name: rest.strip() for name, rest in (line.split(maxsplit=1) for line in lines)}
