"""Every exact rule draws three tokens from the target's joint law, for every shape of draft and every processor."""

import pytest
import torch
from sampling_laws import (
    DRAFTER,
    DRAWS,
    NONE,
    PROMPT,
    STACKS,
    TARGET,
    Streams,
    V,
    assert_law,
    assert_wrong_law,
    chain_round,
    draft_chain,
    draws_with_replacement,
    draws_without_replacement,
    grow,
    joint_law,
    keyed_noise,
    keyed_tokens,
    processed_scores,
    spec_of,
    target_distribution,
    tree_round,
)

from bloombee_spec.sampling.comparison import block_verification, leviathan_chain, truncate_top_k
from bloombee_spec.sampling.processors import ProcessorStack
from bloombee_spec.sampling.rule import KeyedRule, propose_keyed
from bloombee_spec.sampling.spec import SamplingSpec

SHAPES = {"chain": (1, 1), "siblings": (3,), "full_tree": (2, 2)}


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("rule", [leviathan_chain, block_verification], ids=lambda rule: rule.__name__)
def test_chain_rules_sample_from_the_target(rule, k, stack):
    p, q = target_distribution(TARGET, spec_of(stack)), torch.softmax(DRAFTER.double(), -1)
    assert_law(grow(DRAWS, chain_round(rule, p, q, k)), joint_law(p))


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize(
    ("shape", "replacement"),
    [("chain", True), ("siblings", True), ("siblings", False), ("full_tree", True), ("full_tree", False)],
)
def test_sibling_rule_samples_from_the_target(shape, replacement, stack):
    p, q = target_distribution(TARGET, spec_of(stack)), torch.softmax(DRAFTER.double(), -1)
    siblings = draws_with_replacement if replacement else draws_without_replacement
    assert_law(grow(DRAWS, tree_round(p, q, SHAPES[shape], siblings, replacement)), joint_law(p))


def test_top_k_downlink_is_exact_for_the_truncated_target_only():
    p, q = target_distribution(TARGET, spec_of("plain")), torch.softmax(DRAFTER.double(), -1)
    truncated = truncate_top_k(p, 4)
    tokens = grow(DRAWS, chain_round(leviathan_chain, truncated, q, 2))
    assert_law(tokens, joint_law(truncated))
    assert_wrong_law(tokens, joint_law(p))


# The keyed rule


@pytest.mark.parametrize("stack", STACKS)
def test_keyed_rule_samples_from_the_target(stack):
    spec = spec_of(stack)
    tokens = keyed_tokens(processed_scores(TARGET, ProcessorStack.from_spec(spec)), keyed_noise())
    assert_law(tokens, joint_law(target_distribution(TARGET, spec)))


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
    a, b = [NONE, NONE, *prefix[len(PROMPT) :]][-2:]
    return TARGET[a, b]


def _draft_tree(shape: str, keyed: bool, noise, prefix: list[int]) -> dict[tuple[int, ...], None]:
    """Paths below `prefix`: children of every node, by the shared noise or by likelihood."""
    paths: dict[tuple[int, ...], None] = {(): None}
    frontier: list[tuple[int, ...]] = [()]
    for width in SHAPES[shape]:
        grown = []
        for path in frontier:
            a, b = [NONE, NONE, *prefix[len(PROMPT) :], *path][-2:]
            if keyed:
                children = propose_keyed(DRAFTER[a, b], noise.at(len(prefix) + len(path)), width)
            else:
                children = DRAFTER[a, b].topk(width).indices.tolist()
            grown += [(*path, child) for child in children]
        paths.update(dict.fromkeys(grown))
        frontier = grown
    return paths


def _keyed_run(shape: str, spec: SamplingSpec, row: int, processors: ProcessorStack, keyed: bool) -> list[int]:
    """The whole rule: draft a tree, choose at all its nodes in one call, walk down it by matching; three tokens."""
    rule, prefix = KeyedRule(spec, V, row=row, processors=processors), list(PROMPT)
    while len(prefix) < len(PROMPT) + 3:
        paths = [path for path in _draft_tree(shape, keyed, rule.noise, prefix) if len(prefix) + len(path) < 5]
        prefixes = [prefix + list(path) for path in paths]
        logits = torch.stack([_logits(ids) for ids in prefixes])
        chosen = dict(zip(paths, rule.choose_many(logits, prefixes, [len(ids) for ids in prefixes])))
        path: tuple[int, ...] = ()
        while path in chosen:
            path = (*path, chosen[path])
        prefix += path
    return prefix[len(PROMPT) : len(PROMPT) + 3]


@pytest.mark.parametrize("keyed", [True, False], ids=["shared_noise", "top_k"])
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_keyed_rule_through_any_tree_draws_the_tokens_checked_above(shape, stack, keyed):
    memo, streams = _Memo(spec_of(stack)), 100
    drawn = [_keyed_run(shape, spec_of(stack, seed=i // 50), i % 50, memo, keyed) for i in range(streams)]
    scores = processed_scores(TARGET, ProcessorStack.from_spec(spec_of(stack)))
    assert drawn == keyed_tokens(scores, keyed_noise()[:streams]).tolist()


def test_keyed_rule_through_drafts_samples_from_the_target():
    """2e4 runs of the whole rule, for the law without the detour through the test above."""
    memo = _Memo(spec_of("nucleus_repetition"))
    specs = [spec_of("nucleus_repetition", seed) for seed in range(20_000 // 50)]
    drawn = [_keyed_run("chain", spec, row, memo, keyed=True) for spec in specs for row in range(50)]
    assert_law(torch.tensor(drawn), joint_law(target_distribution(TARGET, spec_of("nucleus_repetition"))))


def test_block_verification_accepts_no_less_than_token_by_token():
    p, q = target_distribution(TARGET, spec_of("plain")), torch.softmax(DRAFTER.double(), -1)
    means = []
    for rule in (leviathan_chain, block_verification):
        streams, rng = Streams(DRAWS), torch.Generator().manual_seed(9)
        means.append(float(rule(*draft_chain(streams, p, q, 3, rng), rng).accepted.double().mean()))
    assert means[1] > means[0]
