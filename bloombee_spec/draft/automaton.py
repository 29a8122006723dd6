"""An online suffix automaton with occurrence counts: every context of a growing text and what followed it.

A state stands for the contexts that occur at the same places of the text; its suffix link leads to the next shorter
context that occurs at more places. Finding a context and appending a token both cost amortised constant time, whatever
the text's length; nothing is hashed approximately, so two contexts are equal only if all their tokens are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

ROOT = 0
_NONE = -1

Follower = tuple[int, int, int]  # token, how often it followed, position where it did so last


class SuffixAutomaton:
    """Contexts of a text and the number of times that each token followed them.

    At most two states per token of text, 24 bytes each, plus a dictionary for each state with several followers.
    Tokens are any 32-bit integers but -1.

    :param max_context: counts are exact for contexts of up to so many tokens; longer ones can still be followed
        verbatim
    """

    def __init__(self, max_context: int) -> None:
        if max_context < 1:
            raise ValueError(f"max_context must be at least 1, got {max_context}")
        self.max_context = max_context
        self.size = 0  # tokens of text
        self._length = array("i", [0])  # tokens of the state's longest context
        self._link = array("i", [_NONE])
        self._count = array("i", [0])
        self._recent = array("i", [_NONE])  # position of the last token of the latest occurrence
        self._token = array("i", [_NONE])  # most states have one follower: kept without a dictionary
        self._next = array("i", [_NONE])
        self._more: dict[int, dict[int, int]] = {}
        self._last = ROOT
        # The context of the last `max_context + 1` tokens. Counts are propagated from here, so that a text that
        # repeats itself, where the chain of links is as long as the text, costs hardly more than any other.
        self._tail, self._tail_length = ROOT, 0

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._append(token)
            self._count_tail(token)
            self.size += 1

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Follow `token` from the context of `length` tokens at `state`.

        :returns: state and length of the longest context that ends in `token`; (ROOT, 0) when it never occurred
        """
        follower = self._follower(state, token)
        while follower == _NONE:
            if state == ROOT:
                return ROOT, 0
            state = self._link[state]
            length = self._length[state]
            follower = self._follower(state, token)
        return follower, length + 1

    def locate(self, context: Sequence[int]) -> tuple[int, int]:
        """State and length of the longest suffix of `context` that occurs in the text."""
        state, length = ROOT, 0
        for token in context:
            state, length = self.step(state, length, token)
        return state, length

    def continued(self, state: int, length: int) -> int:
        """Tokens of the longest suffix of a context that something has followed."""
        while self._token[state] == _NONE and state != ROOT:
            state = self._link[state]
            length = self._length[state]
        return length

    def levels(self, state: int, length: int, shortest: int, longest: int) -> Iterator[tuple[int, int]]:
        """(length, state) of a context and of its ever more frequent suffixes, longest first.

        :param shortest: contexts of fewer tokens are left out
        :param longest: the first one is cut to this many tokens; at most `max_context`
        """
        link, lengths = self._link, self._length
        if length > longest:
            length = longest
            while lengths[link[state]] >= length:
                state = link[state]
        while length >= shortest and state != ROOT:
            yield length, state
            state = link[state]
            length = lengths[state]

    def followers(self, state: int, limit: int) -> list[Follower]:
        """What followed the context, in no particular order; nothing if that is more than `limit` different tokens."""
        token, count, recent = self._token[state], self._count, self._recent
        if token == _NONE:
            return []
        first = self._next[state]
        found = [(token, count[first], recent[first])]
        more = self._more.get(state)
        if more is not None:
            if len(more) >= limit:
                return []
            found += [(token, count[other], recent[other]) for token, other in more.items()]
        return found

    def _follower(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._next[state]
        more = self._more.get(state)
        return _NONE if more is None else more.get(token, _NONE)

    def _set_follower(self, state: int, token: int, follower: int) -> None:
        current = self._token[state]
        if current in (token, _NONE):
            self._token[state], self._next[state] = token, follower
        else:
            self._more.setdefault(state, {})[token] = follower

    def _append(self, token: int) -> None:
        if token == _NONE:
            raise ValueError("token -1 is reserved")
        current = self._add_state(self._length[self._last] + 1)
        state, target = self._last, _NONE
        while state != _NONE:
            target = self._follower(state, token)
            if target != _NONE:
                break
            self._set_follower(state, token, current)
            state = self._link[state]
        if state != _NONE:
            if self._length[state] + 1 != self._length[target]:
                target = self._split(state, token, target)
            self._link[current] = target
        self._last = current

    def _add_state(self, length: int, like: int = _NONE) -> int:
        """A new state, with link, count and first follower of the state `like`."""
        new = len(self._length)
        self._length.append(length)
        if like == _NONE:
            self._link.append(ROOT)
            self._count.append(0)
            for column in (self._recent, self._token, self._next):
                column.append(_NONE)
        else:
            for column in (self._link, self._count, self._recent, self._token, self._next):
                column.append(column[like])
        return new

    def _split(self, state: int, token: int, target: int) -> int:
        """The shorter contexts of `target` now occur at one more place than the longer ones: give them a state."""
        clone = self._add_state(self._length[state] + 1, like=target)
        more = self._more.get(target)
        if more is not None:
            self._more[clone] = dict(more)
        self._link[target] = clone
        while state != _NONE and self._follower(state, token) == target:
            self._set_follower(state, token, clone)
            state = self._link[state]
        return clone

    def _count_tail(self, token: int) -> None:
        link, lengths, counts, recent = self._link, self._length, self._count, self._recent
        # The tail may have been split just now, but both halves still have the same followers.
        state, length = self._follower(self._tail, token), min(self._tail_length + 1, self.max_context + 1)
        while lengths[link[state]] >= length:
            state = link[state]
        self._tail, self._tail_length = state, length
        while state != ROOT:
            counts[state] += 1
            recent[state] = self.size
            state = link[state]
