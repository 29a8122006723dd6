"""KV levels on the real KV of SmolLM2-135M: bytes, perplexity and greedy tokens on the decoded KV, speed.

    python -m benchmarks.kv_codec quality --text prose    # one text: a minute or two
    python -m benchmarks.kv_codec speed                   # 2,048 tokens of 8 blocks
    python -m benchmarks.kv_codec entropy                 # what the entropy stage could do, and does
    python -m benchmarks.kv_codec table                   # all that was measured so far, as Markdown and a plot

Each part adds to benchmarks/results/kv-codec.json. Times are the least processor time of one thread.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import kv_codec_report
from benchmarks.codecs import least_time
from benchmarks.codecs_rows import english_text, load_model
from bloombee_spec.kv.chunk_stream import cut
from bloombee_spec.kv.chunks import Depth, decode_chunk, encode_chunk
from bloombee_spec.kv.levels import Level
from bloombee_spec.kv.span import SpanShape

RESULTS = Path(__file__).parent / "results"
KEY = bytes(16)
LEVELS = (Level.LOSSLESS, Level.INT8, Level.FINE, Level.COARSE)
TEXTS = ("prose", "prose-2", "prose-3", "documents", "code", "code-2", "docstrings")
SPANS = ((0, 8), (8, 16), (16, 23), (23, 30))  # a swarm of four servers
CONTEXT, FORCED, GREEDY = 1536, 256, 64  # tokens whose KV is coded, that are judged after it, that are generated


def texts(tokenizer: Any) -> dict[str, Callable[[], torch.Tensor]]:
    """Token ids by name: prose, the project's own documents, source code, and docstrings of the standard library."""

    def ids(text: str, skip: int = 0) -> torch.Tensor:
        found: torch.Tensor = tokenizer(text[: 40 * (skip + 2 * CONTEXT)], return_tensors="pt").input_ids[0]
        return found[skip:]

    def docstrings(*modules: Any) -> str:
        members = (value for module in modules for _, value in inspect.getmembers(module))
        return "\n\n".join(filter(None, map(inspect.getdoc, members)))

    documents = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    return {
        "prose": lambda: ids(english_text()),
        "prose-2": lambda: ids(english_text(), 20_000),
        "prose-3": lambda: ids(english_text(), 40_000),
        "documents": lambda: ids("\n".join(path.read_text(encoding="utf-8") for path in documents)),
        "code": lambda: ids(inspect.getsource(argparse), 3_000),
        "code-2": lambda: ids(inspect.getsource(statistics), 4_000),
        "docstrings": lambda: ids(docstrings(difflib, random, statistics, subprocess)),
    }


# --- the model on decoded KV --------------------------------------------------------------------------------------


