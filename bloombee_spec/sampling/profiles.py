"""What each acceptance rule demands of the drafts, whether it is exact, and what one verification costs on the wire.

One rule per session. In particular the keyed noise, which the keyed rule shares with the drafter, must never meet a
test of p against q: a rejected draft says something about the noise, and whatever is drawn with it next is biased.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Drafts(Enum):
    """How the drafted tokens came about."""

    KEYED = "argmax of the drafter's scores plus the target's noise"
    SAMPLED = "independent draws from q"
    DETERMINISTIC = "most likely tokens, look-ups, anything without randomness"


@dataclass(frozen=True, slots=True)
class Verified:
    """One verification, as far as its cost on the wire depends on it.

    :param drafted: nodes sent to the verifier
    :param accepted: nodes kept
    :param vocab: tokens in the vocabulary
    :param parents: nodes that have children, the root included (`drafted` for a chain)
    :param top_k: entries of each row of p on a top-k downlink
    """

    drafted: int
    accepted: int
    vocab: int
    parents: int = 0
    top_k: int = 64

    @property
    def rejected(self) -> bool:
        return self.accepted < self.drafted

    @property
    def id_bytes(self) -> int:
        return max(1, ((self.vocab - 1).bit_length() + 7) // 8)


@dataclass(frozen=True, slots=True)
class WireBytes:
    """Payload of one verification in bytes, to the verifier (`up`) and back (`down`)."""

    up: int
    down: int


PROBABILITY_BYTES = 2  # a 16-bit float
COUNT_BYTES = 1


def keyed_bytes(run: Verified) -> WireBytes:
    """Ids up, ids down."""
    return WireBytes(run.drafted * run.id_bytes, (run.accepted + 1) * run.id_bytes)


def leviathan_bytes(run: Verified) -> WireBytes:
    """DSSD: an id and its q up; down the number accepted, and a row of p after a rejection or else the next id."""
    row_or_id = run.vocab * PROBABILITY_BYTES if run.rejected else run.id_bytes
    return WireBytes(run.drafted * (run.id_bytes + PROBABILITY_BYTES), COUNT_BYTES + row_or_id)


def block_bytes(run: Verified) -> WireBytes:
    """An id and its row of q up: the verifier needs whole rows to know how many drafts to keep."""
    return WireBytes(run.drafted * (run.id_bytes + run.vocab * PROBABILITY_BYTES), COUNT_BYTES + run.id_bytes)


def specinfer_bytes(run: Verified) -> WireBytes:
    """Ids and one row of q per node with children up, ids down."""
    up = run.drafted * run.id_bytes + run.parents * run.vocab * PROBABILITY_BYTES
    return WireBytes(up, (run.accepted + 1) * run.id_bytes)


def top_k_bytes(run: Verified) -> WireBytes:
    """Ids up; down the k largest entries of p, with their ids, after each of the drafts and before the first."""
    return WireBytes(run.drafted * run.id_bytes, (run.drafted + 1) * run.top_k * (run.id_bytes + PROBABILITY_BYTES))


@dataclass(frozen=True, slots=True)
class RuleProfile:
    """A rule as a session negotiates it."""

    name: str
    exact: bool
    drafts: frozenset[Drafts]
    bytes: Callable[[Verified], WireBytes]

    def check_drafts(self, drafts: Drafts) -> None:
        """:raises ValueError: this rule would be biased by drafts of this kind"""
        if drafts not in self.drafts:
            allowed = ", ".join(sorted(kind.name.lower() for kind in self.drafts))
            raise ValueError(
                f"the {self.name} rule is biased on {drafts.name.lower()} drafts; it needs {allowed} ones"
            )


PROFILES = {
    profile.name: profile
    for profile in (
        RuleProfile("keyed", True, frozenset(Drafts), keyed_bytes),
        RuleProfile("leviathan", True, frozenset({Drafts.SAMPLED}), leviathan_bytes),
        RuleProfile("block", True, frozenset({Drafts.SAMPLED}), block_bytes),
        RuleProfile("specinfer", True, frozenset({Drafts.SAMPLED}), specinfer_bytes),
        RuleProfile("top_k_downlink", False, frozenset({Drafts.SAMPLED}), top_k_bytes),
    )
}
