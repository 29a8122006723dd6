"""Finding the installed host and its patch set, without importing the host: unpatched, it may not be importable."""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import dataclass
from pathlib import Path

from bloombee_spec.patching.manifest import MANIFEST, PatchSet, load_set
from bloombee_spec.patching.unified import PatchError


@dataclass(frozen=True, slots=True)
class Host:
    """An installed host. `root` is the folder that holds its package (usually site-packages)."""

    patch_set: PatchSet
    root: Path


def patches_directory() -> Path:
    """`patches/` as packaged next to this package, or at the top of a source checkout.

    :raises PatchError: neither is there
    """
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "patches", package.parent / "patches"):
        if any(candidate.glob(f"*/{MANIFEST}")):
            return candidate
    raise PatchError(f"no patches found next to {package}: reinstall bloombee-spec")


def load_all(directory: Path) -> list[PatchSet]:
    """Every patch set below `directory`, sorted by folder name."""
    return [load_set(manifest.parent) for manifest in sorted(directory.glob(f"*/{MANIFEST}"))]


def find_host(patch_sets: list[PatchSet], path: Path | None = None) -> Host:
    """The one installed host that a patch set is made for.

    :param path: the folder that holds the host's package and its `.dist-info`; None looks where Python itself looks
    :raises PatchError: no host, several hosts, or a host of another version
    """
    if path is not None and not path.is_dir():
        raise PatchError(f"{path} is not a folder")
    where = "in this Python environment" if path is None else f"in {path}"
    names = sorted({patch_set.distribution for patch_set in patch_sets})
    candidates = ((name, _installed(name, path)) for name in names)
    found = {name: distribution for name, distribution in candidates if distribution is not None}
    if not found:
        hint = "" if path is None else " (--host-path takes the folder that holds both the package and its .dist-info)"
        raise PatchError(f"no host found {where}{hint}; patches exist for: {_hosts(patch_sets)}")
    if len(found) > 1:
        raise PatchError(f"several hosts found {where}: {', '.join(found)}")
    ((name, distribution),) = found.items()
    for patch_set in patch_sets:
        if patch_set.distribution == name and patch_set.version == distribution.version:
            return Host(patch_set, _root(distribution, patch_set.package))
    raise PatchError(
        f"{name} {distribution.version} is installed {where}, but patches exist for {_hosts(patch_sets)} only. "
        f"Nothing was changed. Install one of those versions, or use bloombee-spec without patching"
    )


def _installed(name: str, path: Path | None) -> importlib.metadata.Distribution | None:
    search = sys.path if path is None else [str(path)]
    found = list(importlib.metadata.distributions(name=name, path=search))
    if path is not None and len(found) > 1:
        versions = ", ".join(distribution.version for distribution in found)
        raise PatchError(f"{path} describes {name} more than once ({versions}): reinstall it")
    return found[0] if found else None


def _root(distribution: importlib.metadata.Distribution, package: str) -> Path:
    init = Path(str(distribution.locate_file(f"{package}/__init__.py")))
    if not init.is_file():
        raise PatchError(
            f"{distribution.metadata['Name']} {distribution.version} is installed, but {init} does not exist "
            f"(an editable install?). Nothing was changed. Name the folder that holds the package with --host-path"
        )
    return init.parent.parent


def _hosts(patch_sets: list[PatchSet]) -> str:
    return ", ".join(patch_set.host for patch_set in patch_sets)
