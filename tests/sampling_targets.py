"""A synthetic target without a known law, and stacks of options to run it with."""

import torch
from transformers.generation import logits_process

from bloombee_spec.sampling.spec import SamplingSpec

VOCAB = 23
HAS_MIN_P = hasattr(logits_process, "MinPLogitsWarper")  # transformers has it since 4.39
PROMPT = [3, 1, 4]
GREEDY = SamplingSpec(prompt_length=len(PROMPT))
SAMPLING = SamplingSpec(prompt_length=len(PROMPT), do_sample=True, seed=42)
STACKS = {
    "greedy": GREEDY,
    "greedy_penalties": SamplingSpec(
        prompt_length=3, repetition_penalty=1.5, no_repeat_ngram_size=2, frequency_penalty=0.3
    ),
    "sampling": SAMPLING,
    "cold": SamplingSpec(prompt_length=3, do_sample=True, seed=1, temperature=0.7, top_k=8, top_p=0.9),
    "penalties": SamplingSpec(
        prompt_length=3, do_sample=True, seed=9, repetition_penalty=1.3, presence_penalty=0.7, no_repeat_ngram_size=2
    ),
    "ends": SamplingSpec(
        prompt_length=3,
        do_sample=True,
        seed=8,
        min_new_tokens=4,
        eos_token_ids=(0,),
        suppress_tokens=(7,),
        min_p=0.02 if HAS_MIN_P else 0.0,
    ),
}


def model(ids: list[int]) -> torch.Tensor:
    """A synthetic target: logits `[vocab]` that depend on the last three tokens."""
    key = 0
    for token in ids[-3:]:
        key = key * VOCAB + token + 1
    return 2.0 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(key))
