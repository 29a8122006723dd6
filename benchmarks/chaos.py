"""Servers die, freeze, leave and lose their links in mid-text: is the answer the same, and how long does it stall?

    python -m benchmarks.chaos --generations 20

A random small model on `--spans` spans, two servers each, behind relays. In each generation one fault hits one server
of the route (with `--anywhere`, of the swarm) at a random token; afterwards everything is put right again. The same
faults hit the host's own `generate`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import torch
from hivemind.p2p import PeerID
from hivemind.proto import runtime_pb2

from benchmarks.compare import SPEC_SERVER
from benchmarks.report import write
from benchmarks.scenario import toy_jobs
from benchmarks.swarm import LocalSwarm, split_blocks
from benchmarks.toy_models import make_toy_llama
from benchmarks.wan import LinkShape
from bloombee_spec import AutoDistributedSpecModelForCausalLM, SpecConfig
from bloombee_spec.hosts.base import host_package
from bloombee_spec.server.service import SpecService

BLOCKS = 8
LIMIT_S = 90.0  # for a generation with a fault
PARKED_S = 15.0  # until servers have given up what nobody came back for
JUMP_S = 0.4  # one-way delay after a delay jump


class Faults:
    """Does harm to one server of a swarm, and repairs it."""

    def __init__(self, swarm: LocalSwarm):
        self._swarm, self._shape = swarm, swarm._links[0] or LinkShape()
        self.kinds: dict[str, Callable[[int], None]] = {
            "kill -9": self._kill, "freeze": self._freeze, "terminate": self._terminate, "cut": self._cut,
            "silent cut": self._silent_cut, "delay jump": self._jump, "leave": self._leave,
        }  # fmt: skip

    def repair(self, kind: str, index: int) -> None:
        swarm = self._swarm
        assert swarm.relays is not None
        if kind == "freeze":
            swarm.kill(index, signal.SIGCONT)
        elif kind in ("cut", "silent cut"):
            swarm.relays.restore(index)
        elif kind == "delay jump":
            swarm.relays.set_shape(index, self._shape, self._shape)
        else:
            swarm.restart(index)

    def _kill(self, index: int) -> None:
        self._swarm.kill(index, signal.SIGKILL)

    def _freeze(self, index: int) -> None:
        self._swarm.kill(index, signal.SIGSTOP)

    def _terminate(self, index: int) -> None:
        self._swarm.kill(index, signal.SIGTERM)

    def _leave(self, index: int) -> None:
        """What an operator does: SIGTERM to the server's own process, which then says goodbye."""
        os.kill(self._swarm.servers[index].process.pid, signal.SIGTERM)

    def _cut(self, index: int) -> None:
        assert self._swarm.relays is not None
        self._swarm.relays.cut(index)

    def _silent_cut(self, index: int) -> None:
        assert self._swarm.relays is not None
        self._swarm.relays.cut(index, silent=True)

    def _jump(self, index: int) -> None:
        assert self._swarm.relays is not None
        slow = LinkShape(delay_s=JUMP_S, bits_per_s=self._shape.bits_per_s)
        self._swarm.relays.set_shape(index, slow, slow)


class Trigger:
    """A streamer that does something once, after so many tokens (0: as the prompt is sent), and keeps the times of
    all."""

    def __init__(self, at: int, action: Callable[[], None]):
        self._at, self._action = at, action
        self.times: list[float] = []
        self._prompt = True

    def put(self, _: Any) -> None:
        if self._prompt:
            self._prompt = False
            if self._at == 0:
                self._action()
            return
        self.times.append(time.monotonic())
        if len(self.times) == self._at:
            self._action()
            self.times[-1] = time.monotonic()

    def end(self) -> None:
        pass

    @property
    def stall_s(self) -> float:
        """Longest wait for a token after the fault."""
        after = self.times[max(0, self._at - 1) :]
        return max((b - a for a, b in pairwise(after)), default=0.0)


