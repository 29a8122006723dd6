"""What swarm tests share: clients on a chosen route, the local reference, a drafter that knows the answer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.inprocess_swarm import InProcessSwarm
from bloombee_spec import AutoDistributedSpecModelForCausalLM, SpecConfig
from bloombee_spec.draft.base import Drafter, Proposal
from bloombee_spec.draft.scripted import Hostility, Script, ScriptedDrafter

# Routes through the shared swarm, by number of stages: indices into SPANS.
SPANS = [(0, 8), (0, 4), (4, 8), (0, 2), (2, 5), (5, 8), (5, 6), (6, 8)]
ROUTES = {1: (0,), 2: (1, 2), 3: (3, 4, 5), 4: (3, 4, 6, 7)}
VOCAB = 211
HOSTILE = {  # drafters, which replay what `replayed` gives them
    "always wrong": Script(1.0),
    "always right": Script(1.0),
    "random ids": Script(0.5, hostility=Hostility.RANDOM),
    "duplicates": Script(0.5, hostility=Hostility.DUPLICATES),
}
PLAIN = SpecConfig(strict=True, plan="none", speculate=False)
SUFFIX = SpecConfig(strict=True, plan="none", drafter="suffix")


def prompts(n: int, vocab: int, length: int = 9, seed: int = 0) -> list[list[int]]:
    """Random prompts of slightly different lengths; the first ones contain ids 0 and 2."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, vocab, (length + i % 4,), generator=generator).tolist() for i in range(n)]
    for row in rows[: n // 3]:
        row[1], row[3] = 0, 2
    return rows


def reference(model: LlamaForCausalLM, ids: Sequence[int], n: int, **kwargs: Any) -> list[int]:
    inputs = torch.tensor([list(ids)])
    known = {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)}  # by name: older PEFT takes no other
    out = model.generate(**known, max_new_tokens=n, do_sample=False, **kwargs)
    return out[0, len(ids) :].tolist()


def decode(model: Any, ids: Sequence[int], n: int, **kwargs: Any) -> list[int]:
    inputs = torch.tensor([list(ids)])
    out = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=n, **kwargs)
    return out[0, len(ids) :].tolist()


class Knowing(Drafter):
    """A scripted drafter for each prompt it meets: `texts` are whole sequences (prompt and continuation)."""

    def __init__(self, texts: Sequence[Sequence[int]], vocab: int, script: Script):
        self._texts, self._vocab, self._script = [list(text) for text in texts], vocab, script
        self.name = f"scripted(h={script.acceptance:g})"
        self._inner: ScriptedDrafter | None = None

    def start(self, prompt: Sequence[int]) -> None:
        text = next(text for text in self._texts if text[: len(prompt)] == list(prompt))
        self._inner = ScriptedDrafter(text, self._vocab, self._script)
        self._inner.start(prompt)

    def observe(self, tokens: Sequence[int]) -> None:
        assert self._inner is not None
        self._inner.observe(tokens)

    def propose(self, path: Sequence[int], budget: int, **options: Any) -> list[Proposal]:
        assert self._inner is not None
        return self._inner.propose(path, budget, **options)


def replayed(name: str, ids: Sequence[int], target: Sequence[int], vocab: int) -> list[int]:
    """The text that a drafter of `HOSTILE`, or a better one, replays; every token is off by one if it shall be
    wrong."""
    off = 1 if name == "always wrong" else 0
    return [*ids, *[(token + off) % vocab for token in target]]


@contextmanager
def client(
    swarm: InProcessSwarm, spec: SpecConfig, servers: Sequence[int] | None = None, **kwargs: Any
) -> Iterator[Any]:
    """A drop-in model that may only use the given servers."""
    allowed = None if servers is None else [swarm.servers[i].dht.peer_id.to_base58() for i in servers]
    model = AutoDistributedSpecModelForCausalLM.from_pretrained(
        swarm.model, initial_peers=swarm.initial_peers, dht_prefix=swarm.dht_prefix, torch_dtype=torch.float32,
        allowed_servers=allowed, show_route=False, max_retries=2, spec=spec, **kwargs,
    )  # fmt: skip
    try:
        yield model
    finally:
        model.close()


def respec(model: Any, **changes: Any) -> None:
    """The same connected client with another configuration."""
    model.attach(model._spec_host, replace(model.spec, **changes))


def assert_exact_in_every_way(model: Any, texts: Sequence[tuple[list[int], list[int]]], n: int, tree: Script) -> None:
    """Over two stages: plain, with the suffix drafter, with trees that are wrong on purpose; then with both ends at
    the client.

    :param texts: prompts with what follows them within `n` tokens
    """
    known = [[*ids, *target] for ids, target in texts]
    for changes in (
        {"speculate": False},
        {"speculate": True, "drafter": "suffix"},
        {"speculate": True, "drafter": lambda: Knowing(known, VOCAB, tree)},
        {"client_embeds": True, "client_verifies": True},
    ):
        respec(model, **changes)
        for ids, target in texts:
            assert decode(model, ids, n) == target, changes
            assert model.last_stats.mode == "ring" and len(model.last_stats.route) == 2
    assert model.last_stats.hits > 0 and model.last_stats.misses > 0


@contextmanager
def adapter_errors() -> Iterator[list[str]]:
    """What the host adapter logs as errors meanwhile."""
    messages: list[str] = []
    collector = logging.Handler(logging.ERROR)
    collector.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("bloombee_spec.hosts.container")
    log.addHandler(collector)
    try:
        yield messages
    finally:
        log.removeHandler(collector)


def free_cache(swarm: InProcessSwarm) -> list[int]:
    return [server.module_container.spec.info()["cache_bytes_left"] for server in swarm.servers if server is not None]


def load_local(path: Path | str) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(path, torch_dtype=torch.float32)
