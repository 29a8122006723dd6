"""Past outputs of this process, shared by all its suffix drafters."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import count

from bloombee_spec.draft.automaton import SuffixAutomaton

END_OF_OUTPUT = -2  # closes each output: never a token id, so that no context crosses it and no proposal contains it


class Segment(SuffixAutomaton):
    """A part of a corpus, and when it was last of use."""

    used = 0


class Corpus:
    """A bounded collection of outputs, searchable by context. Shared between threads: hold `lock` while reading.

    Outputs are kept in segments. When there are too many, the one that was least recently of use to a drafter is
    forgotten, which takes no time; the price is that a query consults each segment.

    :param capacity: tokens kept at most, over all segments (about 150 bytes each)
    :param segments: in how many parts they are kept and forgotten
    :param max_context: longest context whose followers are counted, in tokens
    """

    def __init__(self, capacity: int = 1 << 18, segments: int = 4, max_context: int = 24) -> None:
        if segments < 2 or capacity < 2 * segments:
            raise ValueError(f"a corpus needs at least 2 segments of 2 tokens, got {capacity} tokens in {segments}")
        self.lock = threading.Lock()
        self.max_context = max_context
        self.segments: list[Segment] = []  # oldest first; the last one grows
        self._limit = segments
        self._segment_size = capacity // segments
        self._clock = count(1)

    def __len__(self) -> int:
        """Tokens kept, one more for each output."""
        return sum(segment.size for segment in self.segments)

    def add(self, output: Sequence[int]) -> None:
        """Remember an output; only the end of one that exceeds a segment."""
        output = output[-(self._segment_size - 1) :]
        if not output:
            return
        with self.lock:
            if not self.segments or self.segments[-1].size + len(output) >= self._segment_size:
                self.segments.append(Segment(self.max_context))
                if len(self.segments) > self._limit:
                    self.segments.remove(min(self.segments[:-1], key=lambda segment: segment.used))
            self.segments[-1].extend(output)
            self.segments[-1].extend((END_OF_OUTPUT,))
            self.touch(self.segments[-1])

    def touch(self, segment: Segment) -> None:
        """Note that a segment is of use. The caller holds the lock."""
        segment.used = next(self._clock)