@dataclass(frozen=True)
class Outcome:
    method: str
    fault: str
    at: int
    identical: bool
    error: str
    seconds: float
    stall_s: float
    retries: int


def plugin_client(swarm: LocalSwarm, **config: Any) -> Any:
    spec = SpecConfig(strict=True, max_retries=12, stall_timeout=20.0, connect_timeout=10.0, **config)
    return AutoDistributedSpecModelForCausalLM.from_pretrained(
        swarm.model, initial_peers=swarm.initial_peers, dht_prefix=swarm.dht_prefix, torch_dtype=torch.float32,
        show_route=False, spec=spec,
    )  # fmt: skip


def host_client(swarm: LocalSwarm) -> Any:
    return import_module(host_package()).AutoDistributedModelForCausalLM.from_pretrained(
        swarm.model, initial_peers=swarm.initial_peers, dht_prefix=swarm.dht_prefix, torch_dtype=torch.float32,
        show_route=False, request_timeout=20, max_retries=6,
    )  # fmt: skip


def generate(
    model: Any,
    ids: Sequence[int],
    expected: Sequence[int],
    fault: str,
    at: int,
    action: Callable[[], None],
    method: str,
) -> Outcome:
    """One generation with a fault, in a thread that is given up on after `LIMIT_S`.

    From the second token on the fault comes in the middle of a session of the plugin, so that the route that the first
    token took is still the one in use.
    """
    known = 1 if method == "plugin" and at > 1 else 0
    trigger, found = Trigger(at - known, action), dict[str, Any]()
    left = len(expected) - known

    def run() -> None:
        inputs = torch.tensor([list(ids)])
        options: dict[str, Any] = {"attention_mask": torch.ones_like(inputs), "do_sample": False}
        try:
            if known:
                with model.inference_session(max_length=len(ids) + len(expected)):
                    first = model.generate(inputs, max_new_tokens=known, **options)[0, len(ids) :].tolist()
                    out = model.generate(None, max_new_tokens=left, do_sample=False, streamer=trigger)
            else:
                first, out = [], model.generate(inputs, max_new_tokens=left, streamer=trigger, **options)
            found["ids"] = first + out[0, -left:].tolist()
        except Exception as e:
            found["error"] = repr(e)[:300]

    started = time.monotonic()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    stats = getattr(model, "last_stats", None)
    return Outcome(
        method, fault, at, found.get("ids") == list(expected), found.get("error", "" if found else "no end"),
        time.monotonic() - started, trigger.stall_s, stats.retries if stats is not None else 0,
    )  # fmt: skip


def on_route(swarm: LocalSwarm, model: Any, rng: random.Random) -> int:
    """A server that the last generation went through; any for the host, who does not say."""
    stats = getattr(model, "last_stats", None)
    if stats is None or not stats.route:
        return rng.randrange(len(swarm.servers))
    peers = {line.split()[1] for line in stats.route}
    return rng.choice([i for i, server in enumerate(swarm.servers) if server.peer_id in peers])


def free_cache(model: Any) -> dict[str, int]:
    """Bytes of KV cache that servers have left, by peer."""
    host = model._spec_host
    p2p, peers = host.p2p(model), list(host.servers(model))

    async def ask(peer: str) -> int:
        reply = await SpecService.get_stub(p2p, PeerID.from_base58(peer)).rpc_spec_info(runtime_pb2.ExpertUID())
        return int(msgpack.unpackb(reply.serialized_info)["cache_bytes_left"])

    async def ask_all() -> dict[str, int]:
        return dict(zip(peers, await asyncio.gather(*map(ask, peers))))

    return dict(host.run(ask_all(), 30))


