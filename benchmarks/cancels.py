"""Ten thousand generations that are cancelled in mid-flight, over one session: does anybody's memory grow?

    python -m benchmarks.cancels --cancels 10000

Each one decodes a few tokens with candidates in flight, then stops: a new epoch, dead rows at every stage. Resident
memory of the client and of each server, after a tenth of the cancels and at the end.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.chaos import plugin_client
from benchmarks.compare import SPEC_SERVER
from benchmarks.report import write
from benchmarks.swarm import LocalSwarm, split_blocks
from benchmarks.toy_models import make_toy_llama
from bloombee_spec.client.decoder import RingDecoder
from bloombee_spec.client.routing import open_ring
from bloombee_spec.client.stream import StreamRequest
from bloombee_spec.draft.scripted import Script, ScriptedDrafter

VOCAB = 1009
GROWTH = 0.05  # and 4 MiB are noise
MIB = 1 << 20


def resident(pids: list[int]) -> list[float]:
    """MiB of each process."""
    return [psutil.Process(pid).memory_info().rss / MIB for pid in pids]


def cancel(decoder: Any, prompt: tuple[int, ...], rng: random.Random) -> None:
    """Decode up to four tokens, then stop wherever the candidates are."""
    wanted = rng.randint(1, 4)
    got = 0
    for _, tokens in decoder.decode([StreamRequest(prompt, len(prompt) + 32)]):
        got += len(tokens)
        if got >= wanted:
            decoder.stop(0, len(prompt))
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cancels", type=int, default=10_000)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--name", default="cancels")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="bloombee-spec-") as folder:
        model_path = make_toy_llama(Path(folder) / "model", num_layers=2, vocab_size=VOCAB)
        with LocalSwarm(
            model_path, split_blocks(2, args.stages), work_dir=Path(folder), server_command=SPEC_SERVER,
            extra_args=("--num_handlers", "1"),
        ) as swarm:  # fmt: skip
            model = plugin_client(swarm)
            prompt = tuple(rng.randrange(VOCAB) for _ in range(16))
            ids = torch.tensor([prompt])
            text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32)[0].tolist()
            ring = open_ring(model._spec_host, model, model.spec, lanes=1, max_length=64)
            decoder = RingDecoder(
                model._spec_host, model, ring, model.spec, lanes=1, max_length=64,
                new_drafter=lambda: ScriptedDrafter(text, VOCAB, Script(0.6, siblings=(0.2,), depth=8)),
            )  # fmt: skip
            pids = [psutil.Process().pid, *[server.pid for server in swarm.servers]]
            started, samples = time.monotonic(), []
            for i in range(1, args.cancels + 1):
                cancel(decoder, prompt, rng)
                if i % max(1, args.cancels // 10) == 0:
                    samples.append((i, resident(pids)))
                    print(i, " ".join(f"{mib:.1f}" for mib in samples[-1][1]), "MiB", flush=True)
            seconds = time.monotonic() - started
            statistics = decoder.close()
            after = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32)[0].tolist()
            model.close()
    first, last = samples[0][1], samples[-1][1]
    flat = all(end <= begin * (1 + GROWTH) + 4 for begin, end in zip(first, last))
    verdict = "flat" if flat else "GREW"
    print(f"{args.cancels} cancels in {seconds:.0f} s, memory {verdict}, then the same text again: {after == text}")
    dropped = sum(each.dropped_rows for each in statistics if each is not None)
    print(f"rows dropped as dead: {dropped}")
    write(args.name, {"settings": vars(args), "samples": samples, "seconds": seconds, "dropped_rows": dropped})
    return 0 if flat and after == text else 1


if __name__ == "__main__":
    sys.exit(main())
