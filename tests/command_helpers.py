"""The real command in a process of its own, and environments in which something is missing.

An environment is a folder of links to the installed packages without some of them. Python is started with `-S`, so
that it sees that folder instead of its own site-packages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import psutil
from host_helpers import INFO, PACKAGE

REPOSITORY = Path(__file__).resolve().parents[1]
SITE_PACKAGES = Path(sysconfig.get_paths()["purelib"])
SCRIPT = Path(sys.executable).parent / "bloombee-spec"
LIMIT_S = 240


def command(*words: str, site: Path | None = None, first: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
    """Run `bloombee-spec WORDS`.

    :param site: instead of the installed packages
    :param first: folders that are searched before the installed packages
    """
    return subprocess.run(
        [*interpreter(site), "-m", "bloombee_spec.cli.main", *words],
        env=environment(*first, *([] if site is None else [site])),
        capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=REPOSITORY,
    )  # fmt: skip


def interpreter(site: Path | None = None) -> list[str]:
    return [sys.executable] if site is None else [sys.executable, "-S"]


def environment(*first: Path) -> dict[str, str]:
    path = os.pathsep.join(map(str, [*first, REPOSITORY]))
    quiet = {"PYTHONWARNINGS": "ignore::FutureWarning"}  # of an old transformers about a new torch
    return {**os.environ, **quiet, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}


def make_site(folder: Path, *, without: Sequence[str]) -> Path:
    """A folder of links to all installed packages but those named in `without`."""
    folder.mkdir(parents=True)
    assert all((SITE_PACKAGES / name).exists() for name in without)
    for entry in SITE_PACKAGES.iterdir():
        if entry.name not in without:
            (folder / entry.name).symlink_to(entry)
    return folder


def edit_copy(site: Path, name: str, file: str, old: str, new: str) -> None:
    """Replace the link `name` by a folder of links, in which `file` is a copy with `old` replaced by `new`."""
    link = site / name
    source = link.resolve()
    link.unlink()
    link.mkdir()
    for entry in source.iterdir():
        if entry.name != file:
            (link / entry.name).symlink_to(entry)
    text = (source / file).read_text()
    assert old in text
    (link / file).write_text(text.replace(old, new))


def copy_host(folder: Path) -> Path:
    """A folder with copies of the installed host's package and its dist-info."""
    for name in (PACKAGE, INFO):
        ignored = shutil.ignore_patterns("__pycache__", "*.tmp")
        shutil.copytree(SITE_PACKAGES / name, folder / name, ignore=ignored)
    return folder


def alive_with(name: str, value: str) -> list[psutil.Process]:
    """Living processes in whose environment the variable `name` has this value."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(name) == value:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
