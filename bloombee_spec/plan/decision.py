"""What the planner is told beside the route, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Mode(Enum):
    OFF = "off"  # one token per lap
    TREE = "tree"  # one tree per lap, the client waits for the verdict
    STREAM = "stream"  # layers follow each other without waiting


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds of one drafter step, which makes one layer: `layer_s + row_s · rows`, rows expanded as one batch."""

    layer_s: float
    row_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.layer_s >= 0 and self.row_s >= 0):
            raise ValueError(f"a drafter step of {self.layer_s} s + {self.row_s} s per row")

    def time(self, rows: float) -> float:
        return self.layer_s + self.row_s * rows


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the search.

    :param tree_size: candidates of a synchronous tree
    :param width: candidates per layer of a stream
    :param depth: layers of a tree, or layers in flight of a stream
    :param in_flight: candidates in flight at once (the session's credits)
    :param forward_rows: rows that a stage takes into one forward
    :param hedges: outcomes per position for which an answer is drafted ahead
    :param hedge_layers: layers of such an answer
    :param modes: ways to speculate that may be chosen
    """

    tree_size: int = 256
    width: int = 32
    depth: int = 64
    in_flight: int = 512
    forward_rows: int = 256
    hedges: int = 4
    hedge_layers: int = 16
    modes: tuple[Mode, ...] = (Mode.TREE, Mode.STREAM)

    def __post_init__(self) -> None:
        if min(self.tree_size, self.width, self.depth, self.in_flight, self.forward_rows) < 1:
            raise ValueError(
                "the limits of a plan are at least 1; speculation is switched off by its value, not by a limit"
            )
        if self.hedges < 0 or self.hedge_layers < 0:
            raise ValueError("hedges and hedge_layers are 0 or more")


@dataclass(frozen=True, slots=True)
class Plan:
    """How to speculate until the next plan.

    :param width: STREAM: candidates per layer
    :param depth: STREAM: layers in flight at most; TREE: layers of the tree
    :param pace_s: STREAM: least time between two frames, seconds; the drafter may be slower
    :param tree_size: TREE: candidates per lap
    :param hedges: unsent outcomes per position for which answers are drafted ahead at the client
    :param hedge_layers: layers of each such answer
    :param expected_tok_s: committed tokens per second that the model expects of this plan
    :param off_tok_s: the same without speculation
    :param probe: this round only looks whether speculation would pay again
    """

    mode: Mode
    width: int = 0
    depth: int = 0
    pace_s: float = 0.0
    tree_size: int = 0
    hedges: int = 0
    hedge_layers: int = 0
    expected_tok_s: float = 0.0
    off_tok_s: float = 0.0
    probe: bool = False

    @property
    def sent_hedges(self) -> int:
        """Siblings that are sent beside the favourite of a layer: a hedge that is sent *is* width, and is priced as
        such.
        """
        return max(0, self.width - 1)

    @property
    def rows_in_flight(self) -> int:
        """The most candidates that this plan keeps in the pipe."""
        return self.tree_size if self.mode is Mode.TREE else self.width * self.depth

    @property
    def gain(self) -> float:
        """Expected speed relative to no speculation."""
        return self.expected_tok_s / self.off_tok_s if self.off_tok_s > 0 else 1.0
