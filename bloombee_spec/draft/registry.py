"""Temporary."""
from typing import Any
def drafter_factory(drafter: Any, *, vocab_size: int) -> Any:
    if callable(drafter):
        return drafter
    from bloombee_spec.draft.suffix import SuffixDrafter
    return SuffixDrafter
