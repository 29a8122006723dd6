"""A synthetic target with a known joint law of three tokens, ways to generate from it, and the check of what was
generated.

The target's logits depend on the last two tokens, and the options' processors are applied to the exact prefix, so the
law of the first three tokens is a table of vocab**3 numbers. The total variation between it and a histogram must be
below a bound that follows from the number of draws. All seeds are fixed: a failure is never chance.
"""

import functools
import math

import pytest
import torch
from sampling_targets import HAS_MIN_P

from bloombee_spec.sampling.comparison import draw, specinfer_siblings
from bloombee_spec.sampling.noise import race_noise
from bloombee_spec.sampling.processors import ProcessorStack
from bloombee_spec.sampling.rule import race
from bloombee_spec.sampling.spec import SamplingSpec

V = 6
NONE = V  # "no token yet" in a context
PROMPT = [0, 3]
DRAWS = 60_000
MANY_DRAWS = 200_000  # for a bias of a few per cent
KEYED_DRAWS = 30_000

STACKS = {
    "plain": {},
    "cold_top_k": {"temperature": 0.7, "top_k": 4},
    "nucleus_repetition": {"temperature": 1.3, "top_p": 0.9, "repetition_penalty": 1.4},
    "bans": {"no_repeat_ngram_size": 2, "suppress_tokens": (5,), "presence_penalty": 0.8, "min_p": 0.05 * HAS_MIN_P},
    "lengths": {"min_new_tokens": 2, "eos_token_ids": (1,), "bad_words_ids": ((0, 3, 2), (4, 4)), "typical_p": 0.9},
}


def spec_of(name: str, seed: int = 0) -> SamplingSpec:
    return SamplingSpec(prompt_length=len(PROMPT), do_sample=True, seed=seed, **STACKS[name])


def random_tables(seed: int, scale: float) -> torch.Tensor:
    """Random conditional logits `[V + 1, V + 1, V]`: the next token given the last two."""
    rng = torch.Generator().manual_seed(seed)
    return scale * torch.randn(V + 1, V + 1, V, generator=rng)


TARGET = random_tables(seed=1, scale=1.5)
DRAFTER = 0.6 * TARGET + random_tables(seed=2, scale=0.9)


def target_distribution(logits: torch.Tensor, spec: SamplingSpec) -> torch.Tensor:
    """The target after processing, `[V + 1, V + 1, V]`: exact for the contexts of the first three tokens."""
    stack = ProcessorStack.from_spec(spec)
    return torch.softmax(processed_scores(logits, stack), dim=-1)


def processed_scores(logits: torch.Tensor, stack: ProcessorStack) -> torch.Tensor:
    rows = []
    for a in range(V + 1):
        for b in range(V + 1):
            prefix = PROMPT + [token for token in (a, b) if token != NONE]
            rows.append(stack.scores(logits[a, b], prefix).double())
    return torch.stack(rows).view(V + 1, V + 1, V)


def joint_law(p: torch.Tensor) -> torch.Tensor:
    """`[V, V, V]`: the law of the first three tokens."""
    first, second, third = p[NONE, NONE], p[NONE, :V], p[:V, :V]
    return first[:, None, None] * second[:, :, None] * third


def total_variation(tokens: torch.Tensor, joint: torch.Tensor) -> float:
    """Total variation between the histogram of `tokens [draws, 3]` and the law."""
    cells = (tokens[:, 0] * V + tokens[:, 1]) * V + tokens[:, 2]
    histogram = torch.bincount(cells, minlength=V**3).double() / len(tokens)
    return float((histogram - joint.flatten()).abs().sum() / 2)


def noise_bound(draws: int, joint: torch.Tensor) -> float:
    """Exceeded by the right law with a chance of at most 1e-6.

    The mean of |histogram - p| in a cell is at most its standard deviation, and one draw changes the total variation
    by at most 1 / draws, so that McDiarmid's inequality bounds the rest.
    """
    noise = float((joint * (1 - joint) / draws).sqrt().sum() / 2)
    return noise + math.sqrt(math.log(1e6) / (2 * draws))


def assert_law(tokens: torch.Tensor, joint: torch.Tensor) -> None:
    assert tokens.min() >= 0 and tokens.max() < V
    distance, bound = total_variation(tokens, joint), noise_bound(len(tokens), joint)
    assert distance < bound, f"total variation {distance:.4f}, at most {bound:.4f} for the right law"


