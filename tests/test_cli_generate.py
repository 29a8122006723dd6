"""`bloombee-spec generate` and `api` as a person uses them: text as it comes, figures on a terminal, one sentence for
each mistake, and a clean end at Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from api_helpers import make_tokenizer, settled
from command_helpers import REPOSITORY, environment
from swarm_helpers import free_cache, reference

from bloombee_spec.cli.main import main

pytestmark = pytest.mark.swarm
NEW = 16
PROMPT = "the hand of the other, again and again"
LIMIT_S = 120


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_path)


@pytest.fixture(scope="module")
def words(swarm: Any, tokenizer_path: Path) -> list[str]:
    """What both commands need to find the swarm."""
    peers = ["--initial-peers", *swarm.initial_peers, "--dht-prefix", swarm.dht_prefix]
    return [str(swarm.model), "--tokenizer", str(tokenizer_path), *peers]


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Standard error is a terminal; what was written there. Used within a test: pytest sets its own streams before."""
    ours, theirs = pty.openpty()
    written: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(ours, 1 << 16):
                written.append(data)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with os.fdopen(theirs, "w") as stream, monkeypatch.context() as patched:
        patched.setenv("TERM", "xterm")
        patched.setattr(sys, "stderr", stream)
        yield written
    reader.join(10)
    os.close(ours)


def test_text_goes_to_standard_output_and_figures_to_the_terminal(
    words: list[str], toy_local: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with terminal(monkeypatch) as written:
        assert main(["generate", *words, "--prompt", PROMPT, "--max-new-tokens", str(NEW)]) == 0
    expected = tokenizer.decode(reference(toy_local, tokenizer(PROMPT)["input_ids"], NEW))
    assert capsys.readouterr().out == expected + "\n"
    shown = b"".join(written).decode()
    assert "accepted per lap" in shown and "\x1b[r" in shown, "a live line, and the terminal as it was"
    assert f"[{NEW} tokens" in shown.splitlines()[-1]


def test_json_is_all_that_a_script_sees(
    words: list[str], tmp_path: Path, toy_local: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("the other hand?")
    options = ["--prompt-file", str(file), "--chat", "--system", "be short", "--max-new-tokens", str(NEW)]
    assert main(["generate", *words, *options, "--no-spec", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    prompt = tokenizer("<system>be short\n<user>the other hand?\n<assistant>")["input_ids"]
    ids = reference(toy_local, prompt, NEW)
    assert report["ids"] == ids and report["text"] == tokenizer.decode(ids)
    assert (report["tokens"], report["laps"], report["tokens_per_lap"]) == (NEW, NEW, 1.0)
    assert report["prompt_tokens"] == len(prompt) and report["finish_reason"] == "length"
    assert report["stats"]["mode"] == "ring" and report["tok_s"] > 0


def test_a_seed_repeats_a_text_and_a_stop_string_ends_it(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    def text(*options: str) -> dict[str, Any]:
        assert main(["generate", *words, "--prompt", PROMPT, "--max-new-tokens", str(NEW), "--json", *options]) == 0
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        return report

    warm = ("--temperature", "0.9", "--top-p", "0.95", "--top-k", "50", "--seed", "3")
    first = text(*warm)
    stop = first["text"][5:8]
    second = text(*warm, "--drafter", "none", "--stop", stop)
    assert second["text"] == first["text"][: first["text"].index(stop)] and second["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--temperature", "-1"), "--temperature is -1.0, expected 0 to 100"),
        (("--max-new-tokens", "0"), "--max-new-tokens is 0, expected 1 to"),
        (("--system", "x"), "--system goes with --chat"),
        (("--stop", ""), "--stop needs a text"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str], options: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *words, "--prompt", PROMPT, *options]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("bloombee-spec: ") and sentence in said.err
    assert said.err.count("\n") == 1


def test_a_prompt_file_that_is_not_text_is_one_sentence(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bytes").write_bytes(b"a\xff")
    assert main(["generate", *words, "--prompt-file", str(tmp_path / "bytes")]) == 1
    assert "is not UTF-8" in capsys.readouterr().err
    assert main(["generate", *words, "--prompt-file", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err


# --- processes ----------------------------------------------------------------------------------------------------


def start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "bloombee_spec.cli.main", *command], env=environment(), cwd=REPOSITORY,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def interrupt(process: subprocess.Popen[str]) -> tuple[int, str]:
    """As Ctrl-C does: the whole group gets the signal. Exit status, and what was on standard error."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        _, errors = process.communicate(timeout=LIMIT_S)
        return process.returncode, errors
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_ctrl_c_ends_a_generation_and_frees_the_servers(swarm: Any, words: list[str]) -> None:
    before = free_cache(swarm)
    process = start("generate", *words, "--prompt", PROMPT, "--max-new-tokens", "1500", "--no-spec")
    assert process.stdout is not None and process.stdout.read(1), "the text has begun"
    assert free_cache(swarm) != before
    status, errors = interrupt(process)
    assert status == 130 and "Traceback" not in errors, errors[-3000:]
    assert settled(swarm, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_ctrl_c_that_gets_lost_in_a_destructor_ends_the_text_all_the_same(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pressed:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)  # the handler runs here, and what it raises is lost

    pieces = []

    def progress(*_: Any) -> str:
        pieces.append(Pressed() if not pieces else None)
        pieces[0] = None
        return ""

    monkeypatch.setattr("bloombee_spec.cli.generate._progress", progress)
    assert main(["generate", *words, "--prompt", PROMPT, "--max-new-tokens", "400", "--no-spec"]) == 130
    assert len(pieces) == 1, "no piece after it"


def test_the_api_command_serves_until_ctrl_c(swarm: Any, words: list[str], toy_local: Any, tokenizer: Any) -> None:
    before = free_cache(swarm)
    process = start("api", *words, "--port", "0", "--model-name", "toy")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("serving 'toy' at http://127.0.0.1:"), line
    with openai.OpenAI(base_url=line.split()[-1], api_key="none", max_retries=0, timeout=LIMIT_S) as api:
        stream = api.completions.create(model="toy", prompt=PROMPT, max_tokens=1500, temperature=0, stream=True)
        text = ""
        for chunk in stream:
            text += chunk.choices[0].text
            if len(text) >= 10:
                break
        status, errors = interrupt(process)
    assert tokenizer.decode(reference(toy_local, tokenizer(PROMPT)["input_ids"], 60)).startswith(text[:10])
    assert status == 0 and "Traceback" not in errors, errors[-3000:]
    assert settled(swarm, before)
