"""Servers and the demo as commands: mixed kinds in one swarm, an interrupt at any time, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from command_helpers import REPOSITORY, SCRIPT, alive_with, command, copy_host, environment
from connect_helpers import connect
from host_helpers import PACKAGE
from swarm_helpers import PLAIN, SUFFIX, decode, load_local, prompts, reference, respec
from transformers import AutoTokenizer

from benchmarks.processes import LoggedProcess
from benchmarks.swarm import LocalSwarm, ServerSpec
from benchmarks.toy_models import make_toy_llama

pytestmark = pytest.mark.swarm
NEW = 24
LIMIT_S = 120.0
MARK = "COMMANDS_TEST_RUN"
SERVE = (str(SCRIPT), "serve")
RUN_SERVER = (sys.executable, "-m", f"{PACKAGE}.cli.run_server")


@pytest.fixture(scope="module")
def chatty_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy checkpoint with a tokenizer (one token per byte) and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = make_toy_llama(tmp_path_factory.mktemp("chatty") / "model", num_layers=8, vocab_size=256)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    wrapped.save_pretrained(str(path))
    return path


@pytest.fixture(scope="module")
def local(chatty_toy: Path) -> Any:
    return load_local(chatty_toy)


@pytest.fixture(scope="module")
def imports_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A host that can be imported, but has no plugin hook."""
    root = copy_host(tmp_path_factory.mktemp("imports-only"))
    for words in (("revert", "--only", "server-plugins"), ("apply", "--only", "hivemind-imports")):
        done = command("patch", *words, "--host-path", str(root))
        assert done.returncode == 0, done.stderr
    lines = command("patch", "status", "--host-path", str(root)).stdout.splitlines()
    assert {" ".join(line.split()) for line in lines[1:]} == {"hivemind-imports applied", "server-plugins not applied"}
    return root


@pytest.fixture(scope="module")
def servers(chatty_toy: Path, imports_only: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    """0: `bloombee-spec serve`. 1: the host's `run_server --spec`. 2: `serve` on the host without a hook."""
    unhooked = environment(imports_only)["PYTHONPATH"]
    on_other_host = ("env", f"PYTHONPATH={unhooked}", sys.executable, "-m", "bloombee_spec.cli.main", "serve")
    kinds = [
        ServerSpec(0, 4, command=SERVE),
        ServerSpec(4, 8, command=RUN_SERVER, extra_args=("--spec", "--spec-heads", "lm_head")),
        ServerSpec(0, 4, command=on_other_host, extra_args=("--spec-heads", "embed")),
    ]
    with LocalSwarm(chatty_toy, kinds, work_dir=tmp_path_factory.mktemp("commands")) as running:
        yield running


def client_of(servers: LocalSwarm, *chosen: int) -> AbstractContextManager[Any]:
    peers = [servers.servers[i].peer_id for i in chosen]
    return connect(servers.model, servers.initial_peers, servers.dht_prefix, SUFFIX, peers=peers)


def test_the_third_server_runs_the_host_without_the_hook(servers: LocalSwarm, imports_only: Path) -> None:
    third = psutil.Process(servers.servers[2].pid)
    assert third.environ()["PYTHONPATH"].split(os.pathsep)[0] == str(imports_only)
    source = (imports_only / PACKAGE / "server" / "server.py").read_text()
    assert "container_class" not in source and str(imports_only) not in sys.path


@pytest.mark.parametrize("chosen", [(0, 1), (2, 1)], ids=["serve and run_server", "serve without the hook"])
def test_a_client_decodes_over_servers_started_in_different_ways(
    servers: LocalSwarm, local: Any, chosen: tuple[int, ...]
) -> None:
    with client_of(servers, *chosen) as model:
        for spec in (PLAIN, SUFFIX):
            respec(model, mode="ring", speculate=spec.speculate)
            for ids in prompts(3, 256, seed=50):
                assert decode(model, ids, NEW) == reference(local, ids, NEW)
        stats = model.last_stats
    assert [line.split()[1] for line in stats.route] == [servers.servers[i].peer_id for i in chosen]
    assert stats.mode == "ring" and stats.bytes_up < 96 * 4 * NEW, "both ends of the model are at the servers"


def test_the_chat_example_holds_a_conversation(servers: LocalSwarm, chatty_toy: Path, local: Any) -> None:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / "chat.py"), str(chatty_toy), "--new-tokens", "12",
         "--initial-peers", *servers.initial_peers, "--dht-prefix", servers.dht_prefix],
        input="hello\nand then?\n", env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    tokenizer = AutoTokenizer.from_pretrained(chatty_toy)
    messages = []
    for question in ("hello", "and then?"):
        messages.append({"role": "user", "content": question})
        ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"]
        answer = tokenizer.decode(reference(local, ids, 12))
        messages.append({"role": "assistant", "content": answer})
        assert answer in done.stdout
    assert done.stdout.count("[12 tokens in ") == 2


