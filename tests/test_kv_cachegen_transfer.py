"""A transfer is a transaction: chunks in any order, nothing handed over before all of them are there."""

from __future__ import annotations

import dataclasses
import itertools
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee_spec.kv.chunk_stream import MAX_REFUSALS, Received, SpanReceiver, TransferRefused, TransferState, cut
from bloombee_spec.kv.chunks import MAX_CHUNK_TOKENS, encode_chunk, encode_ids
from bloombee_spec.kv.levels import Level
from bloombee_spec.kv.span import SpanShape
from bloombee_spec.wire.activations import CodecError
from tests.codec_helpers import same_bits
from tests.kv_helpers import DEPTH, KEY, OTHER_KEY, model_like, random_bits

pytest.importorskip("zstandard")

TOKENS = 60
KV = random_bits(2, 2, TOKENS, 4, torch.bfloat16)
SHAPE = SpanShape.of(KV)


def receiver(**options) -> SpanReceiver:
    return SpanReceiver(SHAPE, KEY, **{"limit": TOKENS, "vocab": 1000, **options})


def part(start: int, end: int, level: Level = Level.LOSSLESS, key: bytes = KEY) -> bytes:
    if level is Level.RECOMPUTE:
        return encode_ids(SHAPE, start, range(start, end), key)
    return encode_chunk(KV[:, :, :, start:end], start, level, DEPTH, key)


def lossy_part(start: int, end: int, level: Level = Level.FINE) -> bytes:
    kv = model_like(2, 2, end - start, 4, torch.bfloat16)
    return encode_chunk(kv, start, level, DEPTH, KEY)


def filled(into: SpanReceiver, *borders: int) -> SpanReceiver:
    for start, end in itertools.pairwise(borders):
        into.accept(part(start, end))
    return into


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 20), st.integers(0, 40), st.integers(1, 30), st.randoms(use_true_random=False))
def test_chunks_in_any_order_make_the_same_kv(start, length, tokens, random):
    end = start + length
    places = cut(start, end, tokens)
    random.shuffle(places)
    into = receiver(start=start)
    for low, high in places:
        into.accept(part(low, high, random.choice([Level.LOSSLESS, Level.RECOMPUTE])))
    received = into.finish(end)
    assert into.state is TransferState.FINISHED and received.lossless
    buffer = torch.zeros(SHAPE.size(3 + TOKENS), dtype=SHAPE.dtype)
    expected = buffer.clone()
    expected[:, :, :, 3 + start : 3 + end] = KV[:, :, :, start:end]
    for chunk in received.recompute:
        assert chunk.ids == tuple(range(chunk.start, chunk.end))
        expected[:, :, :, 3 + chunk.start : 3 + chunk.end] = 0
    received.write(buffer, 3)
    assert same_bits(buffer, expected)
    assert [chunk.start for chunk in received.chunks] == sorted(chunk.start for chunk in received.chunks)


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, MAX_CHUNK_TOKENS))
def test_cuts_cover_without_gap_and_fall_on_multiples(start, length, tokens):
    places = cut(start, start + length, tokens)
    assert [p for low, high in places for p in range(low, high)] == list(range(start, start + length))
    assert all(0 < high - low <= tokens for low, high in places)
    assert all(high % tokens == 0 for _, high in places[:-1])


def test_cuts_out_of_bounds_are_refused():
    for start, end, tokens in ((-1, 3, 1), (3, 2, 1), (0, 3, 0), (0, 3, MAX_CHUNK_TOKENS + 1)):
        with pytest.raises(ValueError, match="cannot cut"):
            cut(start, end, tokens)


def test_nothing_is_handed_over_while_something_is_missing():
    into = filled(receiver(), 0, 20)
    into.accept(part(40, 60))
    assert into.missing(60) == [(20, 40)] and into.tokens == 40
    with pytest.raises(TransferRefused, match="20 to 40 are missing"):
        into.finish(60)
    into.accept(part(20, 40))
    assert into.missing(60) == []
    assert same_bits(torch.cat([chunk.kv for chunk in into.finish(60).chunks], dim=3), KV)


def test_missing_parts_at_both_ends_are_found():
    into = receiver()
    assert into.missing(60) == [(0, 60)]
    into.accept(part(10, 20))
    assert into.missing(60) == [(0, 10), (20, 60)] and into.missing(15) == [(0, 10)] and into.missing(5) == [(0, 5)]


def test_a_chunk_that_comes_twice_or_overlaps_is_refused():
    into = filled(receiver(), 10, 20, 30)
    for start, end in ((10, 20), (20, 30), (5, 11), (29, 35), (12, 15), (0, 60)):
        with pytest.raises(TransferRefused, match="here already"):
            into.accept(part(start, end))
    assert into.tokens == 20 and into.missing(60) == [(0, 10), (30, 60)]