def assert_wrong_law(tokens: torch.Tensor, joint: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="total variation"):
        assert_law(tokens, joint)


class Streams:
    """Many continuations of the prompt, grown by rounds of drafting and verifying until each has three tokens."""

    def __init__(self, draws: int):
        self.tokens = torch.full((draws, 2 + 8), NONE)
        self.length = torch.full((draws,), 2)  # the first two columns are the empty context
        self.start_round()

    def start_round(self) -> None:
        """From here on, contexts and appended tokens are those of the streams that are not finished."""
        self.open = (self.length < 5).nonzero()[:, 0]

    def context(self) -> tuple[torch.Tensor, torch.Tensor]:
        length = self.length[self.open]
        return self.tokens[self.open, length - 2], self.tokens[self.open, length - 1]

    def append(self, token: torch.Tensor, where: torch.Tensor) -> None:
        rows = self.open[where]
        self.tokens[rows, self.length[rows]] = token[where]
        self.length[rows] += 1

    def first_three(self) -> torch.Tensor:
        return self.tokens[:, 2:5]


def grow(draws: int, verify) -> torch.Tensor:
    streams, rng = Streams(draws), torch.Generator().manual_seed(123)
    while len(streams.open):
        verify(streams, rng)
        streams.start_round()
    return streams.first_three()


def draft_chain(streams, p, q, k, rng, choose=draw):
    a, b = streams.context()
    p_rows, q_rows, drafted = [p[a, b]], [], []
    for _ in range(k):
        q_rows.append(q[a, b])
        token = choose(q_rows[-1], rng)
        drafted.append(token)
        a, b = b, token
        p_rows.append(p[a, b])
    return torch.stack(p_rows, 1), torch.stack(q_rows, 1), torch.stack(drafted, 1)


def chain_round(rule, p, q, k, choose=draw):
    def verify(streams, rng):
        p_rows, q_rows, drafted = draft_chain(streams, p, q, k, rng, choose)
        verdict = rule(p_rows, q_rows, drafted, rng)
        for i in range(k):
            streams.append(drafted[:, i], verdict.accepted > i)
        streams.append(verdict.token, verdict.accepted >= 0)

    return verify


def draws_with_replacement(q_row, n, rng):
    return torch.stack([draw(q_row, rng) for _ in range(n)], 1)


def draws_without_replacement(q_row, n, rng):
    drawn = []
    for _ in range(n):
        drawn.append(draw(q_row, rng))
        q_row = q_row.scatter(1, drawn[-1].unsqueeze(1), 0.0)
    return torch.stack(drawn, 1)


def most_likely(q_row, n, rng):
    return q_row.topk(n, dim=-1).indices


def tree_round(p, q, widths, siblings, replacement):
    """Siblings at each level, verified from the root down; ends with a token of the target. Children of nodes off the
    accepted path would be drawn independently of everything, so they need not be drawn."""

    def verify(streams, rng):
        alive = torch.ones(len(streams.open), dtype=torch.bool)
        for width in widths:
            a, b = streams.context()
            children = siblings(q[a, b], width, rng)
            index, token = specinfer_siblings(p[a, b], q[a, b], children, rng, replacement=replacement)
            streams.append(token, alive)
            alive = alive & (index >= 0)
        a, b = streams.context()
        streams.append(draw(p[a, b], rng), alive)

    return verify


@functools.lru_cache(maxsize=1)
def keyed_noise() -> torch.Tensor:
    """`-log E` of many streams at the first positions: `[draws, 3, V]`. Streams differ by seed and by row."""
    torch.set_num_threads(1)
    streams = [(index // 50, index % 50) for index in range(KEYED_DRAWS)]
    return torch.stack(
        [torch.stack([race_noise(seed, row, len(PROMPT) + i, V) for i in range(3)]) for seed, row in streams]
    )


def keyed_tokens(scores: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    a, b = torch.full((len(noise),), NONE), torch.full((len(noise),), NONE)
    tokens = []
    for i in range(3):
        a, b = b, race(scores[a, b], noise[:, i]).argmax(-1)
        tokens.append(b)
    return torch.stack(tokens, 1)
