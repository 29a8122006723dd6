"""BloomBee 0.1.3: Petals' main branch renamed."""

from __future__ import annotations

from bloombee_spec.hosts.petals_like import PetalsLikeHost


class BloomBeeHost(PetalsLikeHost):
    name = "bloombee"
    can_rewind = True
