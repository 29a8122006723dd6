"""Request bodies of `/v1/completions` and `/v1/chat/completions`, checked by hand: errors name the field as OpenAI's
do, and no version of pydantic matters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bloombee_spec.api.errors import ApiError
from bloombee_spec.api.fields import Fields, shown
from bloombee_spec.api.job import Job, Limits, Message

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_MESSAGES = 4096
MAX_SEED = 2**63 - 1
OPENAI_COMPLETION_TOKENS = 16  # the default of OpenAI's /v1/completions
ROLES = ("system", "developer", "user", "assistant", "tool")
IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
)  # about billing and logs


@dataclass(frozen=True)
class Request:
    """
    :param chat: which of the two forms the answer has
    :param model: as the client named it
    :param usage: a last chunk with counts, when streaming
    """

    chat: bool
    model: str
    job: Job
    stream: bool
    usage: bool


def read_request(body: Any, limits: Limits, *, chat: bool) -> Request:
    """
    :param body: what JSON made of the request's body
    :raises ApiError: with the field that is at fault
    """
    fields = Fields(body)
    model = fields.text("model")
    if model is None:
        raise ApiError("you must provide a model parameter", param="model")
    prompt = _messages(fields) if chat else _prompt(fields)
    stream = fields.boolean("stream")
    usage = _usage(fields, stream)
    seed = fields.integer("seed", -MAX_SEED - 1, MAX_SEED)
    repetition = fields.take("repetition_penalty")
    job = Job(
        max_tokens=_max_tokens(fields, limits, chat),
        n=fields.integer("n", 1, limits.max_choices) or 1,
        temperature=fields.number("temperature", 0.0, 2.0, 1.0),
        top_p=fields.number("top_p", 0.0, 1.0, 1.0),
        top_k=fields.integer("top_k", 0, 1 << 24) or 0,
        repetition_penalty=None if repetition is None else fields.number("repetition_penalty", 0.01, 100.0, 1.0),
        presence_penalty=fields.number("presence_penalty", -2.0, 2.0, 0.0),
        frequency_penalty=fields.number("frequency_penalty", -2.0, 2.0, 0.0),
        seed=None if seed is None else seed % (MAX_SEED + 1),
        stop=_stop(fields),
        **prompt,
    )
    _unserved(fields, chat)
    fields.finish()
    return Request(chat, model, job, stream, usage)


def _max_tokens(fields: Fields, limits: Limits, chat: bool) -> int | None:
    given = fields.integer("max_tokens", 1, limits.max_length)
    newer = fields.integer("max_completion_tokens", 1, limits.max_length) if chat else None
    if given is not None and newer is not None:
        raise ApiError("max_tokens and max_completion_tokens cannot both be set", param="max_tokens")
    chosen = newer if newer is not None else given
    return chosen if chosen is not None or chat else OPENAI_COMPLETION_TOKENS


def _prompt(fields: Fields) -> dict[str, Any]:
    prompt = fields.take("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return {"text": prompt}
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return {"tokens": tuple(prompt)}
    if isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], (str, list)):
        raise ApiError("several prompts in one request are not supported; send one request each", param="prompt")
    raise ApiError(f"prompt must be a string or a list of token ids, got {shown(prompt)}", param="prompt")


def _messages(fields: Fields) -> dict[str, Any]:
    messages = fields.take("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(f"messages must be a list of at least one message, got {shown(messages)}", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise ApiError(f"{len(messages)} messages, at most {MAX_MESSAGES} are allowed", param="messages")
    return {"messages": tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))}


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise ApiError(f"{where} must be an object, got {shown(message)}", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise ApiError(f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}", param=where)
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise ApiError(f"{where}.{name} is not supported here", param=where, code="unsupported_parameter")
    return {"role": role, "content": _content(message.get("content"), where)}


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ApiError(f"{where}.content must be a string or a list of text parts, got {shown(content)}", param=where)
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise ApiError(f"{where}.content: only parts of type 'text' are supported", param=where)
        texts.append(text)
    return "".join(texts)


def _stop(fields: Fields) -> tuple[str, ...]:
    stop = fields.take("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise ApiError("stop must be a string or a list of strings, none of them empty", param="stop")
    if len(stops) > MAX_STOPS or any(len(one) > MAX_STOP_CHARS for one in stops):
        raise ApiError(f"stop: at most {MAX_STOPS} strings of {MAX_STOP_CHARS} characters are allowed", param="stop")
    return tuple(stops)


def _usage(fields: Fields, stream: bool) -> bool:
    options = fields.take("stream_options")
    if options is None:
        return False
    if not stream:
        raise ApiError("stream_options goes with stream=true only", param="stream_options")
    inner = Fields(options)
    usage = inner.boolean("include_usage")
    inner.unused("include_obfuscation", False)
    inner.finish()
    return usage


def _unserved(fields: Fields, chat: bool) -> None:
    for name in IGNORED:
        fields.take(name)
    fields.unused("logit_bias", {})
    if chat:
        fields.unused("logprobs", False)
        fields.unused("top_logprobs", 0)
        fields.unused("response_format", {"type": "text"})
        fields.unused("tools", [])
        fields.unused("tool_choice", "none", "auto")
        fields.unused("parallel_tool_calls", True, False)
        fields.unused("modalities", ["text"])
    else:
        fields.unused("logprobs")
        fields.unused("echo", False)
        fields.unused("best_of", 1)
        fields.unused("suffix", "")
