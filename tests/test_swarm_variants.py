"""Kinds of servers and checkpoints: heads, tied weights, RoPE scaling, bf16, quantised blocks. One swarm for all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from connect_helpers import connect
from host_helpers import OLD_PETALS, host_module
from quantised_helpers import quantised_layers_compute
from swarm_helpers import PLAIN, SUFFIX, VOCAB, Knowing, adapter_errors, decode, prompts, reference, respec
from transformers import LlamaForCausalLM

from benchmarks.inprocess_swarm import InProcessSwarm
from benchmarks.toy_models import ROPE_SCALING, make_toy_llama
from bloombee_spec import SpecConfig
from bloombee_spec.client.model import UnsupportedCall
from bloombee_spec.draft.scripted import Hostility, Script
from bloombee_spec.server.config import SpecServerConfig

pytestmark = pytest.mark.swarm
NEW = 40
TREE = Script(0.6, siblings=(0.2, 0.1), depth=6)


@dataclass(frozen=True)
class Kind:
    """Servers of one kind: a checkpoint, block ranges with what `--spec-heads` says at each, and server options."""

    model: str
    servers: tuple[tuple[int, int, str], ...]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        return f"{self.model}-{self.options.get('torch_dtype', 'float32')}-{self.options.get('quant_type', '')}"


# Two stages with heads chosen by hand, and which ends of the model a ring over them has.
HEADS = {
    "none": (((0, 4, "none"), (4, 8, "none")), False, False),
    "embed": (((0, 4, "embed"), (4, 8, "none")), True, False),
    "lm_head": (((0, 4, "none"), (4, 8, "lm_head")), False, True),
    "both": (((0, 4, "both"), (4, 8, "both")), True, True),
    "at the wrong ends": (((0, 4, "lm_head"), (4, 8, "embed")), False, False),
}
LINEAR, LLAMA3 = ROPE_SCALING["linear"], ROPE_SCALING["llama3"]
if OLD_PETALS:  # its transformers names the first one differently, and does not know the second
    LINEAR, LLAMA3 = {"type": "linear", "factor": 2.0}, None
SHAPES: dict[str, dict[str, Any]] = {
    # 5 query heads of width 14 that share one KV head
    "tied-llama3": dict(
        hidden_size=70, num_heads=5, num_kv_heads=1, tied=True, rope_scaling=LLAMA3, num_layers=4
    ),
    "biased-linear": dict(
        hidden_size=66, num_heads=3, num_kv_heads=3, attention_bias=True, rope_scaling=LINEAR,
        num_layers=3, rope_theta=500_000.0,
    ),
    "two-blocks": dict(num_layers=2),
    "wide-vocabulary": dict(num_layers=2, vocab_size=50_000),
}  # fmt: skip
BY_HEADS = Kind("toy", tuple(sorted({server for servers, _, _ in HEADS.values() for server in servers})))
TIED = Kind("tied-llama3", ((0, 2, "auto"), (2, 4, "auto")))
BIASED = Kind("biased-linear", ((0, 1, "auto"), (1, 3, "auto")))
BF16 = Kind("two-blocks", ((0, 1, "auto"), (1, 2, "auto")), {"torch_dtype": "bfloat16"})
QUANTISED = [Kind("two-blocks", ((0, 2, "auto"),), {"quant_type": name}) for name in ("INT8", "NF4")]
LONGEST = 320
WIDE = Kind("wide-vocabulary", ((0, 2, "both"),), {"inference_max_length": LONGEST})
KINDS = [BY_HEADS, TIED, BIASED, BF16, *QUANTISED, WIDE]


class Variants:
    """The running swarm: `servers(kind)` in the order of `kind.servers`; `log` is what the host adapter logged."""

    def __init__(self, swarm: InProcessSwarm, paths: dict[str, Path], log: list[str]) -> None:
        self.swarm, self.paths, self.log = swarm, paths, log

    def servers(self, kind: Kind) -> list[Any]:
        first = sum(len(other.servers) for other in KINDS[: KINDS.index(kind)])
        return self.swarm.servers[first : first + len(kind.servers)]

    def client(
        self, kind: Kind, spec: SpecConfig, only: tuple[tuple[int, int, str], ...] | None = None, **kwargs: Any
    ) -> AbstractContextManager[Any]:
        chosen = [
            server.dht.peer_id.to_base58()
            for server, described in zip(self.servers(kind), kind.servers)
            if only is None or described in only
        ]
        peers = self.swarm.initial_peers
        return connect(self.paths[kind.model], peers, kind.prefix, spec, peers=chosen, **kwargs)


@pytest.fixture(scope="module")
def variants(toy_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Variants]:
    from bloombee_spec.hosts.base import load_host

    folder = tmp_path_factory.mktemp("variants")
    paths = {name: make_toy_llama(folder / name, **{"vocab_size": VOCAB, **shape}) for name, shape in SHAPES.items()}
    paths["toy"] = toy_path
    described = iter([(kind, server) for kind in KINDS for server in kind.servers])

    def start(**arguments: Any) -> Any:
        kind, (_, _, heads) = next(described)
        options = dict(kind.options)
        if "quant_type" in options:
            options["quant_type"] = host_module("utils.convert_block").QuantType[options["quant_type"]]
        arguments.update(converted_model_name_or_path=str(paths[kind.model]), dht_prefix=kind.prefix, **options)
        return load_host().server_class(SpecServerConfig(heads=heads))(**arguments)

    ranges = [(start, end) for kind in KINDS for start, end, _ in kind.servers]
    with (
        adapter_errors() as messages,
        InProcessSwarm(toy_path, ranges, server_factory=start, startup_timeout_s=300.0) as swarm,
    ):
        yield Variants(swarm, paths, messages)


def load(path: Path, dtype: torch.dtype = torch.float32, **config: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(path, torch_dtype=dtype, **config)


def decode_exactly(model: Any, local: Any, texts: list[list[int]], n: int = NEW) -> None:
    """Plain, with the suffix drafter, and with trees that are wrong on purpose."""
    expected = [reference(local, ids, n) for ids in texts]
    known = [[*ids, *target] for ids, target in zip(texts, expected)]
    for changes in (
        {"speculate": False},
        {"speculate": True, "drafter": "suffix"},
        {"speculate": True, "drafter": lambda: Knowing(known, VOCAB, TREE)},
    ):
        respec(model, **changes)
        for ids, target in zip(texts, expected):
            assert decode(model, ids, n) == target
    assert model.last_stats.hits > 0 and model.last_stats.misses > 0


# --- heads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", HEADS)
def test_heads_where_the_servers_have_them(variants: Variants, toy_local: Any, heads: str) -> None:
    servers, embeds, verifies = HEADS[heads]
    with variants.client(BY_HEADS, PLAIN, servers) as model:
        decode_exactly(model, toy_local, prompts(3, VOCAB, seed=30))
        with model.inference_session(max_length=64) as session:
            model.generate(torch.tensor([[1, 2, 3, 4]]), max_new_tokens=16)
            ring = session._decoder.ring
            assert (ring.embeds, ring.verifies) == (embeds, verifies)
            stats = model.last_stats
    # One row of activations is 96 values of 4 bytes.
    assert (stats.bytes_up >= 4 * 96 * 4) == (not embeds)
    assert (stats.bytes_down >= 16 * 96 * 4) == (not verifies)


def test_servers_say_which_heads_they_have(variants: Variants) -> None:
    for server, (_, _, heads) in zip(variants.servers(BY_HEADS), BY_HEADS.servers):
        info = server.module_container.spec.info()
        assert info["embed"] == (heads in ("embed", "both"))
        assert info["lm_head"] == (heads in ("lm_head", "both"))
    # With tied weights one table serves both ends, yet each server offers its own end only.
    ends = [server.module_container.spec.info() for server in variants.servers(TIED)]
    assert [(info["embed"], info["lm_head"]) for info in ends] == [(True, False), (False, True)]


# --- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TIED, BIASED], ids=lambda kind: kind.model)
@pytest.mark.parametrize("at_client", [False, True], ids=["ends at the servers", "ends at the client"])
def test_shapes_of_checkpoints(variants: Variants, kind: Kind, at_client: bool) -> None:
    local = load(variants.paths[kind.model])
    assert local.config.tie_word_embeddings == (kind is TIED)
    spec = SpecConfig(strict=True, speculate=False, client_embeds=at_client, client_verifies=at_client)
    with variants.client(kind, spec) as model:
        # Long enough for the scaled frequencies to matter: the unscaled model says something else.
        texts = prompts(2, VOCAB, length=70, seed=31)
        decode_exactly(model, local, texts)
    if kind is BIASED or not OLD_PETALS:  # whose transformers know one of the two scalings
        unscaled = load(variants.paths[kind.model], rope_scaling=None)
        assert reference(unscaled, texts[0], NEW) != reference(local, texts[0], NEW)


# --- bf16 ---------------------------------------------------------------------------------------------------------


def test_bf16_differs_from_the_host_by_rounding_only(variants: Variants, record_property: Any) -> None:
    """Rounding decides near ties only: at the first difference, both tokens are as good as bf16 can tell.

    Judged by the same weights in fp32. `margin`: difference between the logits of the two tokens; `noise`: largest
    error of a logit when local transformers compute in bf16.
    """
    path = variants.paths[BF16.model]
    exact, rounded = load(path, torch.bfloat16).float(), load(path, torch.bfloat16)
    texts = prompts(10, VOCAB, seed=32)
    differences: list[tuple[float, float]] = []
    with variants.client(BF16, SUFFIX, dtype=torch.bfloat16) as model:
        for ids in texts:
            respec(model, mode="off", strict=False)
            host = decode(model, ids, NEW, do_sample=False)
            assert model.last_stats is None
            scripted = partial(Knowing, [[*ids, *host]], VOCAB, TREE)
            for changes in ({"speculate": False}, {"drafter": scripted}):
                respec(model, mode="ring", strict=True, **{"speculate": True, **changes})
                ours = decode(model, ids, NEW)
                assert len(ours) == NEW
                at = next((i for i in range(NEW) if ours[i] != host[i]), None)
                if at is not None:
                    prefix = torch.tensor([[*ids, *host[:at]]])
                    with torch.inference_mode():
                        logits, noisy = exact(prefix).logits[0, -1], rounded(prefix).logits[0, -1].float()
                    margin = abs(float(logits[ours[at]] - logits[host[at]]))
                    differences.append((margin, float((noisy - logits).abs().max())))
    margins = [margin for margin, _ in differences]
    record_property("bf16_margins", margins)
    assert all(margin <= 2 * noise for margin, noise in differences), differences
    assert not margins or median(margins) < 0.15, margins  # logits have a standard deviation of 3


# --- quantised blocks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.options["quant_type"])
def test_quantised_blocks_are_left_to_the_host_where_they_cannot_compute(variants: Variants, kind: Kind) -> None:
    """The host loads them anywhere, but old layers of bitsandbytes need CUDA. Its server comes up, ours steps back."""
    if quantised_layers_compute():
        pytest.skip("quantised blocks compute here: tests/test_quantised.py")
    (server,) = variants.servers(kind)
    backend = server.module_container.module_backends[f"{kind.prefix}.0"]
    with pytest.raises((AssertionError, RuntimeError)), torch.inference_mode():
        backend.module(torch.zeros(1, 1, 96))  # the host alone, without any of our code
    assert server.module_container.spec is None
    assert server.module_container.is_healthy()
    reasons = [line for line in variants.log if "cannot serve these blocks" in line]
    assert len(reasons) == len(QUANTISED) and all("a trial forward" in line for line in reasons)


# --- limits -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(variants: Variants) -> Iterator[Any]:
    with variants.client(WIDE, SUFFIX) as model:
        yield model


def test_bytes_of_the_clients_link(variants: Variants, wide: Any) -> None:
    """Token ids of a real vocabulary: at most 8 bytes per candidate up, 16 per committed token down.

    A drafter of which nothing is ever accepted is soon asked for single candidates, and a frame has a size of its own.
    """
    vocab = wide.config.vocab_size
    local = load(variants.paths[WIDE.model])
    texts = prompts(3, vocab, length=30, seed=33)
    known = [[*ids, *reference(local, ids, NEW)] for ids in texts]
    scripts = [Script(0.9), Script(0.5, depth=8), TREE, Script(1.0), Script(0.9, hostility=Hostility.RANDOM)]
    for script in (None, *scripts):
        hopeless = script is not None and script.hostility is Hostility.RANDOM
        respec(wide, drafter="suffix" if script is None else partial(Knowing, known, vocab, script))
        for ids, text in zip(texts, known):
            assert decode(wide, ids, NEW) == text[len(ids) :]
            stats = wide.last_stats
            assert script is None or stats.proposed > 0
            assert stats.candidate_bytes_up <= (16 if hopeless else 8) * stats.proposed, script
            assert stats.commit_bytes_down <= 16 * stats.tokens, script
            assert stats.candidate_bytes_up <= stats.bytes_up and stats.commit_bytes_down <= stats.bytes_down


@pytest.mark.parametrize("new", [1, 2, 5])
def test_a_prompt_that_ends_just_below_the_servers_limit(variants: Variants, wide: Any, new: int) -> None:
    vocab = wide.config.vocab_size
    (ids,) = prompts(1, vocab, length=LONGEST - new, seed=34)
    target = reference(load(variants.paths[WIDE.model]), ids, new)
    beyond = [*ids, *target, *range(100)]  # the drafter goes on behind the end
    for script in (Script(1.0), Script(0.5, siblings=(0.3, 0.1), depth=16)):
        respec(wide, drafter=partial(Knowing, [beyond], vocab, script))
        assert decode(wide, ids, new) == target


def test_a_call_beyond_the_servers_limit_is_refused(wide: Any) -> None:
    respec(wide, mode="ring")
    try:
        with pytest.raises(UnsupportedCall, match=f"{LONGEST + 1} tokens"):
            decode(wide, [1] * LONGEST, 1)
    finally:
        respec(wide, mode="auto")
