"""A small model on a WAN: compute hardly counts, as on GPUs, so that the network is what is measured.

Shared by `ablation` and `validate`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.compare import SPEC_SERVER
from benchmarks.methods import HOST, Method
from benchmarks.runner import Job, Result, run_jobs
from benchmarks.swarm import LocalSwarm, split_blocks
from benchmarks.toy_models import make_toy_llama
from benchmarks.wan import LinkShape

BLOCKS, HIDDEN, VOCAB = 8, 256, 1009
LIMIT_PER_TOKEN_S = 6.0


@dataclass(frozen=True)
class Wan:
    stages: int = 4
    delay_ms: float = 50.0
    mbps: float = 100.0

    def __str__(self) -> str:
        return f"{self.stages} stages, {self.delay_ms:g} ms one way, {self.mbps:g} Mbit/s"


@contextmanager
def toy_swarm(wan: Wan) -> Iterator[LocalSwarm]:
    """The small model (8 layers, hidden 256) behind links of one shape."""
    with tempfile.TemporaryDirectory(prefix="bloombee-spec-") as work_dir:
        model = make_toy_llama(
            Path(work_dir) / "model", hidden_size=HIDDEN, num_heads=8, num_kv_heads=4, num_layers=BLOCKS,
            intermediate_size=512, vocab_size=VOCAB,
        )  # fmt: skip
        shape = LinkShape(delay_s=wan.delay_ms / 1e3, jitter_s=0.0, bits_per_s=wan.mbps * 1e6)
        with LocalSwarm(
            model, split_blocks(BLOCKS, wan.stages), work_dir=Path(work_dir), wan=shape, server_command=SPEC_SERVER
        ) as swarm:
            yield swarm


def toy_jobs(n: int, new_tokens: int, length: int = 24) -> list[Job]:
    """Random prompts."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(3, VOCAB, (n, length), generator=generator).tolist()
    return [Job(f"prompt {i}", tuple(row), new_tokens) for i, row in enumerate(rows)]


def host_results(swarm: LocalSwarm, jobs: Sequence[Job]) -> tuple[list[Result], list[Job]]:
    """The host's plain decoding, and the same jobs with its output, for drafters that replay it."""
    results = run_jobs(swarm, HOST, jobs, limit_s=LIMIT_PER_TOKEN_S * jobs[0].new_tokens)
    return results, [Job(j.name, j.ids, j.new_tokens, r.tokens) for j, r in zip(jobs, results)]


def run(swarm: LocalSwarm, method: Method, jobs: Sequence[Job]) -> list[Result]:
    return run_jobs(swarm, method, jobs, limit_s=LIMIT_PER_TOKEN_S * jobs[0].new_tokens)


def decode_rate(results: Sequence[Result]) -> float:
    """Tokens per second behind the first token of each job: opening a session and the prompt are not decoding."""
    seconds = sum(result.stats["decode_s"] for result in results)
    return float(sum(len(result.tokens) - 1 for result in results) / seconds)


def total(results: Sequence[Result], name: str) -> float:
    return float(sum(result.stats[name] for result in results))