@torch.inference_mode()
def prefill(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """`[2, blocks, kv_heads, tokens, head_dim]`."""
    from transformers import DynamicCache

    cache = DynamicCache()
    model.model(ids[None], past_key_values=cache, use_cache=True)
    return torch.stack([torch.cat(cache.key_cache), torch.cat(cache.value_cache)])


def cache_of(kv: torch.Tensor) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache()
    for block in range(kv.shape[1]):
        cache.update(kv[0, block, None].clone(), kv[1, block, None].clone(), block)
    return cache


@torch.inference_mode()
def forced(model: Any, kv: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `[len(ids) - 1, vocabulary]` of what follows each of `ids` but the last, on top of `kv`."""
    logits = model(ids[None, :-1], past_key_values=cache_of(kv), use_cache=True).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


@torch.inference_mode()
def greedy(model: Any, kv: torch.Tensor, first: torch.Tensor, count: int) -> list[int]:
    cache, token, out = cache_of(kv), first.view(1, 1), []
    for _ in range(count):
        token = model(token, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
        out.append(int(token))
    return out


def coded(kv: torch.Tensor, level: Level) -> tuple[torch.Tensor, int]:
    """All spans, chunk by chunk, as a receiver would get them, and their bytes."""
    back, size = torch.empty_like(kv), 0
    for first, last in SPANS:
        span = kv[:, first:last]
        for start, end in cut(0, kv.shape[3]):
            data = encode_chunk(span[:, :, :, start:end], start, level, Depth(first, kv.shape[1]), KEY)
            size += len(data)
            chunk = decode_chunk(data, SpanShape.of(span), KEY).kv
            assert chunk is not None
            back[:, first:last, :, start:end] = chunk
    return back, size


def quality(name: str) -> dict[str, Any]:
    """One text: each level against the untouched KV. Bytes of `lossless` are those of fp16, as is the raw size."""
    model, tokenizer = load_model(torch.float32)
    ids = texts(tokenizer)[name]()[: CONTEXT + FORCED + 1]
    kv = prefill(model, ids[:CONTEXT])
    after, targets = ids[CONTEXT:], ids[CONTEXT + 1 :]
    exact, own = forced(model, kv, after), greedy(model, kv, ids[CONTEXT], GREEDY)
    at = torch.arange(len(targets))
    result: dict[str, Any] = {"tokens": CONTEXT, "values": kv.numel(), "loss": -float(exact[at, targets].mean())}
    for level in LEVELS:
        if level is Level.LOSSLESS:
            half, size = coded(kv.half(), level)
            assert torch.equal(half, kv.half())
            back = coded(kv, level)[0]
        else:
            back, size = coded(kv, level)
        seen, tokens = forced(model, back, after), greedy(model, back, ids[CONTEXT], GREEDY)
        same = [a == b for a, b in zip(own, tokens)]
        result[level.name.lower()] = {
            "bytes": size,
            "loss": -float(seen[at, targets].mean()),
            "divergence": float((exact.exp() * (exact - seen)).sum(-1).mean()),
            "forced": float((seen.argmax(-1) == exact.argmax(-1)).float().mean()),
            "greedy": same.index(False) if False in same else GREEDY,
        }
        print(level.name.lower(), result[level.name.lower()], file=sys.stderr, flush=True)
    return result


# --- speed --------------------------------------------------------------------------------------------------------


def real_span(tokens: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """KV of `tokens` tokens of prose in blocks 8 to 15."""
    model, tokenizer = load_model(torch.float32)
    return prefill(model, texts(tokenizer)["prose"]()[:tokens])[:, 8:16].to(dtype).contiguous()


def speed(tokens: int = 2048) -> dict[str, Any]:
    kv = real_span(tokens)
    shape, depth = SpanShape.of(kv), Depth(8, 30)
    result: dict[str, Any] = {"tokens": tokens, "raw_bytes": kv.numel() * 2}
    for level in LEVELS:
        parts = [(kv[:, :, :, start:end], start) for start, end in cut(0, tokens)]
        chunks = [encode_chunk(part, start, level, depth, KEY) for part, start in parts]

        def encode() -> None:
            for part, start in parts:  # noqa: B023
                encode_chunk(part, start, level, depth, KEY)  # noqa: B023

        def decode() -> None:
            for data in chunks:  # noqa: B023
                decode_chunk(data, shape, KEY)

        times = {"encode_s": least_time(encode, 3.0), "decode_s": least_time(decode, 3.0)}
        result[level.name.lower()] = {"bytes": sum(map(len, chunks)), **times}
    return result


# --- entropy stage ------------------------------------------------------------------------------------------------


def entropy(tokens: int = 256) -> dict[str, Any]:
    """Bits per symbol of the deltas of one fine chunk of 8 blocks: bounds, zstandard as used, an ANS coder."""
    import constriction

    from bloombee_spec.kv.cachegen import FINE, GROUP, SINKS, encode_lossy
    from bloombee_spec.kv.symbols import put_symbols, spread_classes, take_symbols
    from bloombee_spec.wire.entropy import take_plane

    kv = real_span(tokens, torch.float32)
    shape, anchors = SpanShape.of(kv), -(-tokens // GROUP)
    data = encode_lossy(kv, SINKS, FINE.steps(8, shape.blocks, 30))
    _, rest = take_symbols(
        memoryview(data)[1 + 8 * shape.blocks :], 2 * shape.blocks, shape.channels // 2 // shape.blocks
    )
    _, rest = take_plane(rest, shape.channels)
    _, rest = take_symbols(rest, shape.channels, anchors)
    symbols, _ = take_symbols(rest, shape.channels, tokens - anchors)
    classes = spread_classes(symbols)
    groups = [symbols[classes == c].reshape(-1) for c in np.unique(classes)]

    def ideal(parts: Sequence[Any]) -> float:
        return sum(_entropy(part) * len(part) for part in parts) / symbols.size

    def packed() -> bytearray:
        out = bytearray()
        put_symbols(out, symbols)
        return out

    limit = int(np.abs(symbols).max())
    counts = [np.bincount(part + limit, minlength=2 * limit + 1) + 0.05 for part in groups]
    models = [constriction.stream.model.Categorical(c / c.sum(), perfect=False) for c in counts]

    def ans() -> Any:
        coder = constriction.stream.stack.AnsCoder()
        for part, model in list(zip(groups, models))[::-1]:
            coder.encode_reverse(part + limit, model)
        return coder.get_compressed()

    def unans(words: Any) -> None:
        coder = constriction.stream.stack.AnsCoder(words)
        for part, model in zip(groups, models):
            coder.decode(model, len(part))

    zstd, words = bytes(packed()), ans()
    tables = sum(len(np.unique(channel)) for channel in symbols)  # at about a byte for each symbol that occurs
    return {
        "symbols": symbols.size,
        "one table": ideal([symbols.reshape(-1)]),
        "a table per class": ideal(groups),
        "a table per channel": ideal(list(symbols)),
        "tables of all channels": 8 * tables / symbols.size,
        "zstandard": 8 * len(zstd) / symbols.size,
        "ANS, classes": 8 * 4 * len(words) / symbols.size,
        "zstandard_s": least_time(packed, 1.0)
        + least_time(lambda: take_symbols(memoryview(zstd), *symbols.shape), 1.0),
        "ANS_s": least_time(ans, 1.0) + least_time(lambda: unans(words), 1.0),
    }


def _entropy(values: Any) -> float:
    _, counts = np.unique(values, return_counts=True)
    share = counts / len(values)
    return float(-(share * np.log2(share)).sum())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("quality", "speed", "entropy", "table"))
    parser.add_argument("--text", choices=TEXTS, action="append", help="for `quality`; all when not given")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for JSON and plot")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "kv-codec.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"quality": {}}
    if options.part == "quality":
        for name in options.text or TEXTS:
            results["quality"][name] = quality(name)
            path.write_text(json.dumps(results, indent=1), encoding="utf-8")
    elif options.part != "table":
        results[options.part] = {"speed": speed, "entropy": entropy}[options.part]()
        path.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(kv_codec_report.tables(results))
    if options.part == "table":
        print(kv_codec_report.plot(results, options.out / "kv-codec.png"), file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
