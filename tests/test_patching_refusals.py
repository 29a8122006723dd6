"""Whatever is not recognised is refused, named, and left alone: hosts, files and manifests."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from host_helpers import INFO, PACKAGE, VERSION
from patching_helpers import (
    NAMES,
    OTHER,
    PATCHED,
    PLUGINS,
    SERVER_FILE,
    SET_FOLDER,
    patch_status,
    run_patch,
    snapshot,
)

from bloombee_spec.patching.build import build
from bloombee_spec.patching.manifest import MANIFEST, MAX_BYTES, load_set
from bloombee_spec.patching.plan import plan_apply
from bloombee_spec.patching.unified import PatchError
from bloombee_spec.patching.write import write_changes

pytest_plugins = ("patching_trees",)


def _edit(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"# mine\n")


@pytest.mark.parametrize("victim", [PATCHED[0], PATCHED[len(PATCHED) // 2], PATCHED[-1]])
@pytest.mark.parametrize("action", ["apply", "revert"])
def test_an_edited_file_is_named_and_nothing_changes(
    host_copy: Path, capsys: pytest.CaptureFixture[str], victim: str, action: str
) -> None:
    if action == "revert":
        assert run_patch(host_copy, "apply") == 0
    _edit(host_copy / victim)
    before = snapshot(host_copy)
    assert run_patch(host_copy, action) == 1
    error = capsys.readouterr().err
    assert victim in error and "Nothing was changed" in error and "pip install --force-reinstall" in error
    assert snapshot(host_copy) == before
    assert any(text.startswith(f"unrecognised: {victim}") for text in patch_status(host_copy, capsys).values())
    assert run_patch(host_copy, "status") == 1


def test_an_edit_outside_of_the_chosen_patch_does_not_matter(host_copy: Path) -> None:
    _edit(host_copy / PACKAGE / "cli/run_server.py")  # only server-plugins changes it
    assert run_patch(host_copy, "apply", "--only", OTHER) == 0


def test_a_missing_file_is_named(host_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (host_copy / SERVER_FILE).unlink()
    before = snapshot(host_copy)
    assert run_patch(host_copy, "apply") == 1
    assert f"{SERVER_FILE} (missing)" in capsys.readouterr().err
    assert snapshot(host_copy) == before


def test_a_symbolic_link_is_not_followed(host_copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outside = tmp_path / "outside"
    shutil.move(host_copy / PACKAGE / "server", outside)
    (host_copy / PACKAGE / "server").symlink_to(outside)
    before = snapshot(tmp_path)
    assert run_patch(host_copy, "apply") == 1
    assert "symbolic link" in capsys.readouterr().err
    assert snapshot(tmp_path) == before


def test_a_file_of_absurd_size_is_refused_unread(host_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(host_copy / SERVER_FILE, MAX_BYTES + 1)
    assert run_patch(host_copy, "apply") == 1
    assert f"at most {MAX_BYTES} are expected" in capsys.readouterr().err


def test_a_read_only_folder_is_refused_before_the_first_write(
    host_copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`os.access` is replaced because everything is writable for root, which tests may run as."""
    before = snapshot(host_copy)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "server")
    assert run_patch(host_copy, "apply") == 1
    assert "no permission to write" in capsys.readouterr().err
    assert snapshot(host_copy) == before


def test_a_file_edited_between_reading_and_writing_is_not_overwritten(host_copy: Path) -> None:
    patch_set = load_set(SET_FOLDER)
    changes = plan_apply(patch_set, host_copy, patch_set.patches)
    _edit(host_copy / SERVER_FILE)
    edited = (host_copy / SERVER_FILE).read_bytes()
    with pytest.raises(PatchError, match=r"server\.py changed while"):
        write_changes(host_copy, changes)
    assert (host_copy / SERVER_FILE).read_bytes() == edited


