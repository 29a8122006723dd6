"""What `run_server ... --spec` loads: the entry point `spec` of the host's plugin group, such as
`bloombee.server_plugins`.

The host loads every installed plugin just to know its flags, so nothing heavy is imported before it is needed.
"""

from __future__ import annotations

import argparse
from typing import Any


class SpecPlugin:
    """Adds `--spec` and the `--spec-*` flags; with `--spec`, the server becomes one that speaks bloombee-spec too."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the plugin's flags to the host's parser."""
        from bloombee_spec.server.config import add_spec_arguments

        parser.add_argument("--spec", action="store_true", help="Serve speculative decoding too (bloombee-spec)")
        add_spec_arguments(parser)

    def server_class(self, args: dict[str, Any], base: type[Any]) -> type[Any]:
        """`base`, or with `--spec` its subclass. Removes the plugin's own keys from `args` either way.

        :raises ValueError: a `--spec-*` flag is invalid, or was set without `--spec` and would have no effect
        """
        from bloombee_spec.server.config import spec_config_from_args

        enabled = args.pop("spec")
        ignored = [] if enabled else _changed_flags(args)
        config = spec_config_from_args(args)
        if ignored:
            raise ValueError(f"{', '.join(ignored)}: no effect without --spec. Add --spec, or remove the flag")
        if not enabled:
            return base
        from bloombee_spec.hosts.base import SUPPORTED, load_host

        packages = [cls.__module__.partition(".")[0] for cls in base.__mro__]  # a plugin may have subclassed it
        host = load_host(next((package for package in packages if package in SUPPORTED), packages[0]))
        return host.server_class(config, base)


def _changed_flags(args: dict[str, Any]) -> list[str]:
    """The `--spec-*` flags whose value is not their default."""
    from bloombee_spec.server.config import add_spec_arguments

    parser = argparse.ArgumentParser(add_help=False)
    add_spec_arguments(parser)
    defaults = vars(parser.parse_args([]))
    return [f"--{key.replace('_', '-')}" for key, default in defaults.items() if args[key] != default]


plugin = SpecPlugin()
