"""Runs methods in client processes of their own, with time limits, and reads their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.processes import LoggedProcess
from benchmarks.swarm import REPOSITORY, LocalSwarm

CLIENT_START_S = 120.0
HOST_JOBS = 8  # of one process: clients of the hosts hang after a dozen calls or so


@dataclass(frozen=True)
class Job:
    """A prompt to decode. `target` is what the host's plain decoding gave, for drafters that replay it."""

    name: str
    ids: tuple[int, ...]
    new_tokens: int
    target: tuple[int, ...] = ()


@dataclass(frozen=True)
class Result:
    job: str
    tokens: tuple[int, ...]
    seconds: float
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


class ClientFailed(RuntimeError):
    """A client process ended early or ran out of time; the message has the end of its log."""


def run_jobs(
    swarm: LocalSwarm, method: dict[str, Any], jobs: Sequence[Job], *, limit_s: float, attempts: int = 3
) -> list[Result]:
    """Results in the order of `jobs`. A process that hangs is replaced, and goes on with the jobs that are left.

    :param limit_s: time for one job
    :raises ClientFailed: no progress in `attempts` processes one after the other
    """
    done: dict[str, Result] = {}
    stamp = f"{method['name'].replace(' ', '_').replace('/', '_')}-{time.monotonic_ns()}"
    out = swarm.work_dir / f"{stamp}.jsonl"
    log = ""
    processes = idle = 0
    while idle < attempts:
        left = [job for job in jobs if job.name not in done]
        if not left:
            break
        left = left[:HOST_JOBS] if method["kind"].startswith("host") else left
        task = swarm.work_dir / f"{stamp}-{processes}.json"
        task.write_text(
            json.dumps(
                {
                    "method": method,
                    "model": str(swarm.model),
                    "peers": swarm.initial_peers,
                    "prefix": swarm.dht_prefix,
                    "jobs": [vars(job) for job in left],
                }
            )
        )
        log = _run_client(task, out, limit_s, swarm.work_dir / f"{stamp}-{processes}.log")
        before = len(done)
        done.update({result.job: result for result in _read(out)})
        processes, idle = processes + 1, 0 if len(done) > before else idle + 1
    missing = [job.name for job in jobs if job.name not in done]
    if missing:
        raise ClientFailed(f"{method['name']}: no result for {', '.join(missing)}\n{log[-3000:]}")
    return [done[job.name] for job in jobs]


def _run_client(task: Path, out: Path, limit_s: float, log_path: Path) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "benchmarks.worker", "--task", str(task), "--out", str(out)]
    process = LoggedProcess("client", command, log_path, env)
    process.start()
    jobs = len(json.loads(task.read_text())["jobs"])
    before = len(_read(out))
    done, deadline = before, time.monotonic() + CLIENT_START_S + limit_s
    try:
        while process.running and time.monotonic() < deadline and done < before + jobs:
            time.sleep(0.1)
            if len(_read(out)) > done:
                done, deadline = len(_read(out)), time.monotonic() + limit_s
        process.wait(time.monotonic() + 5.0)  # a client may hang at exit: its results are safe already
    finally:
        process.kill()
    return process.log()


def _read(path: Path) -> list[Result]:
    if not path.exists():
        return []
    results = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        results.append(Result(row["job"], tuple(row["tokens"]), row["seconds"], row["stats"]))
    return results


def local_reference(model: Path, jobs: Sequence[Job]) -> list[tuple[int, ...]]:
    """What local transformers decode, in this process."""
    import torch
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.float32)
    found = []
    for job in jobs:
        ids = torch.tensor([job.ids])
        out = net.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=job.new_tokens, do_sample=False)
        found.append(tuple(out[0, len(job.ids) :].tolist()))
    return found


def git_revision() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
