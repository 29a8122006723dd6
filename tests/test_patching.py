"""Patches of the installed host: applied exactly, reverted byte for byte, recovered after any interruption."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from host_helpers import PACKAGE
from patching_helpers import (
    FILES,
    NAMES,
    ORDERED,
    OTHER,
    PLUGINS,
    SERVER_FILE,
    differences_from_record,
    patch_status,
    run_patch,
    snapshot,
)

from bloombee_spec.patching.write import exclusive

pytest_plugins = ("patching_trees",)


def test_revert_restores_every_byte_mode_and_owner(host_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (host_copy / SERVER_FILE).chmod(0o640)
    if os.geteuid() == 0:
        os.chown(host_copy / SERVER_FILE, 12345, 12345)
    before = snapshot(host_copy)
    assert patch_status(host_copy, capsys) == dict.fromkeys(NAMES, "not applied")
    assert run_patch(host_copy, "apply") == 0
    assert patch_status(host_copy, capsys) == dict.fromkeys(NAMES, "applied")
    after = snapshot(host_copy)
    assert len(differences_from_record(host_copy)) == FILES
    assert {path: rights for path, (_, *rights) in after.items()} == {p: rights for p, (_, *rights) in before.items()}
    assert run_patch(host_copy, "revert") == 0
    assert snapshot(host_copy) == before


def test_applying_or_reverting_twice_writes_nothing(host_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_patch(host_copy, "apply") == 0
    done = snapshot(host_copy)
    with monkeypatch.context() as context:
        context.setattr(os, "replace", _must_not_run)
        assert run_patch(host_copy, "apply") == 0
    assert snapshot(host_copy) == done
    assert run_patch(host_copy, "revert") == 0
    monkeypatch.setattr(os, "replace", _must_not_run)
    assert run_patch(host_copy, "revert") == 0


def _must_not_run(*_: object) -> None:
    raise AssertionError("a file was written")


@pytest.mark.skipif(not ORDERED, reason="no patch of this host builds on another")
def test_patches_apply_in_order_and_revert_in_reverse_order(
    host_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(host_copy)
    assert run_patch(host_copy, "apply", "--only", PLUGINS) == 1
    assert f"Apply {OTHER} first" in capsys.readouterr().err
    assert snapshot(host_copy) == before
    assert run_patch(host_copy, "apply", "--only", OTHER) == 0
    assert patch_status(host_copy, capsys) == {OTHER: "applied", PLUGINS: "not applied"}
    imports_only = snapshot(host_copy)
    assert run_patch(host_copy, "apply", "--only", PLUGINS) == 0
    both = snapshot(host_copy)
    assert run_patch(host_copy, "revert", "--only", OTHER) == 1
    assert f"Revert {PLUGINS} first" in capsys.readouterr().err
    assert snapshot(host_copy) == both
    assert run_patch(host_copy, "revert", "--only", PLUGINS) == 0
    assert snapshot(host_copy) == imports_only
    assert run_patch(host_copy, "revert", "--only", OTHER) == 0
    assert snapshot(host_copy) == before


def test_an_unknown_patch_name_lists_the_known_ones(host_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_patch(host_copy, "apply", "--only", "nonsense") == 1
    error = capsys.readouterr().err
    assert all(name in error for name in NAMES)


def test_hard_links_of_a_package_cache_keep_their_content(host_copy: Path, tmp_path: Path) -> None:
    """Some installers link site-packages into a cache that other environments share."""
    cached = tmp_path / "cached.py"
    os.link(host_copy / SERVER_FILE, cached)
    before = cached.read_bytes()
    assert run_patch(host_copy, "apply") == 0
    assert cached.read_bytes() == before != (host_copy / SERVER_FILE).read_bytes()


@pytest.mark.parametrize("action", ["apply", "revert"])
@pytest.mark.parametrize("written", [0, 1, FILES // 2, FILES - 1])
@pytest.mark.parametrize("recovery", ["apply", "revert"])
def test_a_run_that_fails_half_way_is_completed_or_undone(
    host_copy: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    action: str,
    written: int,
    recovery: str,
) -> None:
    original = snapshot(host_copy)
    assert run_patch(host_copy, "apply") == 0
    patched = snapshot(host_copy)
    if action == "apply":
        assert run_patch(host_copy, "revert") == 0
    start = snapshot(host_copy)
    with monkeypatch.context() as context:
        context.setattr(os, "replace", _failing_after(written, _no_space))
        assert run_patch(host_copy, action) == 1
    assert f"{written} of {FILES} files are written" in capsys.readouterr().err
    middle = snapshot(host_copy)
    assert middle.keys() == original.keys(), "temporary files were left"
    assert sum(middle[path] != start[path] for path in start) == written
    if written == FILES // 2:
        assert any("partly applied" in text for text in patch_status(host_copy, capsys).values())
    assert run_patch(host_copy, recovery) == 0
    assert snapshot(host_copy) == (patched if recovery == "apply" else original)


@pytest.mark.parametrize("recovery", ["apply", "revert"])
def test_a_killed_run_leaves_nothing_that_the_next_one_does_not_clean(host_copy: Path, recovery: str) -> None:
    """SIGKILL between writing a temporary file and renaming it: neither `finally` nor the lock's release runs."""
    original = snapshot(host_copy)
    child = os.fork()
    if child == 0:
        os.replace = _failing_after(FILES // 2, lambda: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[assignment]
        run_patch(host_copy, "apply")
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    left = snapshot(host_copy)
    assert len(left.keys() - original.keys()) == 1, "the killed run should have left its temporary file"
    assert run_patch(host_copy, recovery) == 0
    assert snapshot(host_copy).keys() == original.keys()
    if recovery == "revert":
        assert snapshot(host_copy) == original
    else:
        assert len(differences_from_record(host_copy)) == FILES


def _failing_after(count: int, failure: Callable[[], None]) -> Callable[[Path, Path], None]:
    """`os.replace` that works `count` times and then calls `failure` instead."""
    real, calls = os.replace, 0

    def replace(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls > count:
            failure()
        real(source, target)

    return replace


def _no_space() -> None:
    raise OSError(28, "No space left on device")


def test_a_second_run_at_the_same_time_is_refused(host_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(host_copy)
    with exclusive(host_copy / PACKAGE):
        assert run_patch(host_copy, "apply") == 1
    assert "another run" in capsys.readouterr().err
    assert snapshot(host_copy) == before
    assert run_patch(host_copy, "apply") == 0, "the lock must end with the run"
