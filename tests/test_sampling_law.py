"""The joint law of three tokens, compared with the target's, for every exact rule; and wrong rules that must fail the same check.

The target is synthetic: its logits depend on the last two tokens, and the options' processors are applied to the exact prefix, so the
law of the first three tokens is a table of vocab**3 numbers that can be computed. Each rule generates `DRAWS` continuations through
drafting and verification; the total variation between their histogram and the table must be below a bound that follows from the
number of draws. All seeds are fixed: a failure is never chance.
"""

import math

import pytest
import torch

from bloombee_spec.sampling.comparison import (
    block_verification,
    draw,
    leviathan_chain,
    specinfer_siblings,
    truncate_top_k,
)
from bloombee_spec.sampling.noise import race_noise
from bloombee_spec.sampling.processors import ProcessorStack
from bloombee_spec.sampling.rule import KeyedRule, propose_keyed, race
from bloombee_spec.sampling.spec import SamplingSpec

V = 6
NONE = V  # "no token yet" in a context
PROMPT = [0, 3]
DRAWS = 200_000
KEYED_DRAWS = 40_000

STACKS = {
    "plain": {},
    "cold_top_k": {"temperature": 0.7, "top_k": 4},
    "nucleus_repetition": {"temperature": 1.3, "top_p": 0.9, "repetition_penalty": 1.4},
    "bans": {"no_repeat_ngram_size": 2, "suppress_tokens": (5,), "presence_penalty": 0.8, "min_p": 0.05},
    "lengths": {"min_new_tokens": 2, "eos_token_ids": (1,), "bad_words_ids": ((0, 3, 2), (4, 4)), "typical_p": 0.9},
}


def _spec(name: str, seed: int = 0) -> SamplingSpec:
    return SamplingSpec(prompt_length=len(PROMPT), do_sample=True, seed=seed, **STACKS[name])


def _tables(seed: int, scale: float) -> torch.Tensor:
    """Random conditional logits `[V + 1, V + 1, V]`: the next token given the last two."""
    rng = torch.Generator().manual_seed(seed)
    return scale * torch.randn(V + 1, V + 1, V, generator=rng)


TARGET = _tables(seed=1, scale=1.5)
DRAFTER = 0.6 * TARGET + _tables(seed=2, scale=0.9)


def _distribution(logits: torch.Tensor, spec: SamplingSpec) -> torch.Tensor:
    """The target after processing, `[V + 1, V + 1, V]`: exact for the contexts of the first three tokens."""
    stack = ProcessorStack.from_spec(spec)
    return torch.softmax(_scores(logits, stack), dim=-1)


def _scores(logits: torch.Tensor, stack: ProcessorStack) -> torch.Tensor:
    rows = []
    for a in range(V + 1):
        for b in range(V + 1):
            prefix = PROMPT + [token for token in (a, b) if token != NONE]
            rows.append(stack.scores(logits[a, b], prefix).double())
    return torch.stack(rows).view(V + 1, V + 1, V)


def _joint(p: torch.Tensor) -> torch.Tensor:
    """`[V, V, V]`: the law of the first three tokens."""
    first, second, third = p[NONE, NONE], p[NONE, :V], p[:V, :V]
    return first[:, None, None] * second[:, :, None] * third


def _distance(tokens: torch.Tensor, joint: torch.Tensor) -> float:
    """Total variation between the histogram of `tokens [draws, 3]` and the law."""
    cells = (tokens[:, 0] * V + tokens[:, 1]) * V + tokens[:, 2]
    histogram = torch.bincount(cells, minlength=V**3).double() / len(tokens)
    return float((histogram - joint.flatten()).abs().sum() / 2)


def _bound(draws: int, joint: torch.Tensor) -> float:
    """Exceeded by the right law with a chance of at most 1e-6.

    The mean of |histogram - p| in a cell is at most its standard deviation, and one draw changes the total variation by at most
    1 / draws, so that McDiarmid's inequality bounds the rest.
    """
    noise = float((joint * (1 - joint) / draws).sqrt().sum() / 2)
    return noise + math.sqrt(math.log(1e6) / (2 * draws))


def _assert_law(tokens: torch.Tensor, joint: torch.Tensor) -> None:
    assert tokens.min() >= 0 and tokens.max() < V
    distance, bound = _distance(tokens, joint), _bound(len(tokens), joint)
    assert distance < bound, f"total variation {distance:.4f}, at most {bound:.4f} for the right law"


