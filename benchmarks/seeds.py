"""Is sampled text a function of prompt, seed and model? Many seeds, every kind of drafter, with and without waiting
for verdicts, behind links with random delays.

    python -m benchmarks.seeds --seeds 0:200

A toy model on a local swarm of three servers. Each seed's text is decoded plainly, then in eight ways; all must be the
same. Exit status 1 if any differs. A run over part of the seeds adds to the results of earlier parts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.drafters import without_layers
from benchmarks.inprocess_swarm import InProcessSwarm
from benchmarks.report import RESULTS, aligned, earlier, write
from benchmarks.toy_models import make_toy_llama
from benchmarks.wan_link import LinkShape
from bloombee_spec import AutoDistributedSpecModelForCausalLM, SpecConfig
from bloombee_spec.draft.base import Drafter
from bloombee_spec.draft.model import ModelDrafter
from bloombee_spec.draft.scripted import Script, ScriptedDrafter
from bloombee_spec.hosts.base import load_host
from bloombee_spec.server.config import SpecServerConfig

VOCAB, LAYERS = 211, 6
DRAFTERS = ("none", "suffix", "model", "scripted")
MODES = {"sync": "tree", "streaming": "stream"}
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7, "top_k": 0},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 0, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
)


def prompt(seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, VOCAB, (9,), generator=generator).tolist()
    return ids


def drafters(small: ModelDrafter, text: Sequence[int]) -> dict[str, Any]:
    script = Script(0.7, siblings=(0.15,))

    def scripted() -> Drafter:
        return ScriptedDrafter(text, VOCAB, script)

    return {"none": "none", "suffix": "suffix", "model": small.fork, "scripted": scripted}


def compare_seed(decode: Callable[..., list[int]], small: ModelDrafter, seed: int) -> dict[str, bool]:
    """Way to whether its text is the plain one."""
    plain = decode("plain", seed, speculate=False, drafter="none")
    known = drafters(small, [*prompt(seed), *plain])
    return {
        f"{name}, {mode}": decode(name, seed, drafter=known[name], plan=plan) == plain
        for name in DRAFTERS
        for mode, plan in MODES.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:200", help="first:end")
    parser.add_argument("--new-tokens", type=int, default=10)
    parser.add_argument("--delay-ms", type=float, default=1.0, help="of each link, one way")
    parser.add_argument("--jitter-ms", type=float, default=4.0, help="random extra delay, up to this much")
    parser.add_argument("--name", default="seeds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    first, end = map(int, args.seeds.split(":"))
    shape = LinkShape(delay_s=args.delay_ms / 1e3, jitter_s=args.jitter_ms / 1e3)
    server = load_host().server_class(SpecServerConfig())
    settings = {"new_tokens": args.new_tokens, "delay_ms": args.delay_ms, "jitter_ms": args.jitter_ms}
    done, same, hits = _earlier(args.name, settings)
    with tempfile.TemporaryDirectory(prefix="bloombee-spec-") as folder:
        path = make_toy_llama(Path(folder) / "toy", num_layers=LAYERS, vocab_size=VOCAB, eos_token_id=None)
        from transformers import LlamaForCausalLM

        small = ModelDrafter(without_layers(LlamaForCausalLM.from_pretrained(path, torch_dtype=torch.float32), 1))
        with InProcessSwarm(path, [(0, 2), (2, 4), (4, 6)], server_factory=server, wan=shape) as swarm:
            model = AutoDistributedSpecModelForCausalLM.from_pretrained(
                swarm.model, initial_peers=swarm.initial_peers, dht_prefix=swarm.dht_prefix,
                torch_dtype=torch.float32, show_route=False,
            )  # fmt: skip

            def decode(name: str, seed: int, **changes: Any) -> list[int]:
                model.attach(model._spec_host, SpecConfig(strict=True, seed=seed, **changes))
                ids = torch.tensor([prompt(seed)])
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=args.new_tokens,
                    do_sample=True,
                    **OPTIONS[seed % len(OPTIONS)],
                )
                hits[name] += model.last_stats.hits
                text: list[int] = out[0, ids.shape[1] :].tolist()
                return text

            try:
                for seed in [seed for seed in range(first, end) if seed not in done]:
                    same.update(way for way, identical in compare_seed(decode, small, seed).items() if identical)
                    done.append(seed)
                    counted: dict[str, object] = {"seeds": done, "identical": dict(same), "hits": dict(hits)}
                    write(args.name, {"settings": settings, **counted})
            finally:
                model.close()
    ways = [f"{name}, {mode}" for name in DRAFTERS for mode in MODES]
    print(aligned(("drafter, mode", "identical", "of"), [(way, same[way], len(done)) for way in ways], rule=True))
    print(f"drafted tokens that were committed: {dict(hits)}")
    print(RESULTS / f"{args.name}.json")
    return 0 if all(same[way] == len(done) for way in ways) else 1


def _earlier(name: str, settings: dict[str, Any]) -> tuple[list[int], Counter[str], Counter[str]]:
    document = earlier(name, settings) or {"seeds": [], "identical": {}, "hits": {}}
    return document["seeds"], Counter(document["identical"]), Counter(document["hits"])


if __name__ == "__main__":
    sys.exit(main())
