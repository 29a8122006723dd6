"""Deciding what to write: every file is read, recognised, transformed and verified in memory before any write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bloombee_spec.patching.manifest import Patch, PatchSet, sha256
from bloombee_spec.patching.state import FileState, inspect_file
from bloombee_spec.patching.unified import PatchError, apply, reverse


@dataclass(frozen=True, slots=True)
class Change:
    """One file to rewrite. `before` is what was read, `after` what is to be there."""

    path: str
    before: bytes
    after: bytes


def plan_apply(patch_set: PatchSet, root: Path, patches: Sequence[Patch]) -> list[Change]:
    """The changes that bring every file of `patches` to the state after them; files already there are left out.

    :raises PatchError: a file is not recognised, or an earlier patch that is not among `patches` is missing
    """
    changes: list[Change] = []
    for path, state, chain in _involved(patch_set, root, patches):
        wanted = [index for index, patch in enumerate(chain) if patch in patches]
        start, stop = _known(state), max(_known(state), wanted[-1] + 1)
        for index in range(start, stop):
            if index not in wanted:
                raise PatchError(
                    f"{path}: {chain[wanted[-1]].name} builds on {chain[index].name}, which is not applied. Nothing "
                    f"was changed. Apply {chain[index].name} first, or all patches together"
                )
        changes += _change(patch_set, chain, state, stop)
    return changes


def plan_revert(patch_set: PatchSet, root: Path, patches: Sequence[Patch]) -> list[Change]:
    """The changes that bring every file of `patches` to the state before them; files already there are left out.

    :raises PatchError: a file is not recognised, or a later patch that is not among `patches` is still applied
    """
    changes: list[Change] = []
    for path, state, chain in _involved(patch_set, root, patches):
        wanted = [index for index, patch in enumerate(chain) if patch in patches]
        start, stop = min(_known(state), wanted[0]), _known(state)
        for index in range(start, stop):
            if index not in wanted:
                raise PatchError(
                    f"{path}: {chain[index].name} is applied on top of {chain[wanted[0]].name}. Nothing was changed. "
                    f"Revert {chain[index].name} first, or all patches together"
                )
        changes += _change(patch_set, chain, state, start)
    return changes


def _involved(
    patch_set: PatchSet, root: Path, patches: Sequence[Patch]
) -> list[tuple[str, FileState, tuple[Patch, ...]]]:
    """Every file of `patches` with its state and the patches that touch it; refuses when any is not recognised."""
    paths = [path for path in patch_set.states if any(path in patch.diffs for patch in patches)]
    states = [inspect_file(patch_set, root, path) for path in paths]
    unknown = [f"{state.path} ({state.problem})" for state in states if state.applied is None]
    if unknown:
        raise PatchError(
            f"not a file of {patch_set.host} as published or as patched: {'; '.join(unknown)}. Nothing was changed. "
            f"If you edited the host, put your changes aside; then restore it with\n"
            f"    pip install --force-reinstall --no-deps {patch_set.distribution}=={patch_set.version}\n"
            f"and run this command again"
        )
    return [(path, state, patch_set.touching(path)) for path, state in zip(paths, states)]


def _known(state: FileState) -> int:
    assert state.applied is not None, "unrecognised files were refused before"
    return state.applied


def _change(patch_set: PatchSet, chain: tuple[Patch, ...], state: FileState, target: int) -> list[Change]:
    """The rewrite that leads from `state` to `target` applied patches; each intermediate content is verified too."""
    path, content = state.path, state.content
    current = _known(state)
    while current != target:
        if current < target:
            content = apply(chain[current].diffs[path], content)
            current += 1
        else:
            current -= 1
            content = apply(reverse(chain[current].diffs[path]), content)
        if sha256(content) != patch_set.states[path][current]:
            raise PatchError(
                f"{path}: the result is not the one in the manifest. Nothing was changed. Reinstall bloombee-spec"
            )
    return [] if content == state.content else [Change(path, state.content, content)]
