"""Token ids of candidates: varints or a range coder? Measured on what the suffix drafter proposes in real texts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.codecs_quality import GreedyRun
from benchmarks.codecs_rows import english_text
from benchmarks.prompts import Prompt
from bloombee_spec.draft.suffix import SuffixDrafter
from bloombee_spec.tree import NodeSpec
from bloombee_spec.wire.frames import NodesFrame, encode
from bloombee_spec.wire.varint import put_uint

BURST = 16  # candidates asked for at a time
UNSEEN = 0.05  # pseudo-count of each token in the static model
RECENT = 0.5  # chance that the adaptive model gives to the tokens of the stream's own text


@dataclass(frozen=True, slots=True)
class Burst:
    """Candidates that go out together: proposals in order, and the text before them."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    text: tuple[int, ...]

    @property
    def frame_bytes(self) -> int:
        """Of the frame as it is sent, its length included."""
        first = 4000 + len(self.text)
        nodes = [
            NodeSpec(first + i, first + parent if parent >= 0 else first - 1, token)
            for i, (parent, token) in enumerate(zip(self.parents, self.tokens))
        ]
        return 3 + len(encode(NodesFrame(0, 1, len(self.text), tuple(nodes))))


def bursts(model: Any, tokenizer: Any, prompts: Sequence[Prompt], new_tokens: int) -> list[Burst]:
    """One after each token of greedy continuations, where the drafter has anything to say."""
    found = []
    continuations = GreedyRun(model, tokenizer, prompts, new_tokens).free().tolist()
    for prompt, continuation in zip(prompts, continuations):
        drafter = SuffixDrafter(corpus=None)
        text = prompt.encode(tokenizer)
        drafter.start(text)
        for token in continuation:
            proposals = drafter.propose([], BURST, max_depth=BURST)
            if proposals:
                found.append(Burst(tuple(p.token for p in proposals), tuple(p.parent for p in proposals), tuple(text)))
            drafter.observe([token])
            text.append(token)
    return found


def id_table(model: Any, tokenizer: Any, prompts: Sequence[Prompt], new_tokens: int) -> str:
    """Bytes per id, and of the whole frame with these ids in place of varints."""
    frames = bursts(model, tokenizer, prompts, new_tokens)
    vocab = len(tokenizer)
    counts = Counter(tokenizer(english_text()).input_ids)
    total = sum(counts.values()) + UNSEEN * vocab
    n = sum(len(burst.tokens) for burst in frames)
    as_sent = sum(burst.frame_bytes for burst in frames)
    varints = sum(_varint_bytes(burst) for burst in frames)

    def static(token: int) -> float:
        return (counts[token] + UNSEEN) / total

    def adaptive(burst: Burst) -> Callable[[int], float]:
        recent = Counter(burst.text)
        return lambda token: RECENT * recent[token] / len(burst.text) + (1 - RECENT) * static(token)

    lines = [
        f"{len(frames)} frames with {n} candidates, {n / len(frames):.1f} each\n",
        "| ids as | bytes per id | bytes per frame | of the frame as it is |",
        "|---|---|---|---|",
    ]
    for name, size in (
        ("varints", varints),
        ("range coder, all tokens alike", sum(_whole_bytes(len(b.tokens) * math.log2(vocab)) for b in frames)),
        ("range coder, frequencies of prose", sum(_range_bytes(b, static) for b in frames)),
        ("range coder, half of it the stream's own text", sum(_range_bytes(b, adaptive(b)) for b in frames)),
    ):
        whole = as_sent - varints + size
        lines.append(f"| {name} | {size / n:.2f} | {whole / len(frames):.1f} | {whole / as_sent:.0%} |")
    return "\n".join([*lines, "", _library_line(frames, np.array([static(token) for token in range(vocab)]))])


def _varint_bytes(burst: Burst) -> int:
    out = bytearray()
    for token in burst.tokens:
        put_uint(out, token)
    return len(out)


def _range_bytes(burst: Burst, chance: Callable[[int], float]) -> int:
    return _whole_bytes(-sum(math.log2(chance(token)) for token in burst.tokens))


def _whole_bytes(bits: float) -> int:
    """What the best of coders sends: one bit more than the entropy, in whole bytes."""
    return math.ceil((bits + 1) / 8)


def _library_line(frames: Sequence[Burst], shares: Any) -> str:
    import constriction

    from benchmarks.codecs import least_time

    model = constriction.stream.model.Categorical(shares.astype(np.float32), perfect=False)
    burst = max(frames, key=lambda burst: len(burst.tokens))
    tokens = np.array(burst.tokens, dtype=np.int32)

    def code() -> Any:
        coder = constriction.stream.queue.RangeEncoder()
        coder.encode(tokens, model)
        return coder.get_compressed()

    def varint() -> bytearray:
        out = bytearray()
        for token in burst.tokens:
            put_uint(out, token)
        return out

    return (
        f"constriction's coder with the frequencies of prose, {len(tokens)} ids: {4 * len(code())} bytes in "
        f"{least_time(code) * 1e6:.0f} µs; varints: {_varint_bytes(burst)} bytes in {least_time(varint) * 1e6:.0f} µs"
    )
