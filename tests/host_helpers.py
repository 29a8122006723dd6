"""The host of this environment, whichever it is: tests of promises that hold on every host name none of them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from bloombee_spec.hosts.base import SUPPORTED, installed_hosts

INSTALLED = installed_hosts()
PACKAGE = next((name for name, version in INSTALLED.items() if version in SUPPORTED[name]), "bloombee")
VERSION = INSTALLED.get(PACKAGE, SUPPORTED[PACKAGE][0])
INFO = f"{PACKAGE}-{VERSION}.dist-info"
OLD_PETALS = (PACKAGE, VERSION) == ("petals", "2.2.0.post1")  # no Mixtral, no step back, an old transformers
# It has 4.34: no cache classes, no Mixtral, two kinds of RoPE scaling, fewer options of generate.
OLD_TRANSFORMERS = find_spec("transformers.cache_utils") is None
BLOOMBEE_MAIN = (PACKAGE, VERSION) == ("bloombee", "2.3.0.dev2")  # on a CPU it serves Falcon and Qwen3 only
not_on_old_petals = pytest.mark.skipif(OLD_PETALS, reason=f"{PACKAGE} {VERSION} does not have this")


def host_module(path: str) -> Any:
    """The host's module of this name, such as `server.server`."""
    return import_module(f"{PACKAGE}.{path}")


def only_on(package: str, version: str | None = None) -> pytest.MarkDecorator:
    """For tests of what only this host has, or only this version of it; elsewhere they are skipped, and the report
    says so."""
    other = package != PACKAGE or (version is not None and version != VERSION)
    needed = package if version is None else f"{package} {version}"
    return pytest.mark.skipif(other, reason=f"needs {needed}, this environment has {PACKAGE} {VERSION}")
