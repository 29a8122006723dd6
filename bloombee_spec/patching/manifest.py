"""The manifest of a patch set: which host it is for, and the hash of every file before and after each patch."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloombee_spec.patching.unified import FileDiff, PatchError, parse

MANIFEST = "manifest.json"
FORMAT = 1
MAX_BYTES = 4 * 2**20  # of a manifest, a diff or a patched file; real ones are a few ten KB

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Patch:
    """One diff of a set. `name` is what `--only` takes; `diffs` has one entry per file."""

    name: str
    summary: str
    diffs: dict[str, FileDiff]


@dataclass(frozen=True, slots=True)
class PatchSet:
    """The patches of one exact host version, in the order in which they apply.

    :param distribution: the host's name on the package index
    :param version: the only version that the patches are for
    :param package: the host's top-level import package; every patched file lies in it
    :param states: per file (relative to the folder that holds `package`) the SHA-256 of its original content, then of
        its content after each patch that changes it, in order
    """

    distribution: str
    version: str
    package: str
    patches: tuple[Patch, ...]
    states: dict[str, tuple[str, ...]]

    @property
    def host(self) -> str:
        return f"{self.distribution} {self.version}"

    def touching(self, path: str) -> tuple[Patch, ...]:
        """The patches that change `path`, in order: the k-th leads from `states[path][k]` to `states[path][k + 1]`."""
        return tuple(patch for patch in self.patches if path in patch.diffs)

    def select(self, name: str | None) -> tuple[Patch, ...]:
        """The patch called `name`, or all of them for None."""
        chosen = tuple(patch for patch in self.patches if name in (None, patch.name))
        if not chosen:
            raise PatchError(f"no patch is called {name!r}; there are: {', '.join(p.name for p in self.patches)}")
        return chosen


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_bounded(path: Path) -> bytes:
    """The content of `path`, refused before reading when it is larger than any file that belongs here.

    :raises PatchError: too large
    :raises OSError: missing or unreadable
    """
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise PatchError(f"{path} has {size} bytes; at most {MAX_BYTES} are expected")
    return path.read_bytes()


def load_set(directory: Path) -> PatchSet:
    """Read `directory/manifest.json` and the diffs that it names, and check that they belong together.

    :raises PatchError: malformed, a diff was altered, or manifest and diffs do not cover the same files
    """
    where = directory / MANIFEST
    try:
        document = json.loads(read_bounded(where))
    except (OSError, ValueError) as error:
        raise PatchError(f"cannot read {where}: {error}") from error
    if _field(document, "format", int, where) != FORMAT:
        raise PatchError(f"{where}: format {document['format']} is not supported (expected {FORMAT})")
    host = _field(document, "host", dict, where)
    package = _field(host, "package", str, where)
    patches = tuple(_load_patch(directory, entry, package) for entry in _field(document, "patches", list, where))
    if len({patch.name for patch in patches}) != len(patches):
        raise PatchError(f"{where}: two patches have the same name")
    states = {path: _hashes(path, chain, where) for path, chain in _field(document, "files", dict, where).items()}
    patch_set = PatchSet(
        distribution=_field(host, "distribution", str, where),
        version=_field(host, "version", str, where),
        package=package,
        patches=patches,
        states=states,
    )
    touched = {path for patch in patches for path in patch.diffs}
    if touched != set(states):
        raise PatchError(
            f"{where}: these files are in a diff or in the manifest only: {sorted(touched ^ set(states))}"
        )
    for path, chain in states.items():
        if len(chain) != 1 + len(patch_set.touching(path)) or len(set(chain)) != len(chain):
            raise PatchError(f"{where}: {path} needs one distinct hash before and after each of its patches")
    return patch_set


def _load_patch(directory: Path, entry: Any, package: str) -> Patch:
    where = directory / MANIFEST
    name = _field(entry, "name", str, where)
    if not _NAME.fullmatch(name):
        raise PatchError(f"{where}: {name!r} is not a patch name (lower-case words joined by '-')")
    source = directory / f"{name}.patch"
    try:
        text = read_bounded(source)
    except OSError as error:
        raise PatchError(f"cannot read {source}: {error}") from error
    if sha256(text) != _field(entry, "sha256", str, where):
        raise PatchError(f"{source} is not the diff that {MANIFEST} describes (its SHA-256 is {sha256(text)})")
    diffs = {diff.path: diff for diff in parse(text)}
    for path in diffs:
        if not path.startswith(f"{package}/"):
            raise PatchError(f"{source} changes {path}, which is outside of the host's package {package!r}")
    return Patch(name, _field(entry, "summary", str, where), diffs)


def _hashes(path: str, chain: Any, where: Path) -> tuple[str, ...]:
    if not isinstance(chain, list) or not all(isinstance(item, str) and _SHA256.fullmatch(item) for item in chain):
        raise PatchError(f"{where}: {path} needs a list of SHA-256 hashes")
    return tuple(chain)


def _field(document: Any, key: str, kind: type, where: Path) -> Any:
    if not isinstance(document, dict) or not isinstance(document.get(key), kind):
        raise PatchError(f"{where}: {key!r} is missing or not of type {kind.__name__}")
    return document[key]
