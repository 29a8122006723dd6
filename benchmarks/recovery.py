"""How long a text stalls when a stage is lost or leaves, by what the new server is given, context and bandwidth.

    python -m benchmarks.recovery --contexts 256 1024 --mbps 10 100

SmolLM2 over four spans behind relays; the second span has two servers, and the one in use is killed, or told to leave,
in mid-text. A stall is the longest wait for a token afterwards, less a usual lap. For a crash: everything computed
again, gone on with what the others hold, or a second server that was kept ready. For a polite leave: nothing prepared,
the rows of the stage before, KV, or whichever the plugin expects to be there sooner.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.chaos import Trigger, plugin_client
from benchmarks.compare import SPEC_SERVER
from benchmarks.report import aligned, write
from benchmarks.smollm2 import ensure_smollm2
from benchmarks.swarm import LocalSwarm
from benchmarks.wan import LinkShape

SPANS = [(0, 8), (8, 16), (8, 16), (16, 23), (23, 30)]
VOCAB = 49152
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "crash, all again": ("crash", {"resume": False}),
    "crash, gone on with": ("crash", {"resume": True}),
    "crash, standby": ("crash", {"standby": True}),
    "leave, nothing prepared": ("leave", {"moving": "none"}),
    "leave, rows": ("leave", {"moving": "rows"}),
    "leave, kv": ("leave", {"moving": "kv"}),
    "leave, auto": ("leave", {"moving": "auto"}),
}


@dataclass(frozen=True)
class Line:
    """:param stall_s: seconds beyond a usual lap; `moved` false where the text ended before the ring had to move
    :param same: whether the text is that of the undisturbed run
    """

    mbps: float
    context: int
    way: str
    stall_s: float
    lap_s: float
    resumed: int
    moved: bool
    same: bool


def measure(swarm: LocalSwarm, model: Any, way: str, prompt: Sequence[int], text: Sequence[int], new: int) -> Line:
    fault, config = WAYS[way]
    model.attach(model._spec_host, replace(model.spec, speculate=False, **config))
    ids = torch.tensor([list(prompt)])
    with model.inference_session(max_length=len(prompt) + new):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2)
        (victim,) = (i for i in (1, 2) if any(swarm.servers[i].peer_id in line for line in model.last_stats.route))
        process = swarm.servers[victim].process

        def strike() -> None:
            if fault == "crash":
                swarm.kill(victim, signal.SIGKILL)
            else:
                os.kill(process.pid, signal.SIGTERM)

        trigger = Trigger(new - 12 if config.get("standby") else 6, strike)  # a standby needs time to be filled
        out = model.generate(None, max_new_tokens=new - 2, streamer=trigger)
        stats = model.last_stats
    swarm.restart(victim)
    forgive(model, swarm.servers[victim].peer_id)
    same = out[0].tolist()[-(new - 2) :] == list(text[2:])
    stall_s, moved = max(0.0, trigger.stall_s - stats.lap_s), stats.moves + stats.retries > 0
    return Line(0.0, len(prompt), way, stall_s, stats.lap_s, stats.resumed, moved, same)


def forgive(model: Any, peer: str) -> None:
    """The client routes over a server that is back at once, rather than in a while."""
    model._spec_host.on_success(model, peer)
    model.__dict__.get("_spec_leaving", {}).clear()
    model.__dict__.get("_spec_server_infos", {}).clear()
    model._spec_host.look_again(model)


def table(lines: Sequence[Line]) -> str:
    head = ("Mbit/s", "context", "what", "stall, s", "in laps", "tokens not computed again", "same text")
    rows = [
        (
            f"{x.mbps:g}", x.context, x.way, f"{x.stall_s:.2f}" if x.moved else "text ended first",
            f"{x.stall_s / max(x.lap_s, 1e-9):.1f}" if x.moved else "", x.resumed, "yes" if x.same else "NO",
        )
        for x in lines
    ]  # fmt: skip
    return aligned(head, rows, rule=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--mbps", type=float, nargs="+", default=[10.0, 100.0])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--delay-ms", type=float, default=25.0)
    parser.add_argument("--name", default="recovery")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng, lines = random.Random(0), list[Line]()
    prompts = [[rng.randrange(VOCAB) for _ in range(context)] for context in args.contexts]
    for mbps in args.mbps:
        shape = LinkShape(delay_s=args.delay_ms / 1e3, bits_per_s=mbps * 1e6)
        with tempfile.TemporaryDirectory(prefix="bloombee-spec-") as folder:
            swarm = LocalSwarm(
                ensure_smollm2(), SPANS, work_dir=Path(folder), wan=shape, server_command=SPEC_SERVER,
                extra_args=("--spec-leave-timeout", "30"),
            )  # fmt: skip
            with swarm:
                model = plugin_client(swarm, mode="ring")
                for prompt in prompts:
                    ids = torch.tensor([prompt])
                    model.attach(model._spec_host, replace(model.spec, speculate=False))
                    quiet = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.new_tokens)
                    text = quiet[0, len(prompt) :].tolist()
                    for way in args.ways:
                        line = measure(swarm, model, way, prompt, text, args.new_tokens)
                        lines.append(replace(line, mbps=mbps))
                        print(f"  {lines[-1]}", flush=True)
                model.close()
    print(table(lines))
    path = write(args.name, {"settings": vars(args), "lines": [asdict(line) for line in lines]})
    print(f"\n{path}")
    return 0 if all(line.same for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
