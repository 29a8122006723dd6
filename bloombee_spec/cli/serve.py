"""`bloombee-spec serve`: the host's server with the plugin's service beside its own handlers."""

from __future__ import annotations

import argparse
from typing import Any

from bloombee_spec.server.config import add_spec_arguments, spec_config_from_args


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve blocks as the host's run_server does, for plain and plugin clients alike",
        description="Every flag of the host's run_server is accepted as it is; `--host-help` lists them.",
        usage="%(prog)s MODEL [flags of the host's run_server] [--spec-… flags]",
        allow_abbrev=False,
    )
    parser.add_argument("--host-help", action="store_true", help="show the flags of the host's run_server and exit")
    add_spec_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from bloombee_spec.cli.report import fail
    from bloombee_spec.hosts.base import HostError, load_host

    try:
        config = spec_config_from_args(vars(args))
        host = load_host()
    except (HostError, ValueError) as e:
        return fail(str(e))
    host.serve(["--help"] if args.host_help else args.rest, config)
    return 0
