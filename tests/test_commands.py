"""The commands as a person types them: help, what `doctor` finds, and one sentence for everything that is missing."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_helpers import SCRIPT, command, edit_copy, make_site
from host_helpers import INFO, PACKAGE, VERSION

import bloombee_spec

pytest_plugins = ("patching_trees",)

INSTALLED = f"{PACKAGE} {VERSION}"
WORKS = "bloombee 0.1.3, bloombee 2.3.0.dev2, petals 2.2.0.post1, petals 2.3.0.dev2"


@pytest.fixture(scope="module")
def hostless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_site(tmp_path_factory.mktemp("hostless") / "site", without=[PACKAGE, INFO])


@pytest.fixture(scope="module")
def other_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = make_site(tmp_path_factory.mktemp("other") / "site", without=[])
    edit_copy(site, INFO, "METADATA", f"Version: {VERSION}", "Version: 9.8.7")
    return site


@pytest.fixture(scope="module")
def new_transformers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = make_site(tmp_path_factory.mktemp("new") / "site", without=[])
    edit_copy(site, "transformers", "__init__.py", '__version__ = "4.', '__version__ = "99.')
    return site


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        yield taken.getsockname()[1]


def lines_of(done: subprocess.CompletedProcess[str]) -> dict[str, tuple[str, str]]:
    """`doctor`'s lines: what was checked, to (ok or FAIL, the rest)."""
    found = {}
    for line in done.stdout.splitlines():
        verdict = " ok " if " ok " in line[:20] else " FAIL "
        name, rest = line.split(verdict, 1)
        found[name.strip()] = verdict.strip(), rest.strip()
    return found


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The one line on standard error of a command that could not do its job."""
    lines = [line for line in done.stderr.splitlines() if "undefined symbol" not in line]  # of bitsandbytes, at import
    assert done.returncode == 1 and len(lines) == 1 and lines[0].startswith("bloombee-spec: "), done.stderr
    return lines[0]


# --- help ---------------------------------------------------------------------------------------------------------


def test_the_installed_script_says_its_version() -> None:
    done = subprocess.run([str(SCRIPT), "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == f"bloombee-spec {bloombee_spec.__version__}"


def test_help_lists_the_commands(hostless: Path) -> None:
    done = command("--help", site=hostless)
    assert done.returncode == 0 and all(name in done.stdout for name in ("serve", "doctor", "patch", "plan"))
    for name in ("serve", "doctor", "patch", "plan"):
        assert command(name, "--help", site=hostless).returncode == 0, name


def test_help_of_serve_lists_the_plugins_flags_and_host_help_the_hosts() -> None:
    ours = command("serve", "--help")
    assert ours.returncode == 0 and {"--host-help", "--spec-heads", "--spec-max-rows"} <= set(ours.stdout.split())
    hosts = command("serve", "--host-help")
    assert hosts.returncode == 0
    assert all(flag in hosts.stdout for flag in ("--block_indices", "--initial_peers", "--quant_type", "--adapters"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("serve", "MODEL", "--spec-max-lanes", "-1"), "max_lanes is -1, expected a positive number"),
        (("serve", "MODEL", "--spec-alloc-timeout", "0"), "alloc_timeout is 0.0, expected a positive number"),
    ],
)
def test_an_impossible_limit_is_one_sentence(words: tuple[str, ...], sentence: str) -> None:
    assert sentence in complaint(command(*words))


def test_unknown_words_are_refused_by_who_knows_them() -> None:
    ours = command("doctor", "--no-such-flag")
    assert ours.returncode == 2 and "unrecognized arguments: --no-such-flag" in ours.stderr
    hosts = command("serve", "MODEL", "--no-such-flag", "--spec-heads", "both")
    assert (
        hosts.returncode == 2 and "bloombee-spec serve: error: unrecognized arguments: --no-such-flag" in hosts.stderr
    )
    heads = command("serve", "MODEL", "--spec-heads", "three")
    assert heads.returncode == 2 and "invalid choice: 'three'" in heads.stderr


# --- doctor -------------------------------------------------------------------------------------------------------


def test_doctor_finds_nothing_wrong_here(toy_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        free = probe.getsockname()[1]
    done = command("doctor", "--model", str(toy_path), "--port", str(free))
    lines = lines_of(done)
    assert list(lines) == ["host", "patches", "host import", "hivemind", "p2pd", "torch", f"port {free}", "model"]
    assert {verdict for verdict, _ in lines.values()} == {"ok"} and done.returncode == 0, done.stdout
    assert lines["host"][1] == INSTALLED
    assert lines["model"][1] == "llama, 8 blocks, family llama, vocabulary 211"


def test_doctor_says_what_is_wrong_with_model_and_ports(tmp_path: Path, listening: int) -> None:
    done = command("doctor", "--model", str(tmp_path), "--port", str(listening), "--port", "70000")
    lines = lines_of(done)
    assert done.returncode == 1
    verdict, used = lines[f"port {listening}"]
    assert verdict == "FAIL" and "cannot listen" in used and "choose another --port" in used
    assert lines["port 70000"] == ("FAIL", "no such port: choose one from 1 to 65535")
    verdict, model = lines["model"]
    assert verdict == "FAIL" and str(tmp_path) in model and "config.json" in model
    assert {lines[name][0] for name in ("host", "patches", "host import", "hivemind", "p2pd", "torch")} == {"ok"}


def test_doctor_without_a_host(hostless: Path) -> None:
    done = command("doctor", "--model", "misspelt", site=hostless)
    lines = lines_of(done)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert lines["host"] == ("FAIL", f"found none; works with {WORKS}: pip install 'bloombee-spec[bloombee]'")
    assert lines["patches"][0] == "FAIL" and lines["patches"][1].startswith("no host found in this Python environment")
    assert lines["host import"][1].startswith("no swarm host is installed")
    assert {lines[name][0] for name in ("hivemind", "p2pd", "torch")} == {"ok"}
    assert lines["model"] == ("FAIL", "'misspelt' is neither a directory nor a hub name like org/model")


def test_doctor_of_a_host_as_published(pristine: Path) -> None:
    lines = lines_of(command("doctor", first=[pristine]))
    assert lines["host"] == ("ok", INSTALLED)
    assert lines["patches"] == ("FAIL", "hivemind-imports is not applied: run `bloombee-spec patch apply`")
    assert lines["host import"][0] == "FAIL" and "cannot be imported" in lines["host import"][1]


# --- what is missing ----------------------------------------------------------------------------------------------


def test_serve_without_a_host_is_one_sentence(hostless: Path) -> None:
    said = complaint(command("serve", "MODEL", "--block_indices", "0:1", site=hostless))
    assert "no swarm host is installed" in said and WORKS in said


def test_serve_on_an_unsupported_host_names_what_was_found_and_what_works(other_version: Path) -> None:
    said = complaint(command("serve", "MODEL", site=other_version))
    assert f"found {PACKAGE} 9.8.7, which this version does not support" in said and WORKS in said


def test_serve_on_a_host_as_published_names_the_command_that_helps(pristine: Path) -> None:
    said = complaint(command("serve", "MODEL", first=[pristine]))
    assert "cannot be imported" in said and "run `bloombee-spec patch apply`" in said


def test_serve_passes_on_why_the_host_refuses_its_environment(new_transformers: Path) -> None:
    said = complaint(command("serve", "MODEL", site=new_transformers))
    assert f"{INSTALLED} does not work in this environment" in said and "transformers" in said


def test_patch_without_a_host(hostless: Path) -> None:
    done = command("patch", "status", site=hostless)
    assert done.returncode == 1 and done.stderr.startswith("error: no host found") and WORKS in done.stderr
