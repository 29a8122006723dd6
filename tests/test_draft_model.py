"""The model drafter: its tree says what plain runs of the model say, and what stays possible is not computed twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee_spec.draft.causal_lm import TreeModel
from bloombee_spec.draft.model import ModelDraftConfig, ModelDrafter
from tests.draft_helpers import (
    assert_probs_are_the_models,
    chain_of,
    greedy,
    plain_probs,
    proposed,
    tiny_llama,
    verifications,
)

VOCAB = 61


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_llama(vocab_size=VOCAB)


@pytest.fixture(scope="module")
def tree_model(llama: Any) -> TreeModel:
    return TreeModel(llama)


class Counted:
    """A tree model that counts the rows it runs."""

    def __init__(self, model: TreeModel) -> None:
        self.model, self.rows, self.calls = model, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(
        self, cache: Any, tokens: Sequence[int], positions: Sequence[int], visible: torch.Tensor
    ) -> torch.Tensor:
        self.rows += len(tokens)
        self.calls += 1
        return self.model.forward(cache, tokens, positions, visible)


def _counted(model: TreeModel, **config: Any) -> tuple[ModelDrafter, Counted]:
    drafter = ModelDrafter(model, config=ModelDraftConfig(**config))
    counted = Counted(model)
    drafter._stream.model = counted  # type: ignore[assignment]
    return drafter, counted


turns = st.lists(
    st.tuples(
        st.sampled_from(["favourite", "sibling", "deep", "stranger", "rewind"]), st.integers(1, 4), st.booleans()
    ),
    min_size=1,
    max_size=5,
)


@given(turns=turns, seed=st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_probabilities_are_those_of_a_plain_run_after_any_history(
    tree_model: TreeModel, turns: list[tuple[str, int, bool]], seed: int
) -> None:
    # Seen to fail with: rows of survivors not renumbered, positions one too high, crop not one short of the root,
    # siblings left visible, rejected rows kept.
    drafter = ModelDrafter(tree_model)
    committed = [(seed * 7 + i * i) % VOCAB for i in range(5)]
    drafter.start(committed)
    for kind, n, with_path in turns:
        proposals = proposed(drafter, (), 10, 4, VOCAB)
        deepest = max((chain_of(proposals, i) for i in range(len(proposals))), key=len)
        if kind == "rewind":
            committed = [*committed[: max(2, len(committed) - n)], seed, 7, 8]
            drafter.start(committed)
        else:
            tokens = {
                "favourite": [proposals[0].token],
                "sibling": [[each.token for each in proposals if each.parent == -1][-1]],
                "deep": deepest[:n],
                "stranger": [*deepest[: n - 1], (deepest[-1] + 1) % VOCAB],
            }[kind]
            drafter.observe(tokens)
            committed = committed + tokens
        assert_probs_are_the_models(drafter, committed, [3, 5][:n] if with_path else [])


def test_the_tree_is_the_likeliest_one(llama: Any, tree_model: TreeModel) -> None:
    """Against growing it naively, one node at a time from plain runs."""
    config = ModelDraftConfig(siblings=12, decay=0.4, batch=3)
    prompt = [1, 2, 3, 4, 5]
    drafter = ModelDrafter(tree_model, config=config)
    drafter.start(prompt)
    chains: list[tuple[int, ...]] = []
    frontier: dict[tuple[int, ...], float] = {}
    chain: tuple[int, ...] = ()
    cost = 0.0
    for _ in range(14):
        if len(chain) < 3:
            values, tokens = plain_probs(llama, prompt + list(chain)).topk(12)
            for value, token in zip(values.tolist(), tokens.tolist()):
                longer = (*chain, token)
                frontier[longer] = cost - math.log(value) - math.log(0.4)
        chain = min(frontier, key=lambda key: frontier[key])
        cost = frontier.pop(chain)
        chains.append(chain)
    proposals = proposed(drafter, (), 14, 3, VOCAB)
    assert [tuple(chain_of(proposals, i)) for i in range(14)] == chains


def test_a_drafter_that_is_the_target_is_never_wrong(llama: Any, tree_model: TreeModel) -> None:
    prompt = [9, 8, 7]
    output = greedy(llama, prompt, 24)
    drafter = ModelDrafter(tree_model, config=ModelDraftConfig(siblings=1, min_prob=1e-9))
    assert verifications(drafter, prompt, output, budget=5) == 4  # 24 tokens, six at a time


def test_the_committed_prefix_and_surviving_candidates_are_never_run_again(llama: Any, tree_model: TreeModel) -> None:
    # Seen to fail with `start` that resets, and with survivors that are dropped.
    prompt = list(range(1, 41))
    output = greedy(llama, prompt, 12)
    drafter, counted = _counted(tree_model, siblings=1, min_prob=1e-9)
    drafter.start(prompt)
    proposed(drafter, (), 4)
    assert counted.rows == len(prompt) + 3  # the fourth candidate is a leaf: not run
    drafter.observe(output[:2])
    proposed(drafter, (), 4)
    assert counted.rows == len(prompt) + 3 + 2  # of four candidates one is known, and the last one a leaf
    proposed(drafter, output[2:5], 1)
    assert counted.rows == len(prompt) + 3 + 2  # the path was run as candidates
    drafter.start([*prompt, *output[:2]])
    proposed(drafter, (), 4)
    assert counted.rows == len(prompt) + 3 + 2  # nothing changed
    drafter.observe([(output[2] + 1) % VOCAB])
    proposed(drafter, (), 1)
    assert counted.rows == len(prompt) + 3 + 2 + 1  # a miss costs the corrected token


def test_a_rewind_costs_one_row(tree_model: TreeModel) -> None:
    prompt = list(range(1, 41))
    drafter, counted = _counted(tree_model)
    drafter.start(prompt)
    proposed(drafter, (), 1)
    drafter.start(prompt[:20])
    assert proposed(drafter, (), 1)
    assert counted.rows == len(prompt) + 1


def test_a_layer_is_one_pass(tree_model: TreeModel) -> None:
    drafter, counted = _counted(tree_model, batch=64)
    drafter.start([1, 2, 3])
    tree = proposed(drafter, (), 30, max_depth=3)
    assert len(tree) == 30
    assert counted.calls == 1 + 2


@given(
    text=st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=12),
    paths=st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=3), max_size=3),
)
@settings(max_examples=20, deadline=None)
def test_proposing_leaves_no_trace(tree_model: TreeModel, text: list[int], paths: list[list[int]]) -> None:
    asking, silent = ModelDrafter(tree_model), ModelDrafter(tree_model)
    for drafter in (asking, silent):
        drafter.start(text[:-1])
    for path in paths:
        asking.propose(path, 8, max_depth=3)
    for drafter in (asking, silent):
        drafter.observe(text[-1:])
    left, right = (proposed(drafter, (), 8, 3) for drafter in (asking, silent))
    assert [(each.parent, each.token) for each in left] == [(each.parent, each.token) for each in right]
    assert [each.prob for each in left] == pytest.approx([each.prob for each in right], abs=1e-5)


def test_interruptions_lose_nothing(tree_model: TreeModel) -> None:
    """Interrupted at each point in turn: what comes back is well formed, and the next call completes it."""
    complete = ModelDrafter(tree_model)
    complete.start(list(range(1, 60)))
    expected = proposed(complete, [5], 12, 4)
    for polls in range(6):
        drafter = ModelDrafter(tree_model)
        drafter.start(list(range(1, 60)))
        left = iter([False] * polls)
        proposals = drafter.propose([5], 12, max_depth=4, interrupted=lambda left=left: next(left, True))  # type: ignore[misc]
        assert len(proposals) <= 12
        again = proposed(drafter, [5], 12, 4)
        assert [(each.parent, each.token) for each in again] == [(each.parent, each.token) for each in expected]


def test_candidates_that_are_kept_are_bounded(tree_model: TreeModel) -> None:
    drafter, _ = _counted(tree_model, max_rows=20)
    drafter.start([1, 2, 3])
    for token in range(VOCAB):
        proposed(drafter, [token], 6, 3)
        assert drafter._stream.tree_rows <= 20 + 1 + 3 * 8 + 6
    drafter.observe([proposed(drafter)[0].token])
    assert drafter._stream.root.parent is None  # what was committed is not held by what follows


def test_forks_share_weights_and_nothing_else(tree_model: TreeModel) -> None:
    first = ModelDrafter(tree_model)
    second = first.fork()
    first.start([1, 2, 3])
    second.start([4, 5])
    assert_probs_are_the_models(first, [1, 2, 3], [])
    assert_probs_are_the_models(second, [4, 5], [])
    assert first.model is second.model


# --------------------------------------------------------------------------------------------- shared noise at T > 0


def _noise(position: int) -> torch.Tensor:
    return torch.empty(VOCAB).exponential_(generator=torch.Generator().manual_seed(1000 + position))


def _draw(model: Any, tokens: list[int], temperature: float) -> int:
    """What a target with this model draws: the smallest E / p, with p at the temperature."""
    p = plain_probs(model, tokens).double() ** (1 / temperature)
    return int((_noise(len(tokens)).double() / (p / p.sum())).argmin())


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_with_the_targets_noise_the_target_itself_is_never_wrong(
    llama: Any, tree_model: TreeModel, temperature: float
) -> None:
    # Seen to fail with the noise of the node's own position, with p instead of p ** (1 / T), and with `noise` ignored.
    prompt = [3, 1, 4]
    output = list(prompt)
    for _ in range(15):
        output.append(_draw(llama, output, temperature))
    drafter = ModelDrafter(tree_model, config=ModelDraftConfig(siblings=1, min_prob=1e-12))
    drafter.couple(_noise, temperature)
    assert verifications(drafter, prompt, output[3:], budget=4) == 3
    coupled = proposed(drafter, (), 1)
    drafter.couple(None, 0)
    assert proposed(drafter, (), 1) != coupled  # at once, in the middle of a stream
    assert verifications(drafter, prompt, output[3:], budget=4) > 3


def test_noise_without_temperature_and_noise_that_is_too_short_are_refused(tree_model: TreeModel) -> None:
    drafter = ModelDrafter(tree_model)
    with pytest.raises(ValueError, match="temperature"):
        drafter.couple(_noise, 0)
    drafter.couple(lambda position: _noise(position)[:10], 1.0)
    drafter.start([1, 2])
    with pytest.raises(ValueError, match="noise for 10"):
        drafter.propose((), 4)
