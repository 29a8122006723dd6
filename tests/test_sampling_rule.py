"""The keyed rule at one node: ties, invalid logits, bans, and what it looks at."""

import math

import pytest
import torch
from host_helpers import OLD_TRANSFORMERS
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_targets import GREEDY, PROMPT, SAMPLING, STACKS, VOCAB, model

from bloombee_spec.sampling.noise import NoiseCache, race_noise
from bloombee_spec.sampling.processors import ProcessorStack, SamplingError
from bloombee_spec.sampling.rule import KeyedRule, propose_keyed
from bloombee_spec.sampling.spec import SamplingSpec


def test_choices_do_not_depend_on_what_was_chosen_before():
    rule = KeyedRule(SAMPLING, VOCAB)
    nodes = [PROMPT, [*PROMPT, 5], [*PROMPT, 6], [*PROMPT, 5, 5]]
    forwards = [rule.choose(model(ids), ids, len(ids)) for ids in nodes]
    rule.commit(len(PROMPT) + 5)
    backwards = [rule.choose(model(ids), ids, len(ids)) for ids in reversed(nodes)]
    assert forwards == backwards[::-1]


def test_siblings_share_the_noise_of_their_position():
    """Two nodes with equal logits at one position get one token; at another position the draw is another one."""
    rule = KeyedRule(SAMPLING, VOCAB)
    logits = torch.zeros(200, VOCAB)
    assert len(set(rule.choose_many(logits, [[]] * 200, [9] * 200))) == 1
    assert len(set(rule.choose_many(logits, [[]] * 200, list(range(200))))) > VOCAB // 2


# Ties, bans and invalid logits


