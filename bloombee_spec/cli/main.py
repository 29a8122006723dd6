"""`bloombee-spec`: one command, one module per sub-command. Heavy imports happen only in the sub-command that needs
them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

import bloombee_spec

COMMANDS = ("serve", "drain", "generate", "api", "doctor", "patch", "plan")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bloombee-spec", description=bloombee_spec.__doc__)
    parser.add_argument("--version", action="version", version=f"bloombee-spec {bloombee_spec.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        import_module(f"bloombee_spec.cli.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and args.command != "serve":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.rest = rest
    return int(args.run(args) or 0)


if __name__ == "__main__":
    sys.exit(main())
