"""KV in chunks: every level brings back what it promises, for any shape, dtype and content."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee_spec.kv.cachegen import COARSE, FINE, GROUP, SINKS, Quality
from bloombee_spec.kv.chunks import (
    MAX_CHUNK_TOKENS,
    Depth,
    chunk_tokens,
    decode_chunk,
    encode_chunk,
    encode_ids,
    max_chunk_bytes,
)
from bloombee_spec.kv.levels import Level
from bloombee_spec.kv.span import SpanShape, export_columns, from_channels, import_columns, to_channels
from bloombee_spec.kv.symbols import CLASSES, put_symbols, spread_classes, take_symbols
from bloombee_spec.wire.activations import CodecError
from tests.codec_helpers import DTYPES, same_bits
from tests.kv_helpers import DEPTH, KEY, model_like, random_bits, relative_error

pytest.importorskip("zstandard")

LOSSY = (Level.INT8, Level.FINE, Level.COARSE)
SIZES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(1, 9))


def round_trip(kv: torch.Tensor, level: Level, start: int = 0, depth: Depth = DEPTH) -> torch.Tensor:
    chunk = decode_chunk(encode_chunk(kv, start, level, depth, KEY), SpanShape.of(kv), KEY)
    assert (chunk.start, chunk.tokens, chunk.level) == (start, kv.shape[3], level)
    assert chunk.kv is not None and chunk.kv.shape == kv.shape and chunk.kv.dtype == kv.dtype
    return chunk.kv


@settings(max_examples=60, deadline=None)
@given(SIZES, st.sampled_from(DTYPES), st.integers(0, 2**31), st.integers(0, 2**20))
def test_lossless_brings_back_any_bits(size, dtype, seed, start):
    kv = random_bits(*size, dtype, seed)
    assert same_bits(round_trip(kv, Level.LOSSLESS, start), kv)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.sampled_from(DTYPES), st.sampled_from(LOSSY), st.integers(0, 2**31))
def test_lossy_levels_bring_back_any_shape_within_their_steps(size, dtype, level, seed):
    blocks, heads, tokens, dim = size
    kv = model_like(blocks, heads, tokens, dim, dtype, seed)
    back = round_trip(kv, level)
    assert back.isfinite().all()
    spread = (kv.double() - kv.double().mean(3, keepdim=True)).abs().amax((2, 3, 4), keepdim=True)
    bound = 0.02 * kv.double().abs().amax() if level is Level.INT8 else 0.8 * spread + 1e-2 * kv.double().abs().amax()
    assert ((back.double() - kv.double()).abs() <= bound).all()


def test_the_levels_differ_in_bytes_and_error_as_their_names_say():
    kv = model_like(4, 2, 256, 32, torch.float16)
    sizes, errors = {}, {}
    for level in (Level.LOSSLESS, *LOSSY):
        data = encode_chunk(kv, 0, level, DEPTH, KEY)
        sizes[level] = len(data)
        back = decode_chunk(data, SpanShape.of(kv), KEY).kv
        assert back is not None
        errors[level] = relative_error(back, kv)
    assert sizes[Level.LOSSLESS] < kv.numel() * 2
    assert sizes[Level.INT8] < 0.55 * kv.numel() * 2
    assert sizes[Level.FINE] < sizes[Level.INT8] / 2.5
    assert sizes[Level.COARSE] < 0.85 * sizes[Level.FINE]
    assert errors[Level.LOSSLESS] == 0 < errors[Level.INT8] < 1e-3 < errors[Level.FINE] < errors[Level.COARSE] < 0.3


def test_shallow_blocks_are_finer_and_take_more_bytes():
    kv = model_like(1, 2, 256, 32)
    shallow, deep = Depth(0, 30), Depth(29, 30)
    assert relative_error(round_trip(kv, Level.FINE, depth=shallow), kv) < 0.8 * relative_error(
        round_trip(kv, Level.FINE, depth=deep), kv
    )
    assert len(encode_chunk(kv, 0, Level.FINE, shallow, KEY)) > len(encode_chunk(kv, 0, Level.FINE, deep, KEY))
    for quality in (FINE, COARSE):
        steps = quality.steps(0, 30, 30)
        assert (np.diff(steps, axis=1) >= 0).all() and steps[0, 0] < steps[0, -1] and steps[1, 0] < steps[1, -1]


def test_deltas_take_fewer_bytes_where_tokens_resemble_their_anchor():
    generator = torch.Generator().manual_seed(1)
    held = torch.randn(2, 2, 2, 256 // GROUP, 32, generator=generator).repeat_interleave(GROUP, dim=3)
    held = held + 0.1 * torch.randn(held.shape, generator=generator)
    mixed = held[:, :, :, torch.randperm(256, generator=generator)]
    sizes = [len(encode_chunk(kv, SINKS, Level.FINE, DEPTH, KEY)) for kv in (held, mixed)]
    assert sizes[0] < 0.5 * sizes[1]


def test_a_first_token_far_away_does_not_blur_the_others():
    kv = model_like(2, 2, 200, 16)
    far = kv.clone()
    far[:, :, :, 0] *= 100
    errors = [relative_error(round_trip(each, Level.FINE, start=SINKS), each) for each in (far, kv)]
    assert errors[0] < 1.5 * errors[1]


@pytest.mark.parametrize("level", [Level.FINE, Level.COARSE])
def test_the_first_tokens_of_a_text_are_kept_in_8_bits(level):
    """The last sink in a chunk of its own, then among others: rule broken, the error is that of a step."""
    kv = model_like(2, 2, 40, 8)
    kv[:, :, :, : SINKS + 1] *= 0.01  # as small as the sinks of some models: a step would wipe them out

    def error(back: torch.Tensor, token: int) -> float:
        return float((back - kv)[:, :, :, token].norm() / kv[:, :, :, token].norm())

    back = round_trip(kv, level)
    assert all(error(back, token) < 0.01 for token in range(SINKS)) and error(back, SINKS) > 0.05
    later = round_trip(kv[:, :, :, 2:], level, start=2)
    assert torch.equal(later[:, :, :, : SINKS - 2], back[:, :, :, 2:SINKS])
    assert round_trip(kv[:, :, :, :1], level).shape[3] == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LOSSY)
def test_zeros_and_constants_come_back(level, dtype):
    zeros = torch.zeros(2, 1, 2, 20, 4, dtype=dtype)
    assert torch.equal(round_trip(zeros, level), zeros)
    constant = torch.full_like(zeros, 3.0)
    assert torch.allclose(round_trip(constant, level), constant, rtol=1e-2)


@pytest.mark.parametrize("level", [Level.FINE, Level.COARSE])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_travels_lossless_only(level, wrong):
    kv = model_like()
    kv[1, 1, 0, 7, 3] = wrong
    with pytest.raises(CodecError, match="lossless only"):
        encode_chunk(kv, 0, level, DEPTH, KEY)
    assert same_bits(round_trip(kv, Level.LOSSLESS), kv)


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e-10, 1e10, 1e24, 1e36])
def test_any_magnitude_is_coded_or_refused_but_never_made_infinite(scale):
    kv = model_like() * scale
    try:
        back = round_trip(kv, Level.FINE)
    except CodecError:
        assert scale > 1e20
    else:
        assert back.isfinite().all() and (back - kv).abs().max() <= kv.abs().max()


def test_a_half_that_rounds_beyond_its_range_becomes_the_largest_half():
    kv = model_like(1, 1, 30, 4, torch.float32)
    kv = (kv / kv.abs().max() * torch.finfo(torch.float16).max).to(torch.float16)
    assert round_trip(kv, Level.COARSE).isfinite().all()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=MAX_CHUNK_TOKENS), st.integers(0, 2**20))
def test_a_chunk_to_recompute_carries_its_ids(ids, start):
    shape = SpanShape.of(model_like())
    chunk = decode_chunk(encode_ids(shape, start, ids, KEY), shape, KEY)
    assert (chunk.level, chunk.start, chunk.ids, chunk.kv) == (Level.RECOMPUTE, start, tuple(ids), None)


def test_quality_is_checked():
    with pytest.raises(ValueError, match="usable steps"):
        Quality(keys=0.0, values=1.0, shallow=1.0, deep=1.0)


# --- entropy stage ------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 20), st.integers(0, 40), st.sampled_from([0.01, 0.1, 0.5, 2.0, 30.0, 1e6]), st.integers(0, 2**31)
)
def test_symbols_come_back(channels, n, spread, seed):
    random = np.random.default_rng(seed)
    scales = spread * np.exp(random.normal(size=(channels, 1)))
    symbols = np.rint(random.laplace(size=(channels, n)) * scales).clip(-(1 << 30), 1 << 30).astype(np.int32)
    out = bytearray()
    put_symbols(out, symbols)
    back, rest = take_symbols(memoryview(bytes(out) + b"rest"), channels, n)
    assert np.array_equal(back, symbols) and bytes(rest) == b"rest"


@pytest.mark.parametrize("spread", [0.4, 0.8, 1.5, 4.0])
def test_symbols_take_little_more_than_their_entropy(spread):
    random = np.random.default_rng(0)
    symbols = np.rint(random.laplace(size=(256, 256)) * spread).astype(np.int32)
    out = bytearray()
    put_symbols(out, symbols)
    _, counts = np.unique(symbols, return_counts=True)
    share = counts / symbols.size
    entropy = -(share * np.log2(share)).sum() * symbols.size / 8
    assert len(out) < 1.08 * entropy + 300


def test_channels_of_different_spread_are_coded_apart():
    random = np.random.default_rng(0)
    scales = 2.0 ** np.arange(-4, 4)[:, None]
    symbols = np.rint(random.normal(size=(8, 20_000)) * scales).astype(np.int32)
    classes = spread_classes(symbols)
    assert len(set(classes.tolist())) >= 6 and classes.max() < CLASSES
    apart, mixed = bytearray(), bytearray()
    put_symbols(apart, symbols)
    put_symbols(mixed, np.ascontiguousarray(symbols.T.reshape(8, -1)))
    assert len(apart) < 0.85 * len(mixed)


# --- layout, and a lane's buffer ----------------------------------------------------------------------------------


def test_channels_are_ordered_as_documented():
    kv = model_like(3, 2, 5, 4)
    rows = to_channels(kv)
    assert rows.shape == (SpanShape.of(kv).channels, 5) and rows.is_contiguous()
    assert torch.equal(rows.view(2, 3, 2, 4, 5)[1, 2, 0, 3], kv[1, 2, 0, :, 3])
    assert torch.equal(from_channels(rows, SpanShape.of(kv)), kv)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 5), st.integers(0, 20), st.integers(0, 20), st.sampled_from(DTYPES))
def test_committed_columns_go_out_and_into_another_buffer(arena, start, tokens, dtype):
    length = 48
    source = random_bits(2, 2, arena + length, 4, dtype)
    target = random_bits(2, 2, 3 + length, 4, dtype, seed=1)
    before = target.clone()
    end = start + tokens
    kv = export_columns(source, arena, start, end)
    assert same_bits(kv, source[:, :, :, arena + start : arena + end])
    source.zero_()
    import_columns(target, 3, start, kv)
    assert same_bits(export_columns(target, 3, start, end), kv)
    assert same_bits(target[:, :, :, : 3 + start], before[:, :, :, : 3 + start])
    assert same_bits(target[:, :, :, 3 + end :], before[:, :, :, 3 + end :])


def test_columns_outside_the_committed_part_are_refused():
    buffer = model_like(2, 2, 20, 4)
    for arena, start, end in ((4, -1, 3), (4, 0, 17), (4, 9, 8), (21, 0, 0), (-1, 0, 4)):
        with pytest.raises(CodecError):
            export_columns(buffer, arena, start, end)
    for kv in (
        model_like(2, 2, 17, 4),
        model_like(1, 2, 3, 4),
        model_like(2, 2, 3, 4).half(),
        model_like(2, 2, 3, 4)[0],
    ):
        before = buffer.clone()
        with pytest.raises(CodecError):
            import_columns(buffer, 4, 0, kv)
        assert torch.equal(buffer, before)


def test_a_shape_or_dtype_that_does_not_travel_is_refused():
    for sizes in ((0, 1, 1), (1025, 1, 1), (1, 1, 0), (1024, 1024, 1)):
        with pytest.raises(CodecError, match="does not travel"):
            SpanShape(*sizes, torch.float32)
    with pytest.raises(CodecError, match="does not travel"):
        SpanShape(1, 1, 1, torch.int32)


def test_a_chunk_is_as_long_as_fits_a_frame_at_every_level():
    wide = SpanShape(20, 8, 128, torch.bfloat16)
    tokens = chunk_tokens(wide, 8 << 20)
    assert max_chunk_bytes(wide, tokens) <= 8 << 20 and 1 < tokens < MAX_CHUNK_TOKENS
    assert chunk_tokens(SpanShape(8, 3, 64, torch.float32), 8 << 20) == MAX_CHUNK_TOKENS
    with pytest.raises(CodecError, match="one token"):
        chunk_tokens(wide, 1000)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 256), st.sampled_from(LOSSY), st.integers(0, 2**31))
def test_even_noise_stays_within_the_announced_bound(tokens, level, seed):
    kv = random_bits(1, 1, tokens, 4, torch.bfloat16, seed).float().nan_to_num(0, 0, 0).clamp(-1e20, 1e20)
    try:
        data = encode_chunk(kv, 0, level, DEPTH, KEY)
    except CodecError:
        return
    assert len(data) <= max_chunk_bytes(SpanShape.of(kv), tokens)


def test_a_lossy_payload_is_the_same_whatever_the_stride():
    kv = model_like(2, 2, 64, 8)
    strided = kv.transpose(3, 4).contiguous().transpose(3, 4)
    assert encode_chunk(kv, 0, Level.FINE, DEPTH, KEY) == encode_chunk(strided, 0, Level.FINE, DEPTH, KEY)
