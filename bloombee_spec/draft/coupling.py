"""At T > 0 a drafter that knows the target's noise guesses what it will draw, not merely what is likely."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from bloombee_spec.draft.base import Drafter

# Position of a token in the sequence (the first one is 0) -> the Exp(1) noise that the target draws it with, a tensor
# `[vocab]`.
NoiseSource = Callable[[int], Any]


@runtime_checkable
class Couplable(Protocol):
    """A drafter that can use the target's noise."""

    def couple(self, noise: NoiseSource | None, temperature: float) -> None:
        """Propose for a target that commits `argmin E / p`, with p at this temperature; T = 0 for a greedy one.

        :param noise: E; None when it is not known, or at T = 0
        """


def couple(drafter: Drafter, noise: NoiseSource | None, temperature: float) -> bool:
    """Couple a drafter to the target's draws if it can make use of them; returns whether it can."""
    if not isinstance(drafter, Couplable):
        return False
    drafter.couple(noise, temperature)
    return True
