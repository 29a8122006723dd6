"""What acceptance rules accept, and what that costs on the client's link: the keyed rule, and others beside it.

    python -m benchmarks.rules

SmolLM2 on a local swarm of two servers, its own layers without some of them as the drafter, sampled texts of the same
prompts by each rule. Bytes are those of frames that crossed the client's streams, without the prompt's: candidates,
what a rule sends beside them and the client's commits go up; commits, or a rule's answers, come down. Links have a
delay, since a keyed draft that is not there when its position is decided counts as none. Texts of the keyed rule must
be the same with and without drafts. Lines of an earlier run with the same settings are kept unless measured again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks.compare import choose_prompts
from benchmarks.drafters import without_layers
from benchmarks.inprocess_swarm import InProcessSwarm
from benchmarks.report import RESULTS, aligned, earlier, write
from benchmarks.smollm2 import ensure_smollm2
from benchmarks.swarm import split_blocks
from benchmarks.wan_link import LinkShape
from bloombee_spec import AutoDistributedSpecModelForCausalLM, SpecConfig
from bloombee_spec.draft.causal_lm import TreeModel
from bloombee_spec.draft.model import ModelDraftConfig, ModelDrafter
from bloombee_spec.hosts.base import load_host
from bloombee_spec.sampling.round_rules import ROUND_RULES
from bloombee_spec.server.config import SpecServerConfig

SEED = 7


class LikeliestDrafter(ModelDrafter):
    """Proposes what is likely, although it could know what will be drawn."""

    def couple(self, noise: Any, temperature: float) -> None:
        super().couple(None, temperature)


@dataclass(frozen=True)
class Way:
    """A rule with the drafts that it gets."""

    name: str
    rule: str = "keyed"
    coupled: bool = False
    siblings: int = 1
    speculate: bool = True

    @property
    def exact(self) -> bool:
        return self.rule == "keyed" or ROUND_RULES[self.rule].exact


WAYS = (
    Way("plain", speculate=False),
    Way("keyed, likeliest", siblings=1),
    Way("keyed, coupled", coupled=True),
    Way("keyed, coupled tree", coupled=True, siblings=8),
    Way("leviathan", "leviathan"),
    Way("block", "block"),
    Way("specinfer", "specinfer"),
    Way("picospec", "picospec"),
)


@dataclass(frozen=True)
class Line:
    """:param accepted: share of the positions with candidates at which one of them was right
    :param up: bytes per committed token, `down` alike
    """

    temperature: float
    way: str
    exact: bool
    tokens: int
    accepted: float
    tokens_per_lap: float
    up: float
    down: float


def accepted(way: Way, stats: Any, depth: int) -> float:
    """A round that is accepted whole has no position at which all candidates were wrong."""
    if way.rule == "keyed":
        return float(stats.hits / max(stats.hits + stats.misses, 1))
    wrong = stats.laps - stats.hits_by_depth.get(depth, 0)
    return float(stats.hits / max(stats.hits + wrong, 1))


def measure(model: Any, way: Way, drafter: TreeModel, jobs: Sequence[list[int]], args: Any, temperature: float) -> Any:
    """The texts, and the figures over all of them."""
    kind = ModelDrafter if way.coupled or way.rule != "keyed" else LikeliestDrafter
    config = SpecConfig(
        strict=True, rule=way.rule, plan="none", speculate=way.speculate, burst=args.burst, seed=SEED,
        max_candidates=args.burst, max_depth=args.burst, min_probability=0.0, hedges=0,
        drafter=kind(drafter, config=ModelDraftConfig(siblings=way.siblings, min_prob=1e-9)),
    )  # fmt: skip
    model.attach(model._spec_host, config)
    texts, total = [], None
    for ids in jobs:
        inputs = torch.tensor([ids])
        out = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=args.new_tokens, do_sample=True,
            temperature=temperature, top_k=args.top_k,
        )  # fmt: skip
        texts.append(out[0, len(ids) :].tolist())
        stats = model.last_stats
        total = stats if total is None else replace(
            total, **{name: getattr(total, name) + getattr(stats, name) for name in
                      ("tokens", "laps", "hits", "misses", "candidate_bytes_up", "commit_bytes_down")},
            hits_by_depth={d: total.hits_by_depth.get(d, 0) + stats.hits_by_depth.get(d, 0)
                           for d in {*total.hits_by_depth, *stats.hits_by_depth}},
        )  # fmt: skip
    assert total is not None
    depth = args.burst if way.rule == "keyed" else len(ROUND_RULES[way.rule].widths(args.burst))
    line = Line(
        temperature, way.name, way.exact, total.tokens, accepted(way, total, depth), total.tokens_per_lap,
        total.candidate_bytes_up / total.tokens, total.commit_bytes_down / total.tokens,
    )  # fmt: skip
    return texts, line


def plot(lines: Sequence[Line], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    temperatures = sorted({line.temperature for line in lines})
    names = [way.name for way in WAYS if way.speculate and any(line.way == way.name for line in lines)]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for shift, temperature in enumerate(temperatures):
        by_name = {line.way: line for line in lines if line.temperature == temperature}
        found = [(i + 0.38 * shift, by_name[name]) for i, name in enumerate(names) if name in by_name]
        left.barh([at for at, _ in found], [x.accepted for _, x in found], 0.36, label=f"T = {temperature:g}")
        if shift == 0:
            right.barh([at for at, _ in found], [x.up for _, x in found], 0.36, label="up")
            right.barh([at + 0.38 for at, _ in found], [x.down for _, x in found], 0.36, label="down")
    for axis in (left, right):
        axis.set_yticks([i + 0.19 for i in range(len(names))], names)
        axis.invert_yaxis()
        axis.legend(fontsize=8)
    left.set(xlabel="accepted, per position with candidates", xlim=(0, 1))
    right.set(xscale="log", xlabel=f"bytes per committed token, T = {temperatures[0]:g}")
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=1, help="of each kind")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.7, 1.0])
    parser.add_argument("--ways", nargs="*", default=[way.name for way in WAYS])
    parser.add_argument("--burst", type=int, default=6, help="candidates per round, or in flight")
    parser.add_argument(
        "--delay-ms", type=float, default=60.0, help="of each link: the drafter has to be done within a lap"
    )
    parser.add_argument("--top-k", type=int, default=0, help="as the option of generate; 0: off")
    parser.add_argument("--dropped-layers", type=int, default=4)
    parser.add_argument("--name", default="rules")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = ensure_smollm2()
    local = LlamaForCausalLM.from_pretrained(path, torch_dtype=torch.float32)
    drafter = TreeModel(without_layers(local, args.dropped_layers))
    blocks = split_blocks(local.config.num_hidden_layers, 2)
    tokenizer = AutoTokenizer.from_pretrained(path)
    jobs = [prompt.encode(tokenizer) for prompt in choose_prompts(args.prompts)]
    del local
    settings = {name: value for name, value in vars(args).items() if name not in ("temperatures", "ways", "name")}
    results = RESULTS / f"{args.name}.json"
    known = [Line(**line) for line in (earlier(args.name, settings) or {"lines": []})["lines"]]
    lines = {(line.temperature, line.way): line for line in known}
    server = load_host().server_class(SpecServerConfig())
    different = 0
    shape = LinkShape(delay_s=args.delay_ms / 1e3)
    with InProcessSwarm(path, blocks, server_factory=server, wan=shape) as swarm:
        model = AutoDistributedSpecModelForCausalLM.from_pretrained(
            swarm.model, initial_peers=swarm.initial_peers, dht_prefix=swarm.dht_prefix, torch_dtype=torch.float32,
            show_route=False,
        )  # fmt: skip
        try:
            for temperature in args.temperatures:
                keyed = None
                for way in [way for way in WAYS if way.name in args.ways]:
                    texts, line = measure(model, way, drafter, jobs, args, temperature)
                    lines[temperature, way.name] = line
                    if way.rule == "keyed":
                        different += keyed is not None and texts != keyed
                        keyed = texts
                    print(line, flush=True)
                    write(args.name, {"settings": settings, "lines": [asdict(line) for line in lines.values()]})
        finally:
            model.close()
    order = {way.name: i for i, way in enumerate(WAYS)}
    table = sorted(lines.values(), key=lambda line: (line.temperature, order[line.way]))
    head = ("T", "rule", "exact", "accepted", "tokens/lap", "up B/token", "down B/token")
    print(aligned(head, [
        (f"{x.temperature:g}", x.way, "yes" if x.exact else "no", f"{x.accepted:.1%}", f"{x.tokens_per_lap:.2f}",
         f"{x.up:,.0f}", f"{x.down:,.0f}")
        for x in table
    ], rule=True))  # fmt: skip
    plot(table, results.with_suffix(".png"))
    print(results)
    if different:
        print(f"{different} ways of the keyed rule gave other texts")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
