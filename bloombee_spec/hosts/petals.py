"""Petals: 2.2.0.post1, whose servers cannot take an open session back to an earlier position, and the main branch,
whose can."""

from __future__ import annotations

from typing import Any

from bloombee_spec.hosts.petals_like import PetalsLikeHost
from bloombee_spec.hosts.sessions import ReplayOnRewind


class PetalsHost(PetalsLikeHost):
    name = "petals"
    can_rewind = False

    def extend_session(self, base: type[Any]) -> type[Any]:
        return type("ReplayingSession", (ReplayOnRewind, base), {})


class PetalsMainHost(PetalsLikeHost):
    name = "petals"
    can_rewind = True
