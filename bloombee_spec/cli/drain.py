"""`bloombee-spec drain`: end a server politely, so that what it holds moves to others first."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

POLL_S = 0.2


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "drain",
        help="end a server on this machine politely: its sessions move to other servers first",
        description="Sends SIGTERM, which the server announces to its clients, and waits until the server is gone. "
        "How long it goes on serving is the server's own --spec-leave-timeout.",
    )
    parser.add_argument("pid", type=int, help="process id of the server (its main process)")
    parser.add_argument(
        "--timeout", type=float, default=90.0, help="seconds to wait for its end (default: %(default)g)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from bloombee_spec.cli.report import fail

    try:
        if args.pid <= 1 or args.pid == os.getpid():
            return fail(f"{args.pid} is no server's process id")
        os.kill(args.pid, signal.SIGTERM)
    except ProcessLookupError:
        return fail(f"no process {args.pid} is running")
    except PermissionError:
        return fail(f"process {args.pid} belongs to another user")
    deadline = time.monotonic() + args.timeout
    while _runs(args.pid):
        if time.monotonic() > deadline:
            return fail(f"process {args.pid} still runs after {args.timeout:g} s; it was asked to leave, not forced")
        time.sleep(POLL_S)
    return 0


def _runs(pid: int) -> bool:
    """Whether it still does something: one that only waits for its parent to look has ended."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not Path("/proc/self").exists()  # else it ended just now, and the number is another's
