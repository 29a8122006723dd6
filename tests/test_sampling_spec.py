"""SamplingSpec travels as plain data, and nothing malformed becomes one."""

import dataclasses
import math

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee_spec.sampling.processors import ProcessorStack
from bloombee_spec.sampling.spec import MAX_BAD_WORDS, MAX_EOS_TOKENS, MAX_LISTED_TOKENS, SamplingSpec

FULL = SamplingSpec(
    prompt_length=3,
    do_sample=True,
    seed=2**64 - 1,
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    typical_p=0.95,
    epsilon_cutoff=1e-4,
    eta_cutoff=1e-3,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=-0.25,
    no_repeat_ngram_size=3,
    bad_words_ids=((1,), (2, 3)),
    min_length=5,
    min_new_tokens=2,
    max_length=64,
    forced_bos_token_id=1,
    forced_eos_token_ids=(2, 9),
    suppress_tokens=(4, 5),
    begin_suppress_tokens=(6,),
    exponential_decay_length_penalty=(10, 1.1),
    remove_invalid_values=True,
    renormalize_logits=True,
    eos_token_ids=(2, 9),
)


def test_every_option_of_the_full_spec_differs_from_its_default():
    """Keeps the round trip below honest when an option is added."""
    for field in dataclasses.fields(FULL):
        assert getattr(FULL, field.name) != field.default, field.name


@pytest.mark.parametrize(
    "spec", [FULL, SamplingSpec(prompt_length=0), SamplingSpec(prompt_length=7, do_sample=True, top_k=1)]
)
def test_round_trip_through_msgpack(spec):
    packed = msgpack.packb(spec.to_wire())
    assert SamplingSpec.from_wire(msgpack.unpackb(packed)) == spec
    assert SamplingSpec.from_wire(msgpack.unpackb(packed, use_list=False)) == spec


def test_plain_greedy_is_told_from_everything_else():
    inert = {"prompt_length", "seed", "max_length", "eos_token_ids", "temperature", "top_k", "top_p", "min_p"}
    inert |= {"typical_p", "epsilon_cutoff", "eta_cutoff"}
    base = SamplingSpec(prompt_length=1, eos_token_ids=(2,), max_length=9)
    for field in dataclasses.fields(SamplingSpec):
        spec = dataclasses.replace(base, **{field.name: getattr(FULL, field.name)})
        assert spec.is_plain_greedy == (field.name in inert), field.name
        assert spec.is_plain_greedy == (not ProcessorStack.from_spec(spec).processors and not spec.do_sample)


def test_defaults_do_not_travel():
    assert SamplingSpec(prompt_length=5).to_wire() == {"prompt_length": 5}


def test_specs_are_immutable_and_hashable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FULL.top_k = 1  # type: ignore[misc]
    assert hash(FULL) == hash(SamplingSpec.from_wire(FULL.to_wire()))


BAD_VALUES = [
    ("do_sample", 1),
    ("do_sample", "yes"),
    ("seed", -1),
    ("seed", 2**64),
    ("seed", 1.0),
    ("seed", True),
    ("prompt_length", -1),
    ("prompt_length", None),
    ("temperature", 0),
    ("temperature", -1.0),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", True),
    ("temperature", "1.0"),
    ("temperature", 10**400),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_p", 1.01),
    ("top_p", -0.1),
    ("top_p", math.nan),
    ("min_p", 2),
    ("typical_p", 0),
    ("epsilon_cutoff", 1.0),
    ("eta_cutoff", 1.0),
    ("repetition_penalty", 0.0),
    ("presence_penalty", 1e9),
    ("frequency_penalty", math.inf),
    ("no_repeat_ngram_size", 10**6),
    ("bad_words_ids", [[]]),
    ("bad_words_ids", [1]),
    ("bad_words_ids", [[-1]]),
    ("bad_words_ids", {"a": 1}),
    ("bad_words_ids", [[1]] * (MAX_BAD_WORDS + 1)),
    ("bad_words_ids", [[1] * 1000]),
    ("min_length", 2**40),
    ("min_new_tokens", None),
    ("max_length", 0),
    ("forced_bos_token_id", -1),
    ("forced_bos_token_id", [1]),
    ("forced_eos_token_ids", 1),
    ("suppress_tokens", "123"),
    ("suppress_tokens", b"123"),
    ("suppress_tokens", [1.0]),
    ("suppress_tokens", [True]),
    ("suppress_tokens", [2**24]),
    ("suppress_tokens", [1] * (MAX_LISTED_TOKENS + 1)),
    ("begin_suppress_tokens", [None]),
    ("exponential_decay_length_penalty", [1]),
    ("exponential_decay_length_penalty", [1, 2, 3]),
    ("exponential_decay_length_penalty", [-1, 1.1]),
    ("exponential_decay_length_penalty", [1, math.nan]),
    ("exponential_decay_length_penalty", 1.1),
    ("remove_invalid_values", None),
    ("renormalize_logits", 0),
    ("eos_token_ids", [1] * (MAX_EOS_TOKENS + 1)),
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES, ids=lambda value: str(value)[:30])
def test_a_bad_value_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name) as refusal:
        SamplingSpec.from_wire({**FULL.to_wire(), name: value})
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("wire", [None, [], b"", "spec", 3, [("prompt_length", 1)]])
def test_anything_but_a_dict_is_refused(wire):
    with pytest.raises(ValueError, match="dict"):
        SamplingSpec.from_wire(wire)


@pytest.mark.parametrize("key", ["top_kk", "__class__", "check_vocabulary", 3, b"top_k", "x" * 10_000])
def test_unknown_options_are_refused_not_ignored(key):
    with pytest.raises(ValueError, match="unknown sampling options") as refusal:
        SamplingSpec.from_wire({"prompt_length": 1, key: 1})
    assert len(str(refusal.value)) < 300


def test_prompt_length_is_required():
    with pytest.raises(ValueError, match="lack prompt_length"):
        SamplingSpec.from_wire({"do_sample": True})


def test_options_that_need_each_other():
    with pytest.raises(ValueError, match="max_length"):
        SamplingSpec(prompt_length=1, forced_eos_token_ids=(2,))
    with pytest.raises(ValueError, match="eos_token_ids"):
        SamplingSpec(prompt_length=1, exponential_decay_length_penalty=(1, 1.1))


@pytest.mark.parametrize(
    "option",
    [
        {"eos_token_ids": (50,)},
        {"suppress_tokens": (1, 50)},
        {"begin_suppress_tokens": (50,)},
        {"bad_words_ids": ((1, 50),)},
        {"forced_bos_token_id": 50},
        {"forced_eos_token_ids": (50,), "max_length": 9},
    ],
)
def test_token_ids_are_checked_against_the_vocabulary(option):
    spec = SamplingSpec(prompt_length=1, **option)
    spec.check_vocabulary(51)
    with pytest.raises(ValueError, match="token 50"):
        spec.check_vocabulary(50)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(
    wire=st.dictionaries(
        st.sampled_from([field.name for field in dataclasses.fields(SamplingSpec)]) | st.text(max_size=4),
        plain,
        max_size=6,
    )
)
def test_whatever_a_peer_sends_is_a_spec_or_a_value_error(wire):
    try:
        spec = SamplingSpec.from_wire(wire)
    except ValueError:
        return
    assert SamplingSpec.from_wire(spec.to_wire()) == spec
