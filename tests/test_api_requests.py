"""Request bodies: what is understood, and one error per field that is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloombee_spec.api.errors import ApiError
from bloombee_spec.api.job import Job, Limits
from bloombee_spec.api.requests import read_request

LIMITS = Limits(max_length=100, max_choices=4, default_tokens=20)
USER = {"role": "user", "content": "hi"}


def completion(**fields: Any) -> Any:
    return read_request({"model": "m", "prompt": "hi", **fields}, LIMITS, chat=False)


def chat(**fields: Any) -> Any:
    return read_request({"model": "m", "messages": [USER], **fields}, LIMITS, chat=True)


def test_defaults_are_those_of_the_api() -> None:
    assert completion().job == Job(text="hi", max_tokens=16)
    assert chat().job == Job(messages=(USER,))
    assert not chat().stream and not chat().usage
    nothing = {"logprobs": False, "tools": [], "logit_bias": {}, "response_format": {"type": "text"}, "stop": None}
    assert chat(**nothing, user="me", metadata={}).job == chat().job


def test_everything_that_is_served_arrives() -> None:
    asked = chat(
        max_completion_tokens=7, n=3, temperature=0.5, top_p=0.9, top_k=40, repetition_penalty=1.1, seed=-1,
        presence_penalty=1, frequency_penalty=-1.5, stop=["a", "b"], stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    assert asked.job == Job(
        messages=(USER,), max_tokens=7, n=3, temperature=0.5, top_p=0.9, top_k=40, repetition_penalty=1.1,
        seed=2**63 - 1, presence_penalty=1.0, frequency_penalty=-1.5, stop=("a", "b"),
    )  # fmt: skip
    assert asked.stream and asked.usage
    assert completion(prompt=[1, 2, 3]).job.tokens == completion(prompt=[[1, 2, 3]]).job.tokens == (1, 2, 3)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).job.messages == ({"role": "user", "content": "ab"},)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"model": None}, "model", "must provide a model"),
        ({"model": 3}, "model", "must be a string, got 3"),
        ({"prompt": None}, "prompt", "got null"),
        ({"prompt": []}, "prompt", "got a list"),
        ({"prompt": ["a", "b"]}, "prompt", "one request each"),
        ({"prompt": [1, "a"]}, "prompt", "list of token ids"),
        ({"prompt": [True]}, "prompt", "list of token ids"),
        ({"max_tokens": 0}, "max_tokens", "in 1 .. 100"),
        ({"max_tokens": 10**400}, "max_tokens", "an integer of 1329 bits"),
        ({"max_tokens": 2.0}, "max_tokens", "must be an integer"),
        ({"n": 5}, "n", "in 1 .. 4"),
        ({"temperature": 2.1}, "temperature", "in 0 .. 2, got 2.1"),
        ({"temperature": float("nan")}, "temperature", "in 0 .. 2"),
        ({"temperature": "hot"}, "temperature", "must be a number, got 'hot'"),
        ({"top_p": 10**400}, "top_p", "in 0 .. 1"),
        ({"presence_penalty": 3}, "presence_penalty", "in -2 .. 2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "in 0.01"),
        ({"seed": 2**63}, "seed", "seed must be in"),
        ({"stop": [""]}, "stop", "none of them empty"),
        ({"stop": {"a": 1}}, "stop", "a string or a list"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stream": 1}, "stream", "true or false"),
        ({"stream_options": {}}, "stream_options", "stream=true only"),
        ({"logprobs": 1}, "logprobs", "not supported"),
        ({"echo": True}, "echo", "not supported"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "an object is not supported"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"top_q": 1, "a": 2}, None, "unrecognized request arguments: 'a', 'top_q'"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], param: str | None, words: str) -> None:
    with pytest.raises(ApiError) as raised:
        completion(**fields)
    error = raised.value
    assert error.status == 400 and words in error.message
    assert error.body()["error"] == {
        "message": error.message, "type": "invalid_request_error", "param": param, "code": error.code,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": "hi"}, "got 'hi'"),
        ({"messages": ["hi"]}, "messages[0] must be an object"),
        ({"messages": [USER, {"role": "god", "content": "x"}]}, "messages[1].role must be one of"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role must be one of"),
        ({"messages": [{"role": "user"}]}, "messages[0].content must be"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only parts of type 'text'"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}, "tool_calls is not supported"),
        ({"max_tokens": 3, "max_completion_tokens": 3}, "cannot both be set"),
        ({"tools": [{"type": "function"}]}, "not supported"),
        ({"response_format": {"type": "json_object"}}, "not supported"),
        ({"logprobs": True}, "not supported"),
        ({"prompt": "x"}, "unrecognized request arguments: 'prompt'"),
    ],
)
def test_a_bad_chat_is_explained(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError) as raised:
        chat(**fields)
    assert words in raised.value.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = ("model", "prompt", "messages", "n", "stop", "seed", "temperature", "stream", "stream_options", "logit_bias")


@given(st.dictionaries(st.sampled_from(NAMES), JSON) | JSON, st.booleans())
def test_no_body_does_more_than_be_refused(body: Any, is_chat: bool) -> None:
    try:
        read_request(body, LIMITS, chat=is_chat)
    except ApiError as error:
        assert error.status == 400
        json.dumps(error.body(), ensure_ascii=False).encode()  # what the answer will be made of
