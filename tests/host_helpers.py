"""The host of this environment, whichever it is: tests of promises that hold on every host name none of them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from bloombee_spec.hosts.base import SUPPORTED, installed_hosts

INSTALLED = installed_hosts()
PACKAGE = next((name for name, version in INSTALLED.items() if version in SUPPORTED[name]), "bloombee")
VERSION = INSTALLED.get(PACKAGE, SUPPORTED[PACKAGE][0])
INFO = f"{PACKAGE}-{VERSION}.dist-info"


def host_module(path: str) -> Any:
    """The host's module of this name, such as `server.server`."""
    return import_module(f"{PACKAGE}.{path}")


def only_on(package: str) -> pytest.MarkDecorator:
    """For tests of what only this host has; elsewhere they are skipped, and the report says so."""
    return pytest.mark.skipif(package != PACKAGE, reason=f"needs {package}, this environment has {PACKAGE} {VERSION}")