def test_another_version_is_refused(host_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metadata = host_copy / INFO / "METADATA"
    metadata.write_text(metadata.read_text().replace(f"Version: {VERSION}", "Version: 0.1.4", 1))
    before = snapshot(host_copy)
    for action in ("apply", "revert", "status"):
        assert run_patch(host_copy, action) == 1
        error = capsys.readouterr().err
        assert f"{PACKAGE} 0.1.4 is installed" in error and f"{PACKAGE} {VERSION}" in error
    assert snapshot(host_copy) == before


def test_a_folder_without_a_host_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_patch(tmp_path, "apply") == 1
    assert "no host found" in capsys.readouterr().err
    assert run_patch(tmp_path / "absent", "apply") == 1
    assert "is not a folder" in capsys.readouterr().err


def test_a_host_described_twice_is_refused(host_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(host_copy / INFO, host_copy / f"{PACKAGE}-0.1.2.dist-info")
    assert run_patch(host_copy, "apply") == 1
    assert "more than once" in capsys.readouterr().err


def test_metadata_without_the_package_is_refused(host_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(host_copy / PACKAGE)
    assert run_patch(host_copy, "apply") == 1
    assert "editable install" in capsys.readouterr().err


def test_the_manifest_is_what_diffs_and_published_files_give(pristine: Path) -> None:
    assert build(SET_FOLDER, pristine) == json.loads((SET_FOLDER / MANIFEST).read_bytes())


def test_an_altered_diff_is_refused(set_copy: Path) -> None:
    diff = set_copy / f"{PLUGINS}.patch"
    diff.write_bytes(diff.read_bytes().replace(b"server_class", b"server_klass"))
    with pytest.raises(PatchError, match="is not the diff"):
        load_set(set_copy)


def _drop_a_file(document: dict[str, dict[str, list[str]]]) -> None:
    del document["files"][SERVER_FILE]


def _shorten_a_chain(document: dict[str, dict[str, list[str]]]) -> None:
    document["files"][SERVER_FILE].pop()


def _repeat_a_hash(document: dict[str, dict[str, list[str]]]) -> None:
    document["files"][SERVER_FILE][1] = document["files"][SERVER_FILE][0]


def _mistype_a_hash(document: dict[str, dict[str, list[str]]]) -> None:
    document["files"][SERVER_FILE][0] = "0" * 63


def _traverse_with_a_name(document: dict[str, list[dict[str, str]]]) -> None:
    document["patches"][0]["name"] = "../hivemind-imports"


def _raise_the_format(document: dict[str, int]) -> None:
    document["format"] = 2


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (_drop_a_file, "in a diff or in the manifest only"),
        (_shorten_a_chain, "one distinct hash before and after"),
        (_repeat_a_hash, "one distinct hash before and after"),
        (_mistype_a_hash, "a list of SHA-256 hashes"),
        (_traverse_with_a_name, "is not a patch name"),
        (_raise_the_format, "format 2 is not supported"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    set_copy: Path, damage: Callable[[object], None], complaint: str
) -> None:
    document = json.loads((set_copy / MANIFEST).read_bytes())
    damage(document)
    (set_copy / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(PatchError, match=complaint):
        load_set(set_copy)


def test_a_diff_outside_of_the_host_is_refused(set_copy: Path) -> None:
    diff = (set_copy / f"{PLUGINS}.patch").read_bytes().replace(f"/{PACKAGE}/".encode(), b"/torch/")
    (set_copy / f"{PLUGINS}.patch").write_bytes(diff)
    document = json.loads((set_copy / MANIFEST).read_bytes())
    document["patches"][NAMES.index(PLUGINS)]["sha256"] = hashlib.sha256(diff).hexdigest()
    (set_copy / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(PatchError, match="outside of the host's package"):
        load_set(set_copy)


def test_a_result_that_is_not_in_the_manifest_is_not_written(host_copy: Path) -> None:
    """Hashes guard the result too, not only what is there before."""
    patch_set = load_set(SET_FOLDER)
    patch_set.states[SERVER_FILE] = (*patch_set.states[SERVER_FILE][:-1], "0" * 64)
    with pytest.raises(PatchError, match="not the one in the manifest"):
        plan_apply(patch_set, host_copy, patch_set.patches)