def interrupt(process: LoggedProcess) -> None:
    """As `kill -INT` does: only the main process gets the signal."""
    members = process.members()
    assert "p2pd" in {member.name() for member in members} and len(members) > 3
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(time.monotonic() + LIMIT_S), process.log()[-3000:]
    _, alive = psutil.wait_procs(members, timeout=10)
    assert [member.name() for member in alive] == [] and process.members() == []
    assert process._returncode() == 0, process.log()[-3000:]
    assert "Traceback" not in process.log().split("Caught KeyboardInterrupt")[-1]


def test_interrupted_servers_leave_no_process(servers: LocalSwarm) -> None:
    """The first one in the middle of a session. Runs last, for the servers are gone then."""
    with client_of(servers, 0, 1) as model, model.inference_session(max_length=64) as session:
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4)
        assert not session._decoder.ring.closed
        interrupt(servers.servers[0].process)
    for index in (1, 2):
        interrupt(servers.servers[index].process)


# --- demo ---------------------------------------------------------------------------------------------------------


def start_demo(model: Path, tmp_path: Path, *words: str) -> tuple[LoggedProcess, str]:
    mark = uuid.uuid4().hex
    options = ("--model", str(model), "--stages", "2", "--delay-ms", "2", "--new-tokens", "6", *words)
    demo = LoggedProcess(
        "demo",
        [sys.executable, "-u", "-m", "benchmarks.demo", *options],
        tmp_path / "demo.log",
        {**environment(), MARK: mark},
    )
    demo.start()
    return demo, mark


def end_by_force(demo: LoggedProcess, mark: str) -> None:
    demo.kill()
    for process in alive_with(MARK, mark):
        process.kill()


@pytest.mark.parametrize("moment", ["decoding with the host's own generate"])
def test_an_interrupted_demo_leaves_no_process(chatty_toy: Path, tmp_path: Path, moment: str) -> None:
    demo, mark = start_demo(chatty_toy, tmp_path)
    try:
        demo.wait_for_log(moment, time.monotonic() + LIMIT_S)
        deadline = time.monotonic() + LIMIT_S
        while len(alive_with(MARK, mark)) < 3:  # in the middle of things: peers, relays or clients are there
            assert time.monotonic() < deadline
            time.sleep(0.2)
        os.kill(demo.pid, signal.SIGINT)
        assert demo.wait(time.monotonic() + LIMIT_S), demo.log()[-3000:]
        assert alive_with(MARK, mark) == []
        assert demo._returncode() == 130, demo.log()[-3000:]
        assert "interrupted; the swarm has been stopped" in demo.log() and "Traceback" not in demo.log()
    finally:
        end_by_force(demo, mark)


def test_the_demo_ends_with_identical_texts_and_no_process(chatty_toy: Path, tmp_path: Path) -> None:
    demo, mark = start_demo(chatty_toy, tmp_path)
    try:
        assert demo.wait(time.monotonic() + 3 * LIMIT_S), demo.log()[-3000:]
        assert demo._returncode() == 0, demo.log()[-3000:]
        assert alive_with(MARK, mark) == []
        assert demo.log().count("same tokens") == 3 and "every text is identical" in demo.log()
    finally:
        end_by_force(demo, mark)
