"""Writing planned changes: each file appears complete or not at all, keeps its mode, and two runs never interleave."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bloombee_spec.patching.plan import Change
from bloombee_spec.patching.unified import PatchError


@contextmanager
def exclusive(package: Path) -> Iterator[None]:
    """Hold the host's package folder for this process. The lock leaves no file behind and dies with the process.

    :raises PatchError: another run holds it, or the folder cannot be opened
    """
    try:
        descriptor = os.open(package, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise PatchError(f"cannot open {package}: {error}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PatchError(f"another run is patching {package} at the moment: wait for it and try again") from None
        yield
    finally:
        os.close(descriptor)


def write_changes(root: Path, changes: Sequence[Change]) -> None:
    """Rewrite the files one after the other. Call under `exclusive`.

    An interruption leaves every file either old or new, and both are recognised by the next run.

    :raises PatchError: a folder is read-only (nothing was changed), a file changed since it was read, or writing
        failed half-way; the text says which
    """
    folders = {(root / change.path).parent for change in changes}
    for folder in sorted(folders):
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PatchError(f"no permission to write in {folder}. Nothing was changed. Run as the owner of the host")
    for done, change in enumerate(changes):
        try:
            _replace(root / change.path, change)
        except OSError as error:
            raise PatchError(
                f"cannot write {root / change.path}: {error}. {done} of {len(changes)} files are written: "
                f"run 'apply' to complete them or 'revert' to undo them, once the cause is gone"
            ) from error
    for folder in folders:
        _sync_folder(folder)


def remove_leftovers(root: Path, paths: Sequence[str]) -> None:
    """Remove the temporary files that a killed run may have left. Call under `exclusive`."""
    for path in paths:
        _temporary(root / path).unlink(missing_ok=True)


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.bloombee-spec.tmp")


def _replace(target: Path, change: Change) -> None:
    status = target.stat()
    if target.read_bytes() != change.before:
        raise PatchError(f"{target} changed while the host was being patched. Run the command again")
    temporary = _temporary(target)
    # O_EXCL: never write through a link that somebody has put there.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(change.after)
            stream.flush()
            if os.geteuid() == 0:  # only root can keep a foreign owner, and only root needs to
                os.fchown(stream.fileno(), status.st_uid, status.st_gid)
            os.fchmod(stream.fileno(), stat.S_IMODE(status.st_mode))
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
