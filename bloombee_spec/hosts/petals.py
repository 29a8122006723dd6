"""Petals 2.2.0.post1. Its servers cannot take an open session back to an earlier position."""

from __future__ import annotations

from typing import Any

from bloombee_spec.hosts.petals_like import PetalsLikeHost
from bloombee_spec.hosts.sessions import ReplayOnRewind


class PetalsHost(PetalsLikeHost):
    name = "petals"
    can_rewind = False

    def extend_session(self, base: type[Any]) -> type[Any]:
        return type("ReplayingSession", (ReplayOnRewind, base), {})
