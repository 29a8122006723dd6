"""Tokens to text in pieces: the pieces are the whole, no piece ends within a character or a stop string."""

from __future__ import annotations

from typing import Any

import pytest
from api_helpers import make_tokenizer
from hypothesis import example, given
from hypothesis import strategies as st
from swarm_helpers import VOCAB

from bloombee_spec.api import text as text_module
from bloombee_spec.api.text import REPLACEMENT, Detokenizer, StopStrings

LETTERS = "the hand of äöü ñ √∞ 你好 한국 🙂🚀 \n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def chunks_of(draw: Any, ids: list[int]) -> list[list[int]]:
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)])]


def byte_fallback(ids: list[int]) -> str:
    """As tokenizers' ByteFallback decodes a run of byte tokens: all of it or nothing."""
    try:
        return bytes(ids).decode()
    except UnicodeDecodeError:
        return REPLACEMENT * len(ids)


def strip_first_space(ids: list[int]) -> str:
    """As a SentencePiece tokenizer decodes words: a space before each but the first. Token 0 is special: no text."""
    return "".join(f" w{i}" for i in ids if i)[1:]


@given(st.data(), st.text(alphabet=LETTERS, max_size=60))
def test_pieces_of_a_text_are_the_text_and_contain_whole_characters(tokenizer: Any, data: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    whole = tokenizer.decode(ids)
    words = Detokenizer(tokenizer.decode)
    pieces = [words.add(chunk) for chunk in chunks_of(data.draw, ids)]
    assert all(REPLACEMENT not in piece for piece in pieces) or REPLACEMENT in whole
    assert "".join(pieces) + words.finish() == whole


@given(st.data(), st.lists(st.integers(0, VOCAB - 1), max_size=300))
def test_pieces_of_any_tokens_are_what_decode_says(tokenizer: Any, data: Any, ids: list[int]) -> None:
    words = Detokenizer(tokenizer.decode)
    pieces = [words.add(chunk) for chunk in chunks_of(data.draw, ids)]
    assert "".join(pieces) + words.finish() == tokenizer.decode(ids)


def test_a_character_of_several_tokens_comes_when_it_is_complete(tokenizer: Any) -> None:
    ids = tokenizer("a🙂b")["input_ids"]
    assert len(ids) == 6, "four tokens for the face"
    words = Detokenizer(tokenizer.decode)
    assert [words.add([token]) for token in ids] == ["a", "", "", "", "🙂", "b"]


def test_an_incomplete_end_is_shown_at_the_end(tokenizer: Any) -> None:
    words = Detokenizer(tokenizer.decode)
    assert words.add(tokenizer("a🙂")["input_ids"][:-1]) == "a"
    assert words.finish() == REPLACEMENT


@given(st.text(alphabet="aé你🙂", max_size=120))
@example("你🙂é" * 60)  # beyond the window, which must not begin within a character
def test_byte_fallback_never_shows_half_a_character(text: str) -> None:
    words = Detokenizer(byte_fallback)
    assert "".join(words.add([byte]) for byte in text.encode()) + words.finish() == text


@pytest.mark.parametrize("chunk", [1, 5 * text_module.WINDOW + 30])
def test_spaces_between_words_survive_the_window(chunk: int) -> None:
    many = list(range(1, 5 * text_module.WINDOW))
    ids = [*many, *[0] * text_module.WINDOW, *many]
    words = Detokenizer(strip_first_space)
    assert "".join(words.add(ids[at : at + chunk]) for at in range(0, len(ids), chunk)) == strip_first_space(ids)


def test_only_a_window_is_decoded(tokenizer: Any) -> None:
    lengths = []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return str(tokenizer.decode(ids))

    words = Detokenizer(decode)
    for token in tokenizer("the hand of the hand " * 50)["input_ids"]:
        words.add([token])
    assert max(lengths) <= text_module.WINDOW + 1


# --- stop strings -------------------------------------------------------------------------------------------------


def cut(text: str, stops: list[str]) -> str | None:
    """In front of the stop string that is complete first, None without one; read letter by letter."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return None


@given(
    st.lists(st.text(alphabet="ab", max_size=4), max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_in_front_of_the_first_stop_string_wherever_the_pieces_are_split(
    pieces: list[str], stops: list[str]
) -> None:
    filter_ = StopStrings(stops)
    said = "".join(filter_.add(piece) for piece in pieces)
    expected = cut("".join(pieces), stops)
    assert filter_.stopped == (expected is not None)
    assert said + filter_.finish() == ("".join(pieces) if expected is None else expected)


def test_only_what_may_be_a_stop_string_is_held_back() -> None:
    filter_ = StopStrings(["END", "\n\n"])
    assert [filter_.add(piece) for piece in ("one\n", "two E", "N", "X E", "ND three")] == [
        "one", "\ntwo ", "", "ENX ", "",
    ]  # fmt: skip
    assert filter_.stopped and filter_.add("more") == ""


def test_what_was_held_back_comes_at_the_end() -> None:
    filter_ = StopStrings(["END"])
    assert filter_.add("the EN") == "the " and filter_.finish() == "EN"
