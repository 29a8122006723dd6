"""Which host is loaded, and a session of the host's own that goes back to an earlier position, on every host."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from host_helpers import INSTALLED, PACKAGE, host_module, only_on
from swarm_helpers import PLAIN, ROUTES, client

from bloombee_spec.hosts import base
from bloombee_spec.hosts.base import SUPPORTED, HostError, host_package, load_host
from bloombee_spec.patching.host import load_all, patches_directory

STEPS = (7, 1, 1, 4)  # rows of each step


def having(monkeypatch: pytest.MonkeyPatch, **found: str) -> None:
    monkeypatch.setattr(base, "installed_hosts", lambda: found)


@pytest.mark.skipif(not INSTALLED, reason="no host is installed")
def test_the_adapter_is_the_installed_hosts() -> None:
    host = load_host()
    assert (host.name, host.version) == (PACKAGE, INSTALLED[PACKAGE]) and host.version in SUPPORTED[PACKAGE]


def test_a_supported_host_is_found_beside_an_unsupported_one(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, bloombee="9.8.7", petals="2.2.0.post1")
    assert host_package() == "petals"
    having(monkeypatch, bloombee="0.1.3", petals="2.2.0.post1")
    assert host_package() == "bloombee"


def test_what_is_not_supported_is_named_with_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, petals="2.1.0")
    for call in (host_package, load_host, lambda: load_host("petals")):
        with pytest.raises(HostError, match=r"petals 2\.1\.0.*works with bloombee 0\.1\.3, .*petals 2\.2\.0\.post1"):
            call()
    having(monkeypatch)
    for call in (host_package, load_host):
        with pytest.raises(HostError, match=r"no swarm host is installed.*petals 2\.2\.0\.post1"):
            call()
    with pytest.raises(HostError, match=r"petals \(not installed\) is not supported"):
        load_host("petals")


def test_every_supported_version_has_its_patches_and_its_plugin_group() -> None:
    declared = {(patches.distribution, patches.version) for patches in load_all(patches_directory())}
    assert {(name, version) for name, versions in SUPPORTED.items() for version in versions} == declared
    project = (patches_directory().parent / "pyproject.toml").read_text()
    for patches in load_all(patches_directory()):
        assert f'[project.entry-points."{patches.package}.server_plugins"]' in project


def test_no_adapter_but_its_own_names_a_host() -> None:
    """What hosts share takes the package's name from the adapter."""
    for name in ("petals_like", "container", "sessions", "serve"):
        tree = ast.parse(Path(str(inspect.getfile(base))).with_name(f"{name}.py").read_text())
        imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        modules = {alias.name for node in imports for alias in node.names}
        modules |= {str(node.module) for node in imports if isinstance(node, ast.ImportFrom)}
        assert not {module.partition(".")[0] for module in modules} & set(SUPPORTED), name


@pytest.mark.skipif(not INSTALLED, reason="no host is installed")
def test_the_plugin_extends_the_host_that_loaded_it() -> None:
    from bloombee_spec.hosts.plugin import plugin
    from bloombee_spec.server.config import SpecServerConfig, spec_config_from_args

    server = host_module("server.server").Server
    between = type("ServerOfAnotherPlugin", (server,), {"__module__": "some_plugin.of_somebody"})
    args = {"spec": True, **_spec_defaults()}
    extended = plugin.server_class(args, between)
    assert issubclass(extended, between) and args == {}
    assert issubclass(extended.container_class, sys.modules[server.__module__].ModuleContainer)
    assert extended.container_class.spec_config == SpecServerConfig() == spec_config_from_args(_spec_defaults())


def _spec_defaults() -> dict[str, Any]:
    import argparse

    from bloombee_spec.server.config import add_spec_arguments

    parser = argparse.ArgumentParser()
    add_spec_arguments(parser)
    return vars(parser.parse_args([]))


# --- a session that goes back -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def connected(request: pytest.FixtureRequest) -> Iterator[Any]:
    with client(request.getfixturevalue("swarm"), PLAIN, ROUTES[2]) as model:
        yield model


def rows_of(model: Any, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, model.config.vocab_size, (sum(STEPS),), generator=generator)
    return load_host().embed(model, tokens.tolist())[None]


def through(session: Any, rows: torch.Tensor, start: int = 0) -> torch.Tensor:
    outputs, at = [], 0
    with torch.inference_mode():
        for step in STEPS:
            if at >= start:
                outputs.append(session.step(rows[:, at : at + step]))
            at += step
    return torch.cat(outputs, dim=1)


@pytest.mark.swarm
@pytest.mark.parametrize("timeout", [None, 30.0], ids=["retrying", "failing fast"])
def test_a_session_goes_back_and_on_with_other_rows(connected: Any, timeout: float | None) -> None:
    host, first, other = load_host(), rows_of(connected, 0), rows_of(connected, 1)
    mixed = torch.cat([first[:, : STEPS[0]], other[:, STEPS[0] :]], dim=1)
    sessions = [host.new_session(connected, 64, timeout=timeout) for _ in range(2)]
    try:
        expected = through(sessions[0], mixed)
        through(sessions[1], first)
        assert sessions[1].position == sum(STEPS)
        sessions[1].position = STEPS[0]
        assert sessions[1].position == STEPS[0]
        got = through(sessions[1], mixed, start=STEPS[0])
        assert sessions[1].position == sum(STEPS)
        assert (got - expected[:, STEPS[0] :]).abs().max() < 1e-5
        assert [span.end for span in host.session_route(sessions[1])] == [4, 8]
    finally:
        for session in sessions:
            host.close_session(session)


@pytest.mark.swarm
@only_on("petals", "2.2.0.post1")
def test_a_session_that_would_replay_something_else_refuses(connected: Any) -> None:
    host, rows = load_host(), rows_of(connected, 2)
    session = host.new_session(connected, 64, timeout=30.0)
    try:
        with torch.inference_mode():
            session.step(rows[:, :3], hypo_ids=torch.zeros(1, dtype=torch.int64))
        for value in (-1, 4):
            with pytest.raises(ValueError, match=rf"position {value} is not in 0\.\.3"):
                session.position = value
        with pytest.raises(RuntimeError, match="reordered batch"):
            session.position = 1
        assert session.position == 3
    finally:
        host.close_session(session)
