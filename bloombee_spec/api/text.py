"""From tokens to text while they arrive: no half characters, and nothing that belongs to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
WINDOW = 64  # tokens that are decoded at a time
OVERLAP = 16  # of them, tokens whose text is out already: some tokenizers write a token by what stands before it


class Detokenizer:
    """Text of a growing list of tokens, piece by piece; the pieces together are `decode(all tokens)`.

    A token may end within a character, which `decode` shows as U+FFFD. Such an end is held back until later tokens
    complete it, or `finish` says that none come. (A byte-fallback tokenizer takes back complete characters as well
    while the bytes behind them are incomplete; what is out stays out.)

    :param decode: tokens to text, such as a tokenizer's method
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._window: list[int] = []
        self._said = ""  # text of the window that is out

    def add(self, tokens: Sequence[int]) -> str:
        """:returns: text that no later token changes"""
        self._window += tokens
        text = self._decode(self._window)
        certain = text.rstrip(REPLACEMENT)
        if len(certain) <= len(self._said):
            return ""
        new = certain[len(self._said) :]
        self._said = certain
        if len(self._window) > WINDOW:
            self._shorten()
        return new

    def finish(self) -> str:
        """:returns: what was held back"""
        text = self._decode(self._window)
        return text[len(self._said) :]

    def _shorten(self) -> None:
        """Forget the oldest tokens, where the rest begins and ends with whole characters."""
        rest = self._window[-OVERLAP:]
        said = self._decode(rest)
        if said and REPLACEMENT not in said:
            self._window, self._said = rest, said


class StopStrings:
    """Lets text through up to the first stop string, and holds back what may be the beginning of one.

    The first to be complete is the first; how the text was split into pieces makes no difference.

    :param stops: none of them empty
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """:returns: text that is in front of any stop string; nothing any more once `stopped`"""
        if self.stopped:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """:returns: what was held back and turned out to be no stop string"""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, shorter than it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
