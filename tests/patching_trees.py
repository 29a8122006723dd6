"""Fixtures: copies of the installed host to patch.

The published tree is rebuilt by reverting whatever is applied to the installed package, and compared with the hashes
that pip recorded at installation, which this project did not write.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from host_helpers import INFO, PACKAGE
from patching_helpers import SET_FOLDER, differences_from_record

from bloombee_spec.patching.host import find_host, load_all, patches_directory
from bloombee_spec.patching.plan import plan_revert
from bloombee_spec.patching.unified import PatchError
from bloombee_spec.patching.write import write_changes


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the host's package exactly as published, and its dist-info."""
    try:
        host = find_host(load_all(patches_directory()))
    except PatchError as error:
        pytest.skip(f"needs the host that the patches are for: {error}")
    root = tmp_path_factory.mktemp("pristine")
    shutil.copytree(host.root / PACKAGE, root / PACKAGE, ignore=shutil.ignore_patterns("__pycache__", "*.tmp"))
    shutil.copytree(host.root / INFO, root / INFO)
    write_changes(root, plan_revert(host.patch_set, root, host.patch_set.patches))
    assert differences_from_record(root) == []
    return root


@pytest.fixture
def host_copy(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "site"))


@pytest.fixture
def set_copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SET_FOLDER, tmp_path / "set"))
