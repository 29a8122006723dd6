"""The host's `run_server` command around an extended server class, on a host without the plugin hook too."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any


def run_host_command(argv: Sequence[str], server_class: type[Any], module: str) -> None:
    """Parse `argv` exactly as the host's command `module` does and run `server_class` instead of its `Server`. Blocks
    until the server ends.

    The host builds its argument parser and its server in one function, so the command's file is executed as a module
    of our own
    (never put into `sys.modules`), whose global `Server` is the extended class. The host's modules stay as they are.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.loader is None:
        raise ImportError(f"{module} was not found")
    command = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(command)
    command.__dict__["Server"] = server_class
    saved, sys.argv = sys.argv, ["bloombee-spec serve", *argv]
    try:
        command.main()
    finally:
        sys.argv = saved
