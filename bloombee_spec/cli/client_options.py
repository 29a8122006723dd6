"""Options of commands that are clients of a swarm, and what is made of them."""

from __future__ import annotations

import argparse
from typing import Any

from bloombee_spec.config import MODES, SpecConfig

DTYPES = ("float32", "bfloat16", "float16")


def add_client_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="checkpoint: directory or hub name")
    swarm = parser.add_argument_group("swarm")
    swarm.add_argument("--initial-peers", nargs="+", required=True, metavar="ADDRESS", help="peers of the swarm")
    swarm.add_argument("--dht-prefix", help="name of the model in the swarm, where it is not the checkpoint's own")
    swarm.add_argument("--tokenizer", help="directory or hub name, where it is not MODEL")
    swarm.add_argument("--dtype", choices=DTYPES, default="float32", help="of the client's own part (default float32)")
    spec = parser.add_argument_group("speculation")
    spec.add_argument("--drafter", default="suffix", help="suffix, none, model:PATH, mix:A+B, … (default suffix)")
    spec.add_argument("--no-spec", action="store_true", help="one token per lap, for comparison; same tokens")
    spec.add_argument("--mode", choices=MODES, default="auto", help="see SpecConfig.mode (default auto)")


def connect(args: argparse.Namespace, **spec: Any) -> tuple[Any, Any]:
    """The model on the swarm and its tokenizer.

    :param spec: further fields of `SpecConfig`
    :raises HostError: no supported host
    :raises OSError: the checkpoint or its tokenizer cannot be read; `ValueError` alike
    """
    from bloombee_spec.hosts.base import load_host

    load_host()  # says what is missing before anything is loaded
    import torch
    from transformers import AutoTokenizer

    from bloombee_spec.client.model import AutoDistributedSpecModelForCausalLM

    config = SpecConfig(drafter=args.drafter, speculate=not args.no_spec, mode=args.mode, **spec)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.model)
    prefix = {"dht_prefix": args.dht_prefix} if args.dht_prefix else {}
    model = AutoDistributedSpecModelForCausalLM.from_pretrained(
        args.model, initial_peers=args.initial_peers, torch_dtype=getattr(torch, args.dtype), show_route=False,
        spec=config, **prefix,
    )  # fmt: skip
    return model, tokenizer
