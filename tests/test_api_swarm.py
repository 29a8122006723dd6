"""OpenAI's own client against the real server on a real swarm."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from api_helpers import api_server, make_tokenizer, settled
from connect_helpers import at_once
from swarm_helpers import ROUTES, SUFFIX, client, free_cache, reference, respec

pytestmark = pytest.mark.swarm
NEW = 20
PROMPT = "the hand of the other, again and again"
CHAT: list[Any] = [{"role": "system", "content": "be short"}, {"role": "user", "content": "the other hand?"}]
CHAT_TEXT = "<system>be short\n<user>the other hand?\n<assistant>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def model(swarm: Any) -> Iterator[Any]:
    with client(swarm, SUFFIX, ROUTES[2]) as connected:
        yield connected


@pytest.fixture(scope="module")
def url(model: Any, tokenizer: Any) -> Iterator[str]:
    with api_server(model, tokenizer, running=2, max_length=1000, max_choices=3, default_tokens=NEW) as base_url:
        yield base_url


@pytest.fixture(scope="module")
def api(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as connected:
        yield connected


@pytest.fixture(scope="module")
def greedy(toy_local: Any, tokenizer: Any) -> Any:
    """Ids and text of the local model's own continuation."""

    def continued(prompt: str, n: int = NEW) -> tuple[list[int], str]:
        ids = reference(toy_local, tokenizer(prompt)["input_ids"], n)
        return ids, tokenizer.decode(ids)

    return continued


def test_the_model_is_listed_and_others_are_not_there(api: openai.OpenAI) -> None:
    assert [one.id for one in api.models.list()] == ["toy"] and api.models.retrieve("toy").id == "toy"
    for call in (lambda: api.models.retrieve("gpt"), lambda: api.completions.create(model="gpt", prompt="x")):
        with pytest.raises(openai.NotFoundError, match="this server has 'toy'") as raised:
            call()
        assert raised.value.code == "model_not_found"


def test_a_completion_is_the_models_own_text(api: openai.OpenAI, greedy: Any, tokenizer: Any) -> None:
    _, text = greedy(PROMPT)
    prompt_ids = tokenizer(PROMPT)["input_ids"]
    for prompt in (PROMPT, prompt_ids):
        answer = api.completions.create(model="toy", prompt=prompt, max_tokens=NEW, temperature=0)
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason) == (text, "length")
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt_ids), NEW)
        assert answer.usage.total_tokens == len(prompt_ids) + NEW


