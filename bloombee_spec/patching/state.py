"""What is applied: each file is recognised on its own, by its hash, so a half-finished run is just a mixed state."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from bloombee_spec.patching.manifest import Patch, PatchSet, read_bounded, sha256
from bloombee_spec.patching.unified import PatchError


@dataclass(frozen=True, slots=True)
class FileState:
    """A host file as it is on the disk.

    :param applied: how many of the patches that touch the file are in it, or None when its content is unknown
    :param content: its bytes, when recognised
    :param problem: why it is not recognised, or an empty string
    """

    path: str
    applied: int | None
    content: bytes = b""
    problem: str = ""


class PatchState(Enum):
    APPLIED = "applied"
    NOT_APPLIED = "not applied"
    PARTLY_APPLIED = "partly applied"
    UNRECOGNISED = "unrecognised"


@dataclass(frozen=True, slots=True)
class PatchReport:
    """The state of one patch over its files; `problems` names the files that are not recognised."""

    state: PatchState
    applied_files: int
    total_files: int
    problems: tuple[str, ...]


def inspect_file(patch_set: PatchSet, root: Path, path: str) -> FileState:
    """Read `root/path` and find its content among the known states. Never raises for what it finds there."""
    target = root / path
    if target.is_symlink() or target.resolve() != root.resolve() / path:
        return FileState(path, None, problem="reached through a symbolic link")
    try:
        if not target.is_file():
            return FileState(path, None, problem="missing")
        content = read_bounded(target)
    except (OSError, PatchError) as error:
        return FileState(path, None, problem=str(error))
    digest = sha256(content)
    chain = patch_set.states[path]
    if digest not in chain:
        return FileState(path, None, problem=f"its SHA-256 {digest} is none of the {len(chain)} known ones")
    return FileState(path, chain.index(digest), content)


def report(patch_set: PatchSet, root: Path, patch: Patch) -> PatchReport:
    """The state of `patch` in the host at `root`."""
    applied = 0
    problems: list[str] = []
    for path in patch.diffs:
        state = inspect_file(patch_set, root, path)
        if state.applied is None:
            problems.append(f"{path} ({state.problem})")
        elif state.applied > patch_set.touching(path).index(patch):
            applied += 1
    if problems:
        overall = PatchState.UNRECOGNISED
    elif applied == len(patch.diffs):
        overall = PatchState.APPLIED
    else:
        overall = PatchState.PARTLY_APPLIED if applied else PatchState.NOT_APPLIED
    return PatchReport(overall, applied, len(patch.diffs), tuple(problems))
