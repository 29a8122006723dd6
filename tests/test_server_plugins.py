"""The patched host loads plugins, and this project's plugin leaves a server alone without its flag."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from host_helpers import PACKAGE
from patching_helpers import (
    REPOSITORY,
    run_patch,
)

pytest_plugins = ("patching_trees",)


TOY_PLUGIN = """
class Toy:
    def add_arguments(self, parser):
        parser.add_argument("--toy-level", type=int, default=0, help="level of the toy")

    def server_class(self, args, base):
        level = args.pop("toy_level")
        if not level:
            return base

        class ToyServer(base):
            def __init__(self, **kwargs):
                print("TOY", level, kwargs["converted_model_name_or_path"], "toy_level" in kwargs)
                raise SystemExit(7)

        return ToyServer

toy = Toy()
"""

CONTAINER_CHECK = f"""
from {PACKAGE}.server.server import ModuleContainer, Server

class Chosen(Exception):
    pass

class Recorder:
    @classmethod
    def create(cls, **kwargs):
        raise Chosen(kwargs["block_indices"], kwargs["start"])

class Sub(Server):
    container_class = Recorder
    __init__ = lambda self: None
    __getattr__ = lambda self, name: None
    _choose_blocks = lambda self: range(2)

assert Server.container_class is ModuleContainer
try:
    Sub().run()
except Chosen as chosen:
    print("CHOSEN", *chosen.args)
"""

SPEC_CHECK = f"""
import sys
from {PACKAGE}.cli import run_server
from {PACKAGE}.server import server

def stop(self, **kwargs):
    left = [key for key in kwargs if key.startswith("spec")]
    print("SERVER", type(self) is not server.Server, isinstance(self, server.Server), left)
    raise SystemExit(7)

server.Server.__init__ = stop
sys.argv = ["run_server", "MODEL", "--spec", "--spec-heads", "both"]
run_server.main()
"""


@pytest.fixture(scope="module")
def patched_host(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = Path(shutil.copytree(pristine, tmp_path_factory.mktemp("patched") / "site"))
    assert run_patch(root, "apply") == 0
    return root


@pytest.fixture(scope="module")
def plugin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two installed plugins: a toy, and this project's own under the entry point that pyproject.toml declares."""
    declared = re.search(
        rf'\[project\.entry-points\."{PACKAGE}\.server_plugins"\]\n(spec = "[\w.:]+")',
        (REPOSITORY / "pyproject.toml").read_text(),
    )
    assert declared is not None
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "toy_plugin.py").write_text(TOY_PLUGIN)
    _declare(folder, "toy_plugin", "toy = toy_plugin:toy")
    _declare(folder, "bloombee_spec", declared[1].replace('"', ""))
    return folder


def _declare(folder: Path, name: str, entry_point: str) -> None:
    info = folder / f"{name}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{PACKAGE}.server_plugins]\n{entry_point}\n")


def _python(paths: list[Path], cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, [*paths, REPOSITORY])),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_plugins_add_their_flags_to_the_patched_host(patched_host: Path, plugin_folder: Path, tmp_path: Path) -> None:
    paths = [plugin_folder, patched_host]
    shown = _python(paths, tmp_path, "-m", f"{PACKAGE}.cli.run_server", "--help")
    assert shown.returncode == 0, shown.stderr
    flags = set(re.findall(r"^  (--[\w-]+)", shown.stdout, flags=re.MULTILINE))
    assert {"--num_blocks", "--toy-level", "--spec", "--spec-heads"} <= flags


def test_a_plugin_provides_the_server_class(patched_host: Path, plugin_folder: Path, tmp_path: Path) -> None:
    command = ("-m", f"{PACKAGE}.cli.run_server", "MODEL", "--toy-level", "3")
    run = _python([plugin_folder, patched_host], tmp_path, *command)
    assert run.returncode == 7, run.stderr
    assert "TOY 3 MODEL False" in run.stdout


def test_this_projects_plugin_provides_the_server_class(
    patched_host: Path, plugin_folder: Path, tmp_path: Path
) -> None:
    run = _python([plugin_folder, patched_host], tmp_path, "-c", SPEC_CHECK)
    assert run.returncode == 7, run.stderr
    assert "SERVER True True []" in run.stdout


def test_a_subclass_chooses_its_container(patched_host: Path, tmp_path: Path) -> None:
    run = _python([patched_host], tmp_path, "-c", CONTAINER_CHECK)
    assert "CHOSEN range(0, 2) True" in run.stdout, run.stderr


def _parsed(*words: str) -> dict[str, object]:
    from bloombee_spec.hosts.plugin import plugin

    parser = argparse.ArgumentParser()
    parser.add_argument("--other", default="kept")
    plugin.add_arguments(parser)
    return vars(parser.parse_args(words))


def test_without_its_flag_the_plugin_leaves_the_server_alone() -> None:
    from bloombee_spec.hosts.plugin import plugin

    args = _parsed()
    assert plugin.server_class(args, dict) is dict
    assert args == {"other": "kept"}


def test_a_spec_option_without_spec_is_an_error() -> None:
    from bloombee_spec.hosts.plugin import plugin

    with pytest.raises(ValueError, match=r"--spec-heads.*no effect without --spec"):
        plugin.server_class(_parsed("--spec-heads", "both"), dict)