def test_a_stream_adds_up_to_the_same_text(api: openai.OpenAI, greedy: Any, tokenizer: Any) -> None:
    _, text = greedy(PROMPT)
    chunks = list(
        api.completions.create(
            model="toy", prompt=PROMPT, max_tokens=NEW, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    *parts, last = chunks
    assert "".join(chunk.choices[0].text for chunk in parts) == text and len(parts) > 2
    assert [chunk.choices[0].finish_reason for chunk in parts] == [None] * (len(parts) - 1) + ["length"]
    assert last.choices == [] and last.usage.completion_tokens == NEW
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_chat_goes_through_the_models_template(api: openai.OpenAI, greedy: Any) -> None:
    _, text = greedy(CHAT_TEXT)
    answer = api.chat.completions.create(model="toy", messages=CHAT, temperature=0)
    assert answer.choices[0].message.content == text and answer.usage.completion_tokens == NEW  # the default
    stream = list(api.chat.completions.create(model="toy", messages=CHAT, temperature=0, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
    assert [chunk.choices[0].delta.role for chunk in stream] == ["assistant"] + [None] * (len(stream) - 1)
    assert all(chunk.usage is None for chunk in stream) and stream[-1].choices[0].finish_reason == "length"


def test_a_stop_string_ends_the_text_in_front_of_it(
    api: openai.OpenAI, model: Any, greedy: Any, tokenizer: Any
) -> None:
    ids, text = greedy(PROMPT, 2 * NEW)
    stop = next(text[i : i + 3] for i in range(5, len(text)) if "\ufffd" not in text[i : i + 3])
    expected = text[: text.index(stop)]
    needed = next(n for n in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:n]))
    for speculate in (True, False):
        respec(model, speculate=speculate)
        options: dict[str, Any] = {"model": "toy", "prompt": PROMPT, "max_tokens": 2 * NEW, "temperature": 0}
        answer = api.completions.create(stop=[stop, "no such text"], **options)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
        assert answer.usage.completion_tokens == needed
        parts = [chunk.choices[0] for chunk in api.completions.create(stop=stop, stream=True, **options)]
        assert "".join(part.text for part in parts) == expected and parts[-1].finish_reason == "stop"
    respec(model, speculate=True)


def test_the_models_end_of_text_is_not_part_of_it(api: openai.OpenAI, model: Any, greedy: Any, tokenizer: Any) -> None:
    ids, _ = greedy(PROMPT)
    end = next(i for i in range(4, NEW) if ids[i] not in ids[:i])
    model.generation_config.eos_token_id = ids[end]
    try:
        answer = api.completions.create(model="toy", prompt=PROMPT, max_tokens=NEW, temperature=0)
    finally:
        model.generation_config.eos_token_id = None
    assert answer.choices[0].text == tokenizer.decode(ids[:end])
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens == end + 1


def test_choices_are_a_function_of_the_seed_with_any_drafter(api: openai.OpenAI, model: Any) -> None:
    def texts(**options: Any) -> list[str]:
        answer = api.completions.create(model="toy", prompt=PROMPT, max_tokens=NEW, **options)
        assert answer.usage.completion_tokens == len(answer.choices) * NEW
        return [choice.text for choice in sorted(answer.choices, key=lambda one: one.index)]

    three = texts(n=3, seed=1, temperature=0.8)
    assert len(set(three)) == 3 and texts(seed=1, temperature=0.8) == three[:1]
    assert texts(seed=2, temperature=0.8) != three[:1]
    respec(model, speculate=False)
    assert texts(n=3, seed=1, temperature=0.8) == three
    respec(model, speculate=True)
    assert texts() != texts(), "without a seed each call has its own"
    narrow = [texts(seed=seed, top_p=0.0, temperature=1.5)[0] for seed in (1, 2)]
    assert narrow == texts(temperature=0) * 2, "only the likeliest token is left"


def test_choices_end_on_their_own(api: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "toy", "prompt": PROMPT, "max_tokens": NEW, "n": 3, "seed": 1}
    whole = [choice.text for choice in api.completions.create(**options).choices]
    stop = next(whole[1][i : i + 2] for i in range(4, 16) if not any(whole[1][i : i + 2] in whole[c] for c in (0, 2)))
    stopped = api.completions.create(stop=stop, **options).choices
    assert [choice.text for choice in stopped] == [whole[0], whole[1][: whole[1].index(stop)], whole[2]]
    assert [choice.finish_reason for choice in stopped] == ["length", "stop", "length"]
    streamed = ["", "", ""]
    for chunk in api.completions.create(stop=stop, stream=True, **options):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in stopped]


def test_penalties_are_the_plugins_own(api: openai.OpenAI, model: Any, tokenizer: Any, greedy: Any) -> None:
    inputs = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 2.0}
    ids = [token for chunk in model.stream(inputs, max_new_tokens=2 * NEW, **penalties) for token in chunk]
    answer = api.completions.create(model="toy", prompt=PROMPT, max_tokens=2 * NEW, temperature=0, **penalties)
    assert answer.choices[0].text == tokenizer.decode(ids) != greedy(PROMPT, 2 * NEW)[1]


def test_requests_at_a_time_do_not_disturb_each_other(api: openai.OpenAI, greedy: Any) -> None:
    prompts = [PROMPT, "on the other hand", "in the end", "as to the"]

    def ask(prompt: str) -> str:
        return str(api.completions.create(model="toy", prompt=prompt, max_tokens=NEW, temperature=0).choices[0].text)

    assert at_once(*[lambda p=prompt: ask(p) for prompt in prompts]) == [greedy(prompt)[1] for prompt in prompts]


# --- ends ---------------------------------------------------------------------------------------------------------


def load(url: str) -> Any:
    return httpx.get(url.replace("/v1", "/health")).json()


def test_hanging_up_ends_a_stream_and_frees_the_servers(api: openai.OpenAI, swarm: Any, model: Any) -> None:
    respec(model, speculate=False)
    before = free_cache(swarm)
    stream = api.completions.create(model="toy", prompt=PROMPT, max_tokens=900, temperature=0, stream=True)
    next(iter(stream))
    assert free_cache(swarm) != before
    stream.close()
    assert settled(swarm, before)
    assert model.last_stats.tokens < 300, "the generation went on"
    respec(model, speculate=True)


