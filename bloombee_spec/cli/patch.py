"""`bloombee-spec patch`: show, apply or revert the changes that a host needs, verified by hashes, never silently."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bloombee_spec.patching.host import Host
    from bloombee_spec.patching.manifest import Patch

DESCRIPTION = """\
Show, apply or revert small source changes of the installed host. The host is identified by its exact name and version,
and each file by its SHA-256, before anything is written; what is not recognised is refused and left alone. 'revert'
restores every file byte for byte. An interrupted run is completed or undone by running 'apply' or 'revert' again.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `patch` command."""
    parser = subparsers.add_parser("patch", help="show, apply or revert changes of the host", description=DESCRIPTION)
    parser.add_argument("action", choices=("status", "apply", "revert"))
    parser.add_argument("--only", metavar="NAME", help="just this patch (default: all, in order)")
    parser.add_argument(
        "--host-path",
        type=Path,
        metavar="DIR",
        help="folder that holds the host's package and its .dist-info (default: the host of this Python environment)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `patch`. 0 is success; 1 means that something was refused or, for `status`, not recognised."""
    from bloombee_spec.patching.host import find_host, load_all, patches_directory
    from bloombee_spec.patching.unified import PatchError

    try:
        host = find_host(load_all(patches_directory()), args.host_path)
        patches = host.patch_set.select(args.only)
        print(f"{host.patch_set.host} in {host.root}")
        if args.action == "status":
            return _status(host, patches)
        return _change(host, patches, args.action)
    except (PatchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _status(host: Host, patches: tuple[Patch, ...]) -> int:
    from bloombee_spec.patching.state import PatchState, report

    width = max(len(patch.name) for patch in patches)
    recognised = True
    for patch in patches:
        found = report(host.patch_set, host.root, patch)
        detail = ""
        if found.state is PatchState.PARTLY_APPLIED:
            detail = f" ({found.applied_files} of {found.total_files} files: run 'apply' or 'revert' to finish)"
        elif found.state is PatchState.UNRECOGNISED:
            detail = f": {'; '.join(found.problems)}"
            recognised = False
        print(f"{patch.name:{width}}  {found.state.value}{detail}")
    return 0 if recognised else 1


def _change(host: Host, patches: tuple[Patch, ...], action: str) -> int:
    from bloombee_spec.patching.plan import plan_apply, plan_revert
    from bloombee_spec.patching.write import exclusive, remove_leftovers, write_changes

    plan = plan_apply if action == "apply" else plan_revert
    with exclusive(host.root / host.patch_set.package):
        changes = plan(host.patch_set, host.root, patches)
        remove_leftovers(host.root, list(host.patch_set.states))
        write_changes(host.root, changes)
    print(f"{len(changes)} files changed" if changes else "nothing to do")
    return _status(host, patches)
