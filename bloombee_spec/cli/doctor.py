"""`bloombee-spec doctor`: one line per thing that has to work, each ok or with what to do."""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from bloombee_spec.cli.report import say
from bloombee_spec.hosts.base import SUPPORTED, HostError, installed_hosts, load_host
from bloombee_spec.patching.unified import PatchError


class Problem(Exception):
    """What is wrong, and what to do."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("doctor", help="check host, libp2p daemon, patches, device, ports and a model")
    parser.add_argument("--model", help="checkpoint (directory or hub name) whose readability is checked")
    parser.add_argument("--port", type=int, action="append", default=[], help="TCP port that a server shall listen on")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    checks: list[tuple[str, Callable[[], str]]] = [
        ("host", _host), ("patches", _patches),
        ("host import", _host_import), ("hivemind", _hivemind), ("p2pd", _p2pd),
        ("torch", _torch),
    ]  # fmt: skip
    checks += [(f"port {port}", partial(_port, port)) for port in args.port]
    if args.model:
        checks.append(("model", partial(_model, args.model)))
    failed = 0
    for name, check in checks:
        try:
            say(f"{name:12} ok    {check()}")
        except Exception as e:
            failed += 1
            say(f"{name:12} FAIL  {e if isinstance(e, (Problem, HostError, PatchError)) else repr(e)}")
    return 1 if failed else 0


def _host() -> str:
    found = installed_hosts()
    good = [f"{name} {version}" for name, version in found.items() if version in SUPPORTED.get(name, ())]
    if good:
        return ", ".join(good)
    works = ", ".join(f"{name} {version}" for name, versions in SUPPORTED.items() for version in versions)
    listed = ", ".join(f"{name} {version}" for name, version in found.items()) or "none"
    raise Problem(f"found {listed}; works with {works}: pip install 'bloombee-spec[bloombee]'")


def _patches() -> str:
    from bloombee_spec.patching.host import find_host, load_all, patches_directory
    from bloombee_spec.patching.state import PatchState, report

    host = find_host(load_all(patches_directory()), None)
    states = {patch.name: report(host.patch_set, host.root, patch) for patch in host.patch_set.patches}
    for name, found in states.items():
        if found.state is PatchState.UNRECOGNISED or (
            name == "hivemind-imports" and found.state is not PatchState.APPLIED
        ):
            raise Problem(f"{name} is {found.state.value}: run `bloombee-spec patch apply`")
    return ", ".join(f"{name} {found.state.value}" for name, found in states.items())


def _host_import() -> str:
    return f"{load_host().name} imports"


def _hivemind() -> str:
    try:
        return metadata.version("hivemind")
    except metadata.PackageNotFoundError:
        raise Problem("not installed: pip install 'bloombee-spec[bloombee]'") from None


def _p2pd() -> str:
    from hivemind.p2p import P2P

    async def start() -> str:
        p2p = await P2P.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"], dht_mode="client", startup_timeout=20)
        peer = p2p.peer_id.to_base58()
        await p2p.shutdown()
        return f"starts ({peer[-8:]})"

    try:
        return asyncio.run(start())
    except Exception as e:
        raise Problem(f"the libp2p daemon does not start: {e}; reinstall hivemind==1.1.12 for this platform") from e


def _torch() -> str:
    import torch

    device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    return f"{torch.__version__}, device {device}, {torch.get_num_threads()} threads"


def _port(port: int) -> str:
    if not 0 < port < 65536:
        raise Problem("no such port: choose one from 1 to 65535")
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError as e:
            raise Problem(f"cannot listen: {e}; choose another --port or stop what uses it") from None
    return "free"


def _model(model: str) -> str:
    from transformers import AutoConfig

    from bloombee_spec.server.families.registry import family_for
    from bloombee_spec.server.heads import load_tensors

    if not Path(model).is_dir() and "/" not in model:
        raise Problem(f"{model!r} is neither a directory nor a hub name like org/model")
    try:
        config = AutoConfig.from_pretrained(model)
        family = family_for(config)
        name = family.heads.embedding
        tensors = load_tensors(model, [name])
    except Exception as e:
        raise Problem(f"{model}: {e}") from e
    blocks, vocabulary = config.num_hidden_layers, len(tensors[name])
    return f"{config.model_type}, {blocks} blocks, family {family.name}, vocabulary {vocabulary}"
