"""How codecs are found: by name, from this package or another, and not at all when a library is missing."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

import pytest
import torch
from codec_helpers import CODECS

from bloombee_spec.wire import activations, entropy
from bloombee_spec.wire.activations import CodecUnavailable, RawCodec, codec_names, get_codec


@pytest.fixture(autouse=True)
def _fresh_registry() -> Iterator[None]:
    caches = (activations.get_codec, activations.codec_names, activations._extensions)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def _install(monkeypatch: pytest.MonkeyPatch, **targets: str) -> None:
    group = activations.ENTRY_POINT_GROUP
    found = [importlib.metadata.EntryPoint(name, target, group) for name, target in targets.items()]
    monkeypatch.setattr(activations, "entry_points", lambda group: found)


class OtherCodec(RawCodec):
    name = "other"


def test_own_codecs_are_there_and_bear_their_names():
    assert set(CODECS) <= set(codec_names())
    for name in CODECS:
        assert get_codec(name).name == name
        assert get_codec(name) is get_codec(name)
        assert get_codec(name).lossless == (name in ("raw", "lossless"))


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(CodecUnavailable, match=r"no activation codec is named 'zip'.*lossless.*raw"):
        get_codec("zip")


def test_another_package_adds_a_codec(monkeypatch):
    _install(monkeypatch, other=f"{__name__}:OtherCodec")
    assert "other" in codec_names()
    assert get_codec("other").encode(torch.ones(1, 1)) == get_codec("raw").encode(torch.ones(1, 1))


def test_another_package_cannot_take_the_name_of_an_own_codec(monkeypatch):
    _install(monkeypatch, raw=f"{__name__}:OtherCodec")
    assert type(get_codec("raw")) is RawCodec


def test_an_entry_point_that_makes_something_else_is_refused(monkeypatch):
    _install(monkeypatch, wrong=f"{__name__}:OtherCodec", number="builtins:int", absent="no_such_module:Codec")
    for name in ("wrong", "number", "absent"):
        assert name not in codec_names()
        with pytest.raises(CodecUnavailable):
            get_codec(name)


def test_without_zstandard_lossless_is_not_offered_and_says_why(monkeypatch):
    monkeypatch.setattr(entropy, "zstandard", None)
    assert "lossless" not in codec_names()
    assert {"raw", "int8", "tah4"} <= set(codec_names())
    with pytest.raises(CodecUnavailable, match="pip install 'zstandard"):
        get_codec("lossless")