def summary(outcomes: Sequence[Outcome]) -> str:
    lines = [f"{'method':8} {'fault':12} {'same text':>9} {'p50 stall':>10} {'p95 stall':>10}  errors"]
    for method in dict.fromkeys(o.method for o in outcomes):
        for fault in [*dict.fromkeys(o.fault for o in outcomes), "all"]:
            some = [o for o in outcomes if o.method == method and fault in (o.fault, "all")]
            if not some:
                continue
            stalls = sorted(o.stall_s for o in some if o.identical) or [float("nan")]
            errors = sorted({o.error.split("(")[0] for o in some if o.error})
            lines.append(
                f"{method:8} {fault:12} {sum(o.identical for o in some):4d}/{len(some):<4d}"
                f" {stalls[len(stalls) // 2]:9.1f}s {stalls[int(0.95 * (len(stalls) - 1))]:9.1f}s  {', '.join(errors)}"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", type=int, default=20, help="of each method")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--spans", type=int, default=2)
    parser.add_argument("--delay-ms", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--anywhere", action="store_true", help="hit any server, not only those of the route")
    parser.add_argument("--host-generations", type=int, help="of the host (default: as many; 0: none)")
    parser.add_argument("--name", default="chaos")
    args = parser.parse_args()
    torch.set_num_threads(1)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="bloombee-spec-") as folder:
        model_path = make_toy_llama(Path(folder) / "model", num_layers=BLOCKS, vocab_size=1009)
        from transformers import LlamaForCausalLM

        local = LlamaForCausalLM.from_pretrained(model_path, torch_dtype=torch.float32)
        jobs = toy_jobs(4, args.new_tokens)
        expected = {}
        for job in jobs:
            ids = torch.tensor([job.ids])
            out = local.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=job.new_tokens)
            expected[job.name] = out[0, len(job.ids) :].tolist()
        shape = LinkShape(delay_s=args.delay_ms / 1e3)
        spans = [span for span in split_blocks(BLOCKS, args.spans) for _ in range(2)]
        with LocalSwarm(
            model_path, spans, work_dir=Path(folder), wan=shape, server_command=SPEC_SERVER, seed=args.seed
        ) as swarm:
            faults = Faults(swarm)
            at_host = args.generations if args.host_generations is None else args.host_generations
            for method, generations in (("plugin", args.generations), ("host", at_host)):
                rng = random.Random(args.seed)
                model = plugin_client(swarm) if method == "plugin" else None
                before = free_cache(model) if model is not None else {}
                for i in range(generations):
                    job = jobs[i % len(jobs)]
                    kind = list(faults.kinds)[i % len(faults.kinds)]
                    at = rng.randint(0, args.new_tokens - 2)  # 0: before the prompt is through
                    if method == "host":
                        model = host_client(swarm)  # a client of the host may hang for good
                    victims: list[int] = []

                    anyone, choice = rng.randrange(len(spans)), random.Random(rng.random())

                    def strike(
                        kind: str = kind, model: Any = model, victims: list[int] = victims, anyone: int = anyone,
                        choice: random.Random = choice,
                    ) -> None:  # fmt: skip
                        victims.append(anyone if args.anywhere else on_route(swarm, model, choice))
                        faults.kinds[kind](victims[0])

                    outcome = generate(model, job.ids, expected[job.name], kind, at, strike, method)
                    outcomes.append(outcome)
                    print(f"{i}: server {victims}, {outcome}", flush=True)
                    if victims:
                        faults.repair(kind, victims[0])
                if method == "plugin":
                    time.sleep(PARKED_S)
                    used = [before.get(peer, left) - left for peer, left in free_cache(model).items()]
                    model.close()
    print(summary(outcomes))
    print(f"KV cache in use afterwards, bytes by server: {used}")
    path = write(args.name, {"settings": vars(args), "outcomes": [asdict(o) for o in outcomes], "cache_in_use": used})
    print(f"\n{path}")
    return 0 if all(o.identical for o in outcomes if o.method == "plugin") and not any(used) else 1


if __name__ == "__main__":
    sys.exit(main())