@pytest.mark.parametrize("size", [2, 7, 64, 1000, 50_257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_ties_go_to_the_lowest_id(size, dtype):
    rule, penalised = KeyedRule(GREEDY, size), KeyedRule(SamplingSpec(prompt_length=0, presence_penalty=1.0), size)
    places = torch.randperm(size, generator=torch.Generator().manual_seed(size))[: max(2, size // 50)]
    logits = torch.full((size,), -1.0, dtype=dtype)
    logits[places] = 3.0
    lowest = int(places.min())
    assert rule.choose(logits, [], 0) == lowest
    assert rule.choose_many(torch.stack([logits, logits]), [[], []], [0, 0]) == [lowest, lowest]
    assert penalised.choose(logits, [], 0) == lowest
    assert rule.choose(torch.zeros(size, dtype=dtype), [], 0) == 0


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.sampled_from([-math.inf, -1.0, 0.0, -0.0, 2.0, 2.0]), min_size=1, max_size=40))
def test_greedy_is_the_first_largest_value(values):
    rule = KeyedRule(GREEDY, len(values))
    if all(value == -math.inf for value in values):
        with pytest.raises(SamplingError, match="no token"):
            rule.choose(torch.tensor(values), [], 0)
    else:
        assert rule.choose(torch.tensor(values), [], 0) == values.index(max(values))


def test_ties_after_noise_go_to_the_lowest_id():
    rule = KeyedRule(SAMPLING, 4)
    rule.noise._noise[0] = torch.tensor([0.0, 1.0, 1.0, 0.5], dtype=torch.float64)
    assert rule.choose(torch.zeros(4), [], 0) == 1


@pytest.mark.parametrize("name", STACKS)
def test_nan_is_an_error_wherever_it_is(name):
    rule = KeyedRule(STACKS[name], VOCAB)
    for place in (0, 11, VOCAB - 1):
        logits = model(PROMPT)
        logits[place] = math.nan
        with pytest.raises(SamplingError):
            rule.choose_many(torch.stack([model(PROMPT), logits]), [PROMPT, PROMPT], [3, 3])


def test_nan_is_replaced_where_that_is_asked_for():
    spec = SamplingSpec(prompt_length=0, remove_invalid_values=True)
    assert KeyedRule(spec, 3).choose(torch.tensor([-2.0, math.nan, -1.0]), [], 0) == 1  # NaN becomes 0


@pytest.mark.parametrize("option", ["eta_cutoff", "typical_p", "top_p"])
def test_nan_does_not_hide_behind_a_warper(option):
    rule = KeyedRule(SamplingSpec(prompt_length=0, do_sample=True, **{option: 0.5}), 4)
    with pytest.raises(SamplingError):
        rule.choose(torch.tensor([1.0, math.nan, 0.0, 2.0]), [], 0)


def test_infinite_scores_cannot_be_sampled():
    with pytest.raises(SamplingError, match="infinite"):
        KeyedRule(SAMPLING, 3).choose(torch.tensor([0.0, math.inf, 1.0]), [], 0)


def test_options_that_exclude_everything_are_an_error():
    spec = SamplingSpec(prompt_length=0, do_sample=True, suppress_tokens=(0, 1, 2))
    with pytest.raises(SamplingError, match="no token"):
        KeyedRule(spec, 3).choose(torch.zeros(3), [], 0)


def test_an_overflowing_penalty_is_an_error():
    spec = SamplingSpec(prompt_length=0, exponential_decay_length_penalty=(0, 100.0), eos_token_ids=(1,))
    with pytest.raises(SamplingError, match="ExponentialDecay"):
        KeyedRule(spec, 3).choose(torch.ones(3), [0] * 200, 200)


def test_a_banned_token_is_never_drawn():
    """1e5 draws; the banned tokens are the most likely ones, and noise is finite, so that -inf stays -inf."""
    spec = SamplingSpec(prompt_length=0, do_sample=True, seed=3, suppress_tokens=(0,), bad_words_ids=((1,),))
    logits = torch.tensor([50.0, 40.0, -math.inf, 0.0, 0.0])
    rule, draws = KeyedRule(spec, 5), 100_000
    scores = rule.processors.scores(logits, [])
    unprocessed = KeyedRule(SAMPLING, 5)
    noise = torch.stack([race_noise(3, row, 0, 5) for row in range(draws)])
    rule.noise._noise[0] = noise[0]
    assert rule.choose(logits, [], 0) == int((scores.double() + noise[0]).argmax())
    drawn = (scores.double() - scores.max() + noise).argmax(dim=-1)
    assert sorted(set(drawn.tolist())) == [3, 4]
    assert all(
        unprocessed.choose(torch.tensor([-math.inf, 0.0, -math.inf, 0.0, 0.0]), [], row) in (1, 3, 4)
        for row in range(500)
    )


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="this transformers leaves -inf as it is with remove_invalid_values")
def test_scores_of_any_size_leave_the_noise_alone():
    """With remove_invalid_values a banned token has the lowest float32 instead of -inf; alone, such tokens are
    uniform.
    """
    rule = KeyedRule(SamplingSpec(prompt_length=0, do_sample=True, remove_invalid_values=True), 3)
    drawn = [rule.choose(torch.full((3,), -math.inf), [0] * position, position) for position in range(300)]
    assert min(drawn.count(token) for token in range(3)) > 60


def test_sampling_is_not_greedy_in_disguise():
    """The entropy of what is drawn is the entropy of the distribution, not zero."""
    logits = torch.tensor([1.0, 0.5, 0.0, -0.5])
    rule = KeyedRule(SamplingSpec(prompt_length=0, do_sample=True, seed=5), 4)
    counts = torch.bincount(torch.tensor([rule.choose(logits, [], position) for position in range(4000)]), minlength=4)
    drawn = counts / counts.sum()
    entropy = float(-(drawn * drawn.log()).sum())
    p = logits.softmax(-1)
    assert abs(entropy - float(-(p * p.log()).sum())) < 0.05


def test_temperature_is_applied_once():
    logits = torch.tensor([1.0, 0.0])
    rule = KeyedRule(SamplingSpec(prompt_length=0, do_sample=True, seed=5, temperature=0.5), 2)
    share = sum(rule.choose(logits, [], position) == 0 for position in range(4000)) / 4000
    assert abs(share - 1 / (1 + math.exp(-2.0))) < 0.025  # 0.881; once more would be 0.982, not at all 0.731


# What the processors see


class _Recorder:
    """A stateful processor: keeps every prefix that it is shown."""

    def __init__(self):
        self.seen: list[list[int]] = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        return scores


def test_processors_see_committed_tokens_and_the_path_once_per_node():
    recorder = _Recorder()
    rule = KeyedRule(SAMPLING, VOCAB, processors=ProcessorStack([recorder]))
    paths = [[*PROMPT], [*PROMPT, 5], [*PROMPT, 6], [*PROMPT, 5, 7]]
    rule.choose_many(torch.stack([model(path) for path in paths]), paths, [len(path) for path in paths])
    assert recorder.seen == paths


def test_prefix_is_not_built_when_nothing_looks_at_it():
    def unwanted():
        raise AssertionError("the prefix was built")

    warpers = SamplingSpec(
        prompt_length=0, do_sample=True, temperature=0.7, top_k=5, top_p=0.9, renormalize_logits=True
    )
    for spec in (GREEDY, SAMPLING, warpers):
        assert 0 <= KeyedRule(spec, VOCAB).choose(model(PROMPT), unwanted, 3) < VOCAB
    with pytest.raises(AssertionError, match="was built"):
        KeyedRule(STACKS["penalties"], VOCAB).choose(model(PROMPT), unwanted, 3)


def test_a_lazy_prefix_is_the_same_prefix():
    rule = KeyedRule(STACKS["penalties"], VOCAB)
    assert rule.choose(model(PROMPT), lambda: PROMPT, 3) == rule.choose(model(PROMPT), PROMPT, 3)


def test_prefix_position_shape_and_vocabulary_are_checked():
    rule = KeyedRule(STACKS["penalties"], VOCAB)
    with pytest.raises(ValueError, match="prefix of position 4"):
        rule.choose(model(PROMPT), PROMPT, 4)
    with pytest.raises(ValueError, match="outside"):
        rule.choose(model(PROMPT), [1, 2, VOCAB], 3)
    with pytest.raises(ValueError, match="expected logits"):
        rule.choose(torch.zeros(VOCAB + 1), PROMPT, 3)
    with pytest.raises(ValueError, match="expected logits"):
        rule.choose_many(torch.zeros(2, VOCAB), [PROMPT], [3])
    with pytest.raises(ValueError, match="vocabulary"):
        KeyedRule(STACKS["ends"], 5)
    assert rule.choose_many(torch.zeros(0, VOCAB), [], []) == []


@pytest.mark.parametrize(
    ("presence", "frequency", "expected"),
    [
        (0.5, 0.25, [0.0, -1.0, -0.75, 0.0, 0.0]),
        (0.5, 0.0, [0, -0.5, -0.5, 0, 0]),
        (0.0, 0.25, [0, -0.5, -0.25, 0, 0]),
    ],
)
def test_count_penalties_are_those_of_their_definition(presence, frequency, expected):
    spec = SamplingSpec(prompt_length=2, presence_penalty=presence, frequency_penalty=frequency)
    assert ProcessorStack.from_spec(spec).scores(torch.zeros(5), [4, 4, 1, 1, 2]).tolist() == expected


def test_logits_are_not_modified():
    logits = model(PROMPT)
    before = logits.clone()
    for spec in STACKS.values():
        KeyedRule(spec, VOCAB).choose(logits, PROMPT, 3)
    assert torch.equal(logits, before)


# Proposals with the shared noise


def test_keyed_proposals_are_the_smallest_clocks():
    scores = model(PROMPT)
    noise = race_noise(1, 0, 3, VOCAB)
    clocks = torch.exp(-noise) / scores.double().softmax(-1)
    assert propose_keyed(scores, noise, 5) == clocks.argsort()[:5].tolist()
    assert sorted(propose_keyed(scores, noise, 10 * VOCAB)) == list(range(VOCAB))


def test_a_perfect_drafter_is_always_right():
    rule, noise = KeyedRule(SAMPLING, VOCAB), NoiseCache(SAMPLING.seed, 0, VOCAB)
    for position in range(3, 60):
        logits = model([position])
        assert propose_keyed(logits, noise.at(position), 1) == [rule.choose(logits, [], position)]


def test_proposals_exclude_impossible_tokens_and_refuse_nonsense():
    noise = race_noise(1, 0, 3, 4)
    assert propose_keyed(torch.tensor([-math.inf, 0.0, -math.inf, 0.0]), noise, 4) in ([1, 3], [3, 1])
    with pytest.raises(ValueError, match="NaN"):
        propose_keyed(torch.tensor([0.0, math.nan, 0.0, 0.0]), noise, 1)
    with pytest.raises(ValueError, match="NaN"):
        propose_keyed(torch.full((4,), -math.inf), noise, 1)
    with pytest.raises(ValueError, match="expected scores"):
        propose_keyed(torch.zeros(5), noise, 1)
