"""One client process: decodes prompts by one method and writes a JSON line per result. Started by `benchmarks.runner`.

A process of its own for each method, with a time limit outside: stock clients of these hosts can hang after a few
calls.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

Decode = Callable[[list[int], int, dict[str, Any]], tuple[list[int], dict[str, Any]]]
"""(prompt ids, most new tokens, the job) to (new ids, statistics)."""


def load_method(
    method: dict[str, Any], model: str, peers: list[str], prefix: str
) -> tuple[Decode, Callable[[], None]]:
    """The decode function of a method, and how to close what it opened."""
    common: dict[str, Any] = {
        "initial_peers": peers, "dht_prefix": prefix, "torch_dtype": torch.float32, "show_route": False,
    }  # fmt: skip
    if method["kind"] == "local":
        return _local(model)
    if method["kind"] == "plugin":
        return _plugin(method, model, common)
    if method["kind"] == "host-speculative":
        return _host_speculative(method, model, common)
    from bloombee_spec.hosts.base import host_package

    host_class = import_module(host_package()).AutoDistributedModelForCausalLM
    return _plain_generate(host_class.from_pretrained(model, **common))


def _local(model: str) -> tuple[Decode, Callable[[], None]]:
    from transformers import AutoModelForCausalLM

    return _plain_generate(AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.float32))


def _plain_generate(net: Any) -> tuple[Decode, Callable[[], None]]:
    def decode(ids: list[int], n: int, job: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        inputs = torch.tensor([ids])
        out = net.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=n, do_sample=False)
        return out[0, len(ids) :].tolist(), {}

    return decode, lambda: None


def _host_speculative(method: dict[str, Any], model: str, common: dict[str, Any]) -> tuple[Decode, Callable[[], None]]:
    """The host's own speculative decoding; its drafter is a copy of the target without some of its layers."""
    from bloombee.models.llama import DistributedLlamaConfig
    from bloombee.models.llama.speculative_model import DistributedLlamaForSpeculativeGeneration as HostModel
    from transformers import LlamaForCausalLM

    from benchmarks.drafters import without_layers

    small = without_layers(
        LlamaForCausalLM.from_pretrained(model, torch_dtype=torch.float32), method["dropped_layers"]
    )

    class Built(
        HostModel
    ):  # from_pretrained cannot pass a model on: it tries to write every argument into a JSON log line
        def __init__(self, config: Any) -> None:
            super().__init__(config, small)

    config = DistributedLlamaConfig.from_pretrained(model, dht_prefix=common["dht_prefix"])
    config.initial_peers = common["initial_peers"]
    net = Built.from_pretrained(model, config=config, torch_dtype=torch.float32)
    return _plain_generate(net)


def _plugin(method: dict[str, Any], model: str, common: dict[str, Any]) -> tuple[Decode, Callable[[], None]]:
    from benchmarks.drafters import make_drafter_factory
    from bloombee_spec import AutoDistributedSpecModelForCausalLM, SpecConfig

    config = SpecConfig(strict=True, drafter=method.get("drafter", "suffix"), **method.get("config", {}))
    job_now: dict[str, Any] = {}
    if "script" in method:
        config = dataclasses.replace(config, drafter=make_drafter_factory(method["script"], job_now))
    net = AutoDistributedSpecModelForCausalLM.from_pretrained(model, spec=config, **common)

    def decode(ids: list[int], n: int, job: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        job_now.clear()
        job_now.update(job, vocab_size=net.config.vocab_size)
        inputs = torch.tensor([ids])
        out = net.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=n, do_sample=False)
        stats = dataclasses.asdict(net.last_stats)
        return out[0, len(ids) :].tolist(), stats

    return decode, net.close


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", type=Path, required=True, help="JSON: method, model, peers, prefix, jobs")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one per finished job")
    args = parser.parse_args()
    torch.set_num_threads(1)
    task = json.loads(args.task.read_text())
    decode, close = load_method(task["method"], task["model"], task["peers"], task["prefix"])
    with args.out.open("a") as out:
        for job in task["jobs"]:
            started = time.perf_counter()
            tokens, stats = decode(job["ids"], job["new_tokens"], job)
            seconds = time.perf_counter() - started
            out.write(json.dumps({"job": job["name"], "tokens": tokens, "seconds": seconds, "stats": stats}) + "\n")
            out.flush()
    close()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