def _assert_wrong_law(tokens: torch.Tensor, joint: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="total variation"):
        _assert_law(tokens, joint)


class _Streams:
    """Many continuations of the prompt, grown by rounds of drafting and verifying until each has three tokens."""

    def __init__(self, draws: int):
        self.tokens = torch.full((draws, 2 + 16), NONE)
        self.length = torch.full((draws,), 2)  # the first two columns are the empty context

    def context(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.arange(len(self.tokens))
        return self.tokens[rows, self.length - 2], self.tokens[rows, self.length - 1]

    def append(self, token: torch.Tensor, where: torch.Tensor) -> None:
        rows = where.nonzero()[:, 0]
        self.tokens[rows, self.length[rows]] = token[rows]
        self.length[rows] += 1

    @property
    def done(self) -> bool:
        return bool((self.length >= 5).all())

    def first_three(self) -> torch.Tensor:
        return self.tokens[:, 2:5]


def _grow(draws: int, verify) -> torch.Tensor:
    streams, rng = _Streams(draws), torch.Generator().manual_seed(123)
    for _ in range(3):
        verify(streams, rng)
    assert streams.done
    return streams.first_three()


def _draft_chain(streams, p, q, k, rng, choose=draw):
    a, b = streams.context()
    p_rows, q_rows, drafted = [p[a, b]], [], []
    for _ in range(k):
        q_rows.append(q[a, b])
        token = choose(q_rows[-1], rng)
        drafted.append(token)
        a, b = b, token
        p_rows.append(p[a, b])
    return torch.stack(p_rows, 1), torch.stack(q_rows, 1), torch.stack(drafted, 1)


def _chain(rule, p, q, k, choose=draw):
    def verify(streams, rng):
        p_rows, q_rows, drafted = _draft_chain(streams, p, q, k, rng, choose)
        verdict = rule(p_rows, q_rows, drafted, rng)
        for i in range(k):
            streams.append(drafted[:, i], verdict.accepted > i)
        streams.append(verdict.token, verdict.accepted >= 0)

    return verify


def _siblings_with_replacement(q_row, n, rng):
    return torch.stack([draw(q_row, rng) for _ in range(n)], 1)


def _siblings_without_replacement(q_row, n, rng):
    drawn = []
    for _ in range(n):
        drawn.append(draw(q_row, rng))
        q_row = q_row.scatter(1, drawn[-1].unsqueeze(1), 0.0)
    return torch.stack(drawn, 1)


def _most_likely_siblings(q_row, n, rng):
    return q_row.topk(n, dim=-1).indices


def _tree(p, q, widths, siblings, replacement):
    """Siblings at each level, verified from the root down; ends with a token of the target. Children of nodes off the accepted path
    would be drawn independently of everything, so they need not be drawn."""

    def verify(streams, rng):
        alive = torch.ones(len(streams.tokens), dtype=torch.bool)
        for width in widths:
            a, b = streams.context()
            children = siblings(q[a, b], width, rng)
            index, token = specinfer_siblings(p[a, b], q[a, b], children, rng, replacement=replacement)
            streams.append(token, alive)
            alive = alive & (index >= 0)
        a, b = streams.context()
        streams.append(draw(p[a, b], rng), alive)

    return verify


SHAPES = {"chain": (1, 1), "siblings": (3,), "full_tree": (2, 2)}


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("rule", [leviathan_chain, block_verification], ids=lambda rule: rule.__name__)
def test_chain_rules_sample_from_the_target(rule, k, stack):
    p, q = _distribution(TARGET, _spec(stack)), torch.softmax(DRAFTER.double(), -1)
    _assert_law(_grow(DRAWS, _chain(rule, p, q, k)), _joint(p))


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("replacement", [True, False])
def test_sibling_rule_samples_from_the_target(replacement, shape, stack):
    p, q = _distribution(TARGET, _spec(stack)), torch.softmax(DRAFTER.double(), -1)
    siblings = _siblings_with_replacement if replacement else _siblings_without_replacement
    _assert_law(_grow(DRAWS, _tree(p, q, SHAPES[shape], siblings, replacement)), _joint(p))


def test_top_k_downlink_is_exact_for_the_truncated_target_only():
    p, q = _distribution(TARGET, _spec("plain")), torch.softmax(DRAFTER.double(), -1)
    truncated = truncate_top_k(p, 4)
    tokens = _grow(DRAWS, _chain(leviathan_chain, truncated, q, 2))
    _assert_law(tokens, _joint(truncated))
    _assert_wrong_law(tokens, _joint(p))


# The keyed rule


@pytest.fixture(scope="module")
def noise() -> torch.Tensor:
    """`-log E` of many streams at the first positions: `[draws, 4, V]`. Streams differ by seed and by row."""
    torch.set_num_threads(1)
    streams = [(index // 50, index % 50) for index in range(KEYED_DRAWS)]
    return torch.stack(
        [torch.stack([race_noise(seed, row, len(PROMPT) + i, V) for i in range(3)]) for seed, row in streams]
    )


def _keyed_tokens(scores: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    a, b = torch.full((len(noise),), NONE), torch.full((len(noise),), NONE)
    tokens = []
    for i in range(3):
        a, b = b, race(scores[a, b], noise[:, i]).argmax(-1)
        tokens.append(b)
    return torch.stack(tokens, 1)


@pytest.mark.parametrize("stack", STACKS)
def test_keyed_rule_samples_from_the_target(stack, noise):
    spec = _spec(stack)
    tokens = _keyed_tokens(_scores(TARGET, ProcessorStack.from_spec(spec)), noise)
    _assert_law(tokens, _joint(_distribution(TARGET, spec)))


class _Memo(ProcessorStack):
    """The stack of a spec with its results remembered, so that 2e4 runs of the whole rule take seconds."""

    def __init__(self, spec):
        inner = ProcessorStack.from_spec(spec)
        super().__init__(inner.processors)
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def scores(self, logits, prefix):
        key = tuple(prefix)
        if key not in self.known:
            self.known[key] = super().scores(logits, prefix)
        return self.known[key]


def _logits(prefix: list[int]) -> torch.Tensor:
    a, b = ([NONE, NONE] + prefix[len(PROMPT) :])[-2:]
    return TARGET[a, b]


def _draft_tree(shape: str, keyed: bool, noise, prefix: list[int]) -> dict[tuple[int, ...], None]:
    """Paths below `prefix`: children of every node, by the shared noise or by likelihood."""
    paths: dict[tuple[int, ...], None] = {(): None}
    frontier: list[tuple[int, ...]] = [()]
    for width in SHAPES[shape]:
        grown = []
        for path in frontier:
            a, b = ([NONE, NONE] + prefix[len(PROMPT) :] + list(path))[-2:]
            if keyed:
                children = propose_keyed(DRAFTER[a, b], noise.at(len(prefix) + len(path)), width)
            else:
                children = DRAFTER[a, b].topk(width).indices.tolist()
            grown += [(*path, child) for child in children]
        paths.update(dict.fromkeys(grown))
        frontier = grown
    return paths


@pytest.mark.parametrize("keyed", [True, False], ids=["shared_noise", "top_k"])
@pytest.mark.parametrize(
    ("shape", "stack"), [("chain", "plain"), ("siblings", "bans"), ("full_tree", "nucleus_repetition")]
)
def test_keyed_rule_through_drafts_and_trees_samples_from_the_target(shape, stack, keyed):
    """The whole path: draft a tree, choose at all its nodes in one call, walk down it by matching. 2e4 draws."""
    memo = _Memo(_spec(stack))
    drawn = []
    for index in range(20_000):
        rule = KeyedRule(_spec(stack, seed=index // 50), V, row=index % 50, processors=memo)
        prefix = list(PROMPT)
        while len(prefix) < len(PROMPT) + 3:
            paths = [path for path in _draft_tree(shape, keyed, rule.noise, prefix) if len(prefix) + len(path) < 5]
            prefixes = [prefix + list(path) for path in paths]
            chosen = dict(
                zip(
                    paths,
                    rule.choose_many(
                        torch.stack([_logits(ids) for ids in prefixes]), prefixes, [len(ids) for ids in prefixes]
                    ),
                )
            )
            path: tuple[int, ...] = ()
            while path in chosen:
                path = (*path, chosen[path])
            prefix += path
        drawn.append(prefix[len(PROMPT) : len(PROMPT) + 3])
    _assert_law(torch.tensor(drawn), _joint(_distribution(TARGET, _spec(stack))))


# Wrong rules: each of them has been shipped by somebody. They must fail the check that the right ones pass.


def _argmax(row, rng):
    return row.argmax(-1)


@pytest.mark.parametrize("rule", [leviathan_chain, block_verification], ids=lambda rule: rule.__name__)
def test_wrong_deterministic_drafts_judged_by_p_over_q(rule):
    p, q = _distribution(TARGET, _spec("plain")), torch.softmax(DRAFTER.double(), -1)
    _assert_wrong_law(_grow(DRAWS, _chain(rule, p, q, 2, choose=_argmax)), _joint(p))


@pytest.mark.parametrize("replacement", [True, False])
def test_wrong_top_k_siblings_judged_by_p_over_q(replacement):
    p, q = _distribution(TARGET, _spec("plain")), torch.softmax(DRAFTER.double(), -1)
    _assert_wrong_law(_grow(DRAWS, _tree(p, q, (3,), _most_likely_siblings, replacement)), _joint(p))


def test_wrong_siblings_without_replacement_and_q_not_updated():
    p, q = _distribution(TARGET, _spec("plain")), torch.softmax(DRAFTER.double(), -1)
    tokens = _grow(DRAWS, _tree(p, q, (3, 3), _siblings_without_replacement, replacement=True))
    _assert_wrong_law(tokens, _joint(p))


def test_wrong_match_followed_by_a_fresh_draw(noise):
    """A draft is kept when it equals the target's token; otherwise that token is thrown away and another one is drawn."""
    scores, p = _scores(TARGET, ProcessorStack.from_spec(_spec("plain"))), _distribution(TARGET, _spec("plain"))
    rng = torch.Generator().manual_seed(5)
    a, b = torch.full((len(noise),), NONE), torch.full((len(noise),), NONE)
    tokens = []
    for i in range(3):
        drafted = race(DRAFTER[a, b], noise[:, i]).argmax(-1)
        target = race(scores[a, b], noise[:, i]).argmax(-1)
        a, b = b, torch.where(drafted == target, drafted, draw(p[a, b], rng))
        tokens.append(b)
    _assert_wrong_law(torch.stack(tokens, 1), _joint(p))


def test_wrong_independent_draw_per_path(noise):
    """Each of two paths draws its own target token at the node that they share; the first that matches is kept."""
    scores, p = _scores(TARGET, ProcessorStack.from_spec(_spec("plain"))), _distribution(TARGET, _spec("plain"))
    rng = torch.Generator().manual_seed(6)
    a, b = torch.full((len(noise),), NONE), torch.full((len(noise),), NONE)
    tokens = []
    for i in range(3):
        siblings = DRAFTER[a, b].topk(2, dim=-1).indices
        first = race(scores[a, b], noise[:, i]).argmax(-1)
        second = draw(p[a, b], rng)
        second_matches = (first != siblings[:, 0]) & (second == siblings[:, 1])
        a, b = b, torch.where(second_matches, second, first)
        tokens.append(b)
    _assert_wrong_law(torch.stack(tokens, 1), _joint(p))


def test_wrong_keyed_drafts_judged_by_p_over_q(noise):
    """The shared noise and a p/q test together: one token is enough to see the bias."""
    p, q = _distribution(TARGET, _spec("plain")), torch.softmax(DRAFTER.double(), -1)
    keys = iter(noise[:, i] for i in range(3))

    def keyed_draft(row, rng):
        return race(row.log(), next(keys)).argmax(-1)

    streams, rng = _Streams(len(noise)), torch.Generator().manual_seed(7)
    scores = _scores(TARGET, ProcessorStack.from_spec(_spec("plain")))
    for i in range(3):
        a, b = streams.context()
        drafted = keyed_draft(q[a, b], rng)
        p_x, q_x = p[a, b].gather(1, drafted[:, None])[:, 0], q[a, b].gather(1, drafted[:, None])[:, 0]
        accept = torch.rand(len(noise), generator=rng, dtype=torch.float64) * q_x < p_x
        target = race(scores[a, b], noise[:, i]).argmax(-1)
        streams.append(torch.where(accept, drafted, target), accept | True)
    _assert_wrong_law(streams.first_three(), _joint(p))


def test_block_verification_accepts_no_less_than_token_by_token():
    p, q = _distribution(TARGET, _spec("plain")), torch.softmax(DRAFTER.double(), -1)
    means = []
    for rule in (leviathan_chain, block_verification):
        streams, rng = _Streams(DRAWS), torch.Generator().manual_seed(9)
        means.append(float(rule(*_draft_chain(streams, p, q, 3, rng), rng).accepted.double().mean()))
    assert means[1] > means[0]