def test_a_chunk_of_another_transfer_is_refused():
    with pytest.raises(TransferRefused, match="checksum"):
        receiver().accept(part(0, 20, key=OTHER_KEY))


def test_positions_outside_the_order_are_refused():
    for start, end in ((9, 12), (38, 41), (50, 60)):
        with pytest.raises(TransferRefused, match="expected within 10 to 40"):
            receiver(start=10, limit=40).accept(part(start, end))


def test_an_exact_session_takes_exact_levels_only():
    for level in (Level.INT8, Level.FINE, Level.COARSE):
        with pytest.raises(TransferRefused, match="level"):
            receiver().accept(lossy_part(0, 20, level))
    into = receiver(levels=set(Level))
    into.accept(lossy_part(0, 20))
    assert not into.finish(20).lossless


def test_tokens_outside_the_vocabulary_are_refused():
    into = receiver(vocab=20)
    into.accept(part(0, 20, Level.RECOMPUTE))
    with pytest.raises(TransferRefused, match="vocabulary"):
        into.accept(part(20, 40, Level.RECOMPUTE))


def test_a_refused_chunk_leaves_no_trace():
    into = filled(receiver(), 0, 20)
    good = part(20, 60)
    for bad in (good[:-1], good[:100] + b"?" + good[101:], b"", b"KV", good + good):
        with pytest.raises(TransferRefused):
            into.accept(bad)
    assert into.state is TransferState.OPEN and into.tokens == 20
    into.accept(good)
    assert into.finish(60).end == 60


def test_too_many_refusals_break_the_transfer_and_free_what_was_staged():
    into = filled(receiver(), 0, 20)
    for _ in range(MAX_REFUSALS):
        assert into.state is TransferState.OPEN
        with pytest.raises(TransferRefused):
            into.accept(b"?" * 100)
    assert into.state is TransferState.BROKEN and into.tokens == 0
    for call in (lambda: into.accept(part(20, 60)), lambda: into.finish(20)):
        with pytest.raises(TransferRefused, match="broken"):
            call()


def test_more_chunks_than_allowed_are_refused():
    into = filled(receiver(max_chunks=3), 0, 1, 2, 3)
    with pytest.raises(TransferRefused, match="more than 3"):
        into.accept(part(3, 4))
    assert receiver(limit=100_000).max_chunks < 1000


def test_chunks_beyond_the_end_break_the_transfer():
    into = filled(receiver(), 0, 20, 40)
    with pytest.raises(TransferRefused, match="only 30 tokens are committed"):
        into.finish(30)
    assert into.state is TransferState.BROKEN


def test_an_end_outside_the_order_is_refused():
    for end in (4, 61):
        with pytest.raises(TransferRefused, match="cannot end"):
            receiver(start=5).finish(end)


def test_a_finished_transfer_takes_and_gives_nothing_more():
    into = filled(receiver(), 0, 60)
    into.finish(60)
    for call in (lambda: into.accept(part(0, 60)), lambda: into.finish(60)):
        with pytest.raises(TransferRefused, match="finished"):
            call()


def test_an_abandoned_transfer_is_over():
    into = filled(receiver(), 0, 60)
    into.abandon()
    with pytest.raises(TransferRefused, match="broken"):
        into.finish(60)


@pytest.mark.parametrize(
    "size, dtype",
    [((2, 2, 2, 62, 4), torch.bfloat16), ((2, 1, 2, 90, 4), torch.bfloat16), ((2, 2, 2, 90, 4), torch.half)],
)
def test_a_buffer_that_does_not_fit_is_not_touched(size, dtype):
    received = filled(receiver(), 0, 30, 60).finish(60)
    buffer = torch.zeros(size, dtype=dtype)
    with pytest.raises(CodecError):
        received.write(buffer, 3)
    assert not buffer.any()


def test_what_the_header_rules_out_is_refused_before_anything_is_decoded():
    shape = SpanShape(8, 8, 64, torch.float32)
    kv = torch.zeros(shape.size(256))
    data = encode_chunk(kv, 0, Level.LOSSLESS, DEPTH, KEY)
    for into in (
        SpanReceiver(shape, KEY, limit=255),
        SpanReceiver(shape, KEY, limit=256, levels={Level.RECOMPUTE}),
        SpanReceiver(shape, KEY, limit=256, max_chunks=0),
        SpanReceiver(shape, OTHER_KEY, limit=256),
    ):
        tracemalloc.start()
        with pytest.raises(TransferRefused):
            into.accept(data)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20 < kv.numel()


def test_received_is_frozen():
    received = filled(receiver(), 0, 60).finish(60)
    assert isinstance(received, Received)
    with pytest.raises(dataclasses.FrozenInstanceError):
        received.end = 3  # type: ignore[misc]
