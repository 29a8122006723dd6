"""At T > 0: does a drafter that knows the target's noise guess its draws better than one that proposes what is likely?

    python -m benchmarks.coupling

Locally, no swarm: SmolLM2 draws texts by the keyed rule; the same model without some of its layers proposes for each
position, deterministic top-k beside top-k by the shared noise (`argmax(log q - log E)`). What is counted is how often
the target's token is the first proposal, or among the first four.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks.compare import choose_prompts
from benchmarks.drafters import without_layers
from benchmarks.report import write
from benchmarks.smollm2 import ensure_smollm2
from bloombee_spec.choose import make_chooser
from bloombee_spec.sampling.noise import race_noise
from bloombee_spec.sampling.spec import SamplingSpec

SEED = 7


@dataclass(frozen=True)
class Line:
    temperature: float
    drafter: str
    positions: int
    top1: float
    top1_coupled: float
    top4: float
    top4_coupled: float


@torch.inference_mode()
def sample(model: Any, ids: list[int], n: int, temperature: float, row: int) -> list[int]:
    """`n` tokens by the keyed rule."""
    spec = SamplingSpec(prompt_length=len(ids), do_sample=True, seed=SEED, temperature=temperature)
    choose = make_chooser(spec.to_wire(), row, model.config.vocab_size)
    tokens, past, new = list(ids), None, ids
    for _ in range(n):
        out = model(torch.tensor([new]), past_key_values=past, use_cache=True)
        past = out.past_key_values
        new = [choose(out.logits[0, -1].float(), tokens)]
        tokens += new
    return tokens


@torch.inference_mode()
def ranks(drafter: Any, tokens: list[int], start: int, temperature: float, row: int) -> list[tuple[int, int]]:
    """Per generated position: rank of the target's token among the proposals, deterministic and coupled."""
    logits = drafter(torch.tensor([tokens])).logits[0].double() / temperature
    found = []
    for position in range(start, len(tokens)):
        scores, token = logits[position - 1], tokens[position]
        coupled = scores + race_noise(SEED, row, position, len(scores))
        found.append((int((scores > scores[token]).sum()), int((coupled > coupled[token]).sum())))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=3, help="of each kind")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.7, 1.0])
    parser.add_argument("--dropped-layers", type=int, nargs="*", default=[2, 6])
    args = parser.parse_args()
    path = ensure_smollm2()
    model = LlamaForCausalLM.from_pretrained(path, torch_dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    drafters = {n: without_layers(model, n) for n in args.dropped_layers}
    lines = []
    for temperature in args.temperatures:
        texts = []
        for row, prompt in enumerate(choose_prompts(args.prompts)):
            ids = prompt.encode(tokenizer)
            texts.append((len(ids), sample(model, ids, args.new_tokens, temperature, row), row))
        for dropped, drafter in drafters.items():
            found = [pair for start, text, row in texts for pair in ranks(drafter, text, start, temperature, row)]
            share = [
                sum(pair[i] < k for pair in found) / len(found) for k in (1, 4) for i in (0, 1)
            ]  # top1, top1 coupled, top4, top4 coupled
            lines.append(Line(temperature, f"target - {dropped} layers", len(found), *share))
    print(f"{'T':>4} {'drafter':18} {'top-1':>7} {'coupled':>8} {'top-4':>7} {'coupled':>8}   positions")
    for x in lines:
        print(
            f"{x.temperature:4.1f} {x.drafter:18} {x.top1:7.1%} {x.top1_coupled:8.1%} {x.top4:7.1%} "
            f"{x.top4_coupled:8.1%}   {x.positions}"
        )
    print(write("coupling", {"settings": vars(args), "lines": [asdict(x) for x in lines]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
