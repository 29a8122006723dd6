"""GenerationConfig to SamplingSpec: every option is honoured, handed to the client, or refused; none is ignored."""

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin

from bloombee_spec.sampling.options import (
    CLIENT_OPTIONS,
    LOOP_OPTIONS,
    REFUSED_OPTIONS,
    SPEC_OPTIONS,
    UnsupportedOption,
)
from bloombee_spec.sampling.spec import SamplingSpec


def _config(**options) -> GenerationConfig:
    config = GenerationConfig()
    for name, value in options.items():
        setattr(config, name, value)  # past the constructor's own opinion about combinations
    return config


def _spec(config, prompt_length=4, seed=1, **options):
    return SamplingSpec.from_generation_config(config, prompt_length=prompt_length, seed=seed, **options)


def test_each_attribute_of_the_installed_config_belongs_to_exactly_one_group():
    groups = [SPEC_OPTIONS, LOOP_OPTIONS, set(CLIENT_OPTIONS), set(REFUSED_OPTIONS)]
    for name in vars(GenerationConfig()):
        if not name.startswith("_"):
            assert sum(name in group for group in groups) == 1, name
    names = [name for group in groups for name in group]
    assert len(names) == len(set(names))


def test_defaults_are_greedy_and_need_nothing():
    spec, client = _spec(GenerationConfig())
    assert client == [] and spec == SamplingSpec(prompt_length=4, seed=1)


def test_default_sampling_keeps_transformers_top_k():
    spec, client = _spec(_config(do_sample=True))
    assert client == [] and spec == SamplingSpec(prompt_length=4, seed=1, do_sample=True, top_k=50)


def test_sampling_options_do_not_reach_a_greedy_spec():
    spec, _ = _spec(_config(do_sample=False, temperature=0.3, top_k=3, top_p=0.5))
    assert spec == SamplingSpec(prompt_length=4, seed=1)


MAPPED = [
    ("temperature", 0.7, "temperature", 0.7),
    ("temperature", 2, "temperature", 2.0),
    ("temperature", 1.0, "temperature", 1.0),
    ("top_k", 7, "top_k", 7),
    ("top_k", 0, "top_k", 0),
    ("top_p", 0.9, "top_p", 0.9),
    ("min_p", 0.1, "min_p", 0.1),
    ("typical_p", 0.8, "typical_p", 0.8),
    ("epsilon_cutoff", 0.01, "epsilon_cutoff", 0.01),
    ("epsilon_cutoff", 1.5, "epsilon_cutoff", 0.0),
    ("eta_cutoff", 0.02, "eta_cutoff", 0.02),
    ("repetition_penalty", 1.3, "repetition_penalty", 1.3),
    ("no_repeat_ngram_size", 2, "no_repeat_ngram_size", 2),
    ("bad_words_ids", [[1], [2, 3]], "bad_words_ids", ((1,), (2, 3))),
    ("min_length", 9, "min_length", 9),
    ("min_new_tokens", 3, "min_new_tokens", 3),
    ("forced_bos_token_id", 5, "forced_bos_token_id", 5),
    ("suppress_tokens", [3, 4], "suppress_tokens", (3, 4)),
    ("begin_suppress_tokens", (3,), "begin_suppress_tokens", (3,)),
    ("remove_invalid_values", True, "remove_invalid_values", True),
    ("renormalize_logits", True, "renormalize_logits", True),
    ("eos_token_id", 2, "eos_token_ids", (2,)),
    ("eos_token_id", [2, 9], "eos_token_ids", (2, 9)),
    ("eos_token_id", torch.tensor([2, 9]), "eos_token_ids", (2, 9)),
    ("eos_token_id", None, "eos_token_ids", ()),
]


@pytest.mark.parametrize(("name", "value", "field", "expected"), MAPPED)
def test_option_is_mapped(name, value, field, expected):
    spec, client = _spec(_config(do_sample=True, **{name: value}))
    assert client == [] and getattr(spec, field) == expected


def test_exponential_decay_is_mapped():
    spec, _ = _spec(_config(exponential_decay_length_penalty=(5, 1.2), eos_token_id=2))
    assert spec.exponential_decay_length_penalty == (5, 1.2)


def test_min_new_tokens_takes_precedence_over_min_length_where_generate_says_so():
    overwrites = hasattr(GenerationMixin, "_prepare_generated_length")
    spec, _ = _spec(_config(min_length=100, min_new_tokens=3))
    assert (spec.min_length, spec.min_new_tokens) == (0 if overwrites else 100, 3)


def test_forced_end_is_placed_where_generate_places_it():
    assert _spec(_config(forced_eos_token_id=2, max_new_tokens=6))[0].max_length == 10
    assert _spec(_config(forced_eos_token_id=2, max_length=33))[0].max_length == 33
    assert _spec(_config(forced_eos_token_id=2, max_new_tokens=6), max_length=8)[0].max_length == 8
    with pytest.raises(ValueError, match="max_new_tokens"):
        _spec(_config(forced_eos_token_id=2))


def test_own_penalties_are_arguments():
    spec, _ = _spec(GenerationConfig(), presence_penalty=0.5, frequency_penalty=0.25)
    assert (spec.presence_penalty, spec.frequency_penalty) == (0.5, 0.25)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sequence_bias", {(1, 2): -1.0}),
        ("watermarking_config", object()),
        ("encoder_repetition_penalty", 1.2),
        ("encoder_no_repeat_ngram_size", 2),
        ("forced_decoder_ids", [[1, 2]]),
        ("top_h", 0.4),
        ("guidance_scale", 1.5),
        ("some_attribute_of_the_hub", 3),
    ],
)
def test_option_moves_verification_to_the_client(name, value):
    assert _spec(_config(**{name: value}))[1] == [name]


def test_custom_processors_move_verification_to_the_client():
    _, client = _spec(
        GenerationConfig(), logits_processor=[lambda ids, scores: scores], prefix_allowed_tokens_fn=lambda *_: [1]
    )
    assert client == ["logits_processor", "prefix_allowed_tokens_fn"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 2),
        ("num_beam_groups", 2),
        ("diversity_penalty", 0.5),
        ("constraints", [object()]),
        ("force_words_ids", [[1]]),
        ("penalty_alpha", 0.6),
        ("dola_layers", "low"),
        ("generation_kwargs", {"a": 1}),
        ("assistant_early_exit", 4),
        ("assistant_ensemble_weight", 0.5),
        ("use_mtp", True),
        ("speculation_type", "dflash"),
    ],
)
def test_another_decoding_algorithm_is_refused(name, value):
    with pytest.raises(UnsupportedOption, match=name):
        _spec(_config(**{name: value}))


def test_an_option_of_a_newer_transformers_is_refused():
    class NewerConfig(GenerationConfig):
        def __init__(self, **kwargs):
            self.sharpness = kwargs.pop("sharpness", None)
            super().__init__(**kwargs)

    assert _spec(NewerConfig())[1] == []
    with pytest.raises(UnsupportedOption, match="sharpness"):
        _spec(NewerConfig(sharpness=2.0))


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", -1), ("temperature", 0.0), ("top_p", -0.5), ("bad_words_ids", []), ("eos_token_id", -1)],
)
def test_a_value_out_of_range_is_an_error(name, value):
    with pytest.raises(ValueError, match=name):
        _spec(_config(do_sample=True, **{name: value}))