def test_hanging_up_ends_an_answer_that_is_not_streamed(url: str, swarm: Any, model: Any) -> None:
    respec(model, speculate=False)
    before = free_cache(swarm)
    body = {"model": "toy", "prompt": PROMPT, "max_tokens": 900, "temperature": 0}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/completions", json=body, timeout=1.0)
    assert settled(swarm, before)
    assert model.last_stats.tokens < 900, "the generation went on"
    respec(model, speculate=True)


def test_more_requests_than_places_are_told_so(model: Any, tokenizer: Any, swarm: Any, greedy: Any) -> None:
    respec(model, speculate=False)
    before = free_cache(swarm)
    with (
        api_server(model, tokenizer, running=1, waiting=1) as base_url,
        openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as api,
    ):
        options: dict[str, Any] = {"model": "toy", "prompt": PROMPT, "temperature": 0}
        running = api.completions.create(max_tokens=1500, stream=True, **options)
        next(iter(running))
        texts: list[str] = []
        second = threading.Thread(
            target=lambda: texts.append(api.completions.create(max_tokens=NEW, **options).choices[0].text)
        )
        second.start()
        while load(base_url) != {"status": "ok", "running": 1, "waiting": 1}:
            time.sleep(0.02)
        with pytest.raises(openai.RateLimitError, match="1 requests are running and 1 waiting") as refused:
            api.completions.create(max_tokens=1, **options)
        assert refused.value.response.headers["Retry-After"] == "2" and not texts
        running.close()
        second.join(60)
        assert texts == [greedy(PROMPT)[1]]
    assert settled(swarm, before)
    respec(model, speculate=True)


def test_the_server_ends_what_runs_when_it_is_stopped(model: Any, tokenizer: Any, swarm: Any) -> None:
    respec(model, speculate=False)
    before = free_cache(swarm)
    with openai.OpenAI(base_url="http://unset", api_key="none", max_retries=0, timeout=120) as api:
        with api_server(model, tokenizer) as base_url:
            api.base_url = base_url
            stream = api.completions.create(model="toy", prompt=PROMPT, max_tokens=1900, temperature=0, stream=True)
            next(iter(stream))
        with pytest.raises(openai.APIError, match="the server is being stopped"):
            list(stream)
        assert settled(swarm, before)
    respec(model, speculate=True)


# --- errors -------------------------------------------------------------------------------------------------------


def test_bad_requests_raise_the_clients_exceptions(api: openai.OpenAI, url: str) -> None:
    cases: list[tuple[dict[str, Any], str | None, str]] = [
        ({"temperature": 7}, "temperature", "must be in 0 .. 2"),
        ({"prompt": ""}, "prompt", "the prompt is empty"),
        ({"prompt": [211]}, "prompt", "token 211 is outside the vocabulary of 211"),
        ({"max_tokens": 990}, "max_tokens", "there is room for 1000 in all"),
        ({"extra_body": {"nonsense": 1}}, None, "unrecognized request arguments: 'nonsense'"),
    ]
    for fields, param, words in cases:
        with pytest.raises(openai.BadRequestError) as raised:
            api.completions.create(**{"model": "toy", "prompt": PROMPT, **fields})
        assert raised.value.param == param and words in raised.value.message
        assert raised.value.type == "invalid_request_error"
    for content, status, words in (
        (b"{", 400, "is not JSON"),
        (b"[" * 100_000, 400, "is not JSON"),
        (b'{"model": "toy", "prompt": "\\ud800"}', 400, "half of a surrogate pair at character 0"),
        (b" " * (5 << 20), 413, "longer than"),
    ):
        answer = httpx.post(f"{url}/completions", content=content, timeout=60)
        assert answer.status_code == status and words in answer.json()["error"]["message"]
    assert httpx.get(f"{url}/engines").json()["error"]["type"] == "invalid_request_error"
    assert load(url)["status"] == "ok"


def test_a_model_without_a_chat_template_says_so(model: Any, tmp_path: Path) -> None:
    with (
        api_server(model, make_tokenizer(tmp_path, chat=False)) as base_url,
        openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as api,
        pytest.raises(openai.BadRequestError, match="no chat template"),
    ):
        api.chat.completions.create(model="toy", messages=CHAT)


def test_a_swarm_that_lacks_blocks_is_an_error_of_the_service(swarm: Any, tokenizer: Any) -> None:
    with (
        client(swarm, SUFFIX, ROUTES[2][:1]) as model,
        api_server(model, tokenizer) as base_url,
        openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as api,
    ):
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as raised:
                api.completions.create(model="toy", prompt=PROMPT, stream=stream)
            assert raised.value.status_code == 503 and "4, 5, 6, 7" in raised.value.message
