"""In bf16 two correct implementations round differently: where do their texts part, and how close was the choice?

    python -m benchmarks.margins

SmolLM2 in bf16, greedy, on a local swarm of two servers with candidates in flight, beside transformers' own `generate`
on the same weights. At the first token that differs: by how much the reference preferred its own, in nats, as its bf16
logits say and as the same weights say in fp32. A large margin would be a bug; a small one is rounding. How large
rounding is, transformers says itself: the same text in one forward instead of token by token, and where that would
have chosen otherwise.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks import prompts
from benchmarks.compare import choose_prompts
from benchmarks.inprocess_swarm import InProcessSwarm
from benchmarks.report import RESULTS, aligned, earlier, write
from benchmarks.smollm2 import ensure_smollm2
from benchmarks.swarm import split_blocks
from bloombee_spec import AutoDistributedSpecModelForCausalLM, SpecConfig
from bloombee_spec.client.prefix import common_prefix
from bloombee_spec.hosts.base import load_host
from bloombee_spec.server.config import SpecServerConfig


@dataclass(frozen=True)
class Line:
    """:param agreed: tokens before the texts part, all of them if they do not
    :param margin: of the reference's token over the plugin's, nats; `margin_fp32` with the same weights in fp32
    """

    prompt: str
    tokens: int
    agreed: int
    margin: float | None = None
    margin_fp32: float | None = None


@dataclass(frozen=True)
class Pair:
    """Where the plugin parts from transformers on a prompt, and where transformers parts from itself."""

    plugin: Line
    itself: Line


def chosen_prompts(count: int) -> list[prompts.Prompt]:
    """Our own ones first, then MT-bench's."""
    own = choose_prompts(len(prompts.ALL))
    return (own + (prompts.mt_bench() if count > len(own) else []))[:count]


@torch.inference_mode()
def compare(reference: Any, exact: Any, name: str, ids: list[int], expected: list[int], got: list[int]) -> Line:
    """:param exact: the reference's weights in fp32"""
    agreed = common_prefix(expected, got)
    if agreed == len(expected) == len(got):
        return Line(name, len(expected), agreed)
    text = torch.tensor([[*ids, *expected[:agreed]]])
    margins = []
    for model in (reference, exact):
        logits = model(text).logits[0, -1].float()
        margins.append(float(logits[expected[agreed]] - logits[got[agreed]]))
    return Line(name, len(expected), agreed, *margins)


@torch.inference_mode()
def chosen_at_once(reference: Any, ids: list[int], expected: list[int]) -> list[int]:
    """The likeliest token after each part of the text that the reference decoded, in one forward."""
    logits = reference(torch.tensor([[*ids, *expected]])).logits[0, len(ids) - 1 : -1]
    return logits.argmax(-1).tolist()  # type: ignore[no-any-return]


def report(what: str, lines: list[Line]) -> None:
    parted = [line for line in lines if line.margin is not None]
    head = (f"transformers and {what}", "tokens", "agreed", "margin, nats", "in fp32")
    print(aligned(head, [
        (x.prompt, x.tokens, x.agreed, f"{x.margin:.4f}", f"{x.margin_fp32:.4f}") for x in parted
    ], rule=True))  # fmt: skip
    largest = max((abs(line.margin_fp32 or 0.0) for line in parted), default=0.0)
    print(f"{len(lines) - len(parted)} of {len(lines)} texts identical; largest margin in fp32 {largest:.4f} nats")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default="0:50", help="first:end; other parts of an earlier run are kept")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--name", default="margins")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = ensure_smollm2()
    first, end = map(int, args.prompts.split(":"))
    reference = LlamaForCausalLM.from_pretrained(path, torch_dtype=torch.bfloat16)
    exact = LlamaForCausalLM.from_pretrained(path, torch_dtype=torch.bfloat16).float()
    tokenizer = AutoTokenizer.from_pretrained(path)
    blocks = split_blocks(reference.config.num_hidden_layers, 2)
    server = load_host().server_class(SpecServerConfig())
    settings = {"new_tokens": args.new_tokens}
    results = RESULTS / f"{args.name}.json"
    known = earlier(args.name, settings) or {"pairs": []}
    pairs = {pair["plugin"]["prompt"]: Pair(*(Line(**line) for line in pair.values())) for pair in known["pairs"]}
    with InProcessSwarm(path, blocks, server_factory=server, torch_dtype="bfloat16") as swarm:
        model = AutoDistributedSpecModelForCausalLM.from_pretrained(
            swarm.model, initial_peers=swarm.initial_peers, dht_prefix=swarm.dht_prefix, torch_dtype=torch.bfloat16,
            show_route=False, spec=SpecConfig(strict=True, drafter="suffix"),
        )  # fmt: skip
        options: dict[str, Any] = {"max_new_tokens": args.new_tokens, "do_sample": False}
        try:
            for prompt in chosen_prompts(end)[first:]:
                ids = prompt.encode(tokenizer)
                inputs = torch.tensor([ids])
                options["attention_mask"] = torch.ones_like(inputs)
                out = reference.generate(inputs, **options)
                got = model.generate(inputs, **options)
                texts = [text[0, len(ids) :].tolist() for text in (out, got)]
                decoded, at_once = texts[0], chosen_at_once(reference, ids, texts[0])
                both = [compare(reference, exact, prompt.name, ids, decoded, other) for other in (texts[1], at_once)]
                pairs[prompt.name] = Pair(*both)
                write(args.name, {"settings": settings, "pairs": [asdict(pair) for pair in pairs.values()]})
        finally:
            model.close()
    for what in ("plugin", "itself"):
        report(what, [getattr(pair, what) for pair in pairs.values()])
    print(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
