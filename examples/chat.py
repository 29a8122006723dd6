"""Chat with a model that a swarm serves: one session for the whole conversation, words shown as they arrive.

    python examples/chat.py MODEL --initial-peers /ip4/…/p2p/… [--dht-prefix PREFIX]

An empty line, Ctrl-D or Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoTokenizer, TextStreamer

from bloombee_spec import AutoDistributedSpecModelForCausalLM, SpecConfig


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="checkpoint with a chat template: directory or hub name")
    parser.add_argument("--initial-peers", nargs="+", required=True, metavar="ADDRESS", help="peers of the swarm")
    parser.add_argument("--dht-prefix", help="name of the model in the swarm, where it is not the checkpoint's own")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of the whole conversation (default 2048)")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens of one answer, at most (default 256)")
    args = parser.parse_args()
    if not 0 < args.new_tokens < args.max_length:
        parser.error("--new-tokens has to be positive, and less than --max-length")
    return args


def questions() -> Iterator[str]:
    while True:
        try:
            question = input("\n> ")
        except (EOFError, KeyboardInterrupt):
            return
        if not question.strip():
            return
        yield question


def chat(model: Any, tokenizer: Any, args: argparse.Namespace) -> None:
    messages: list[dict[str, str]] = []
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    # The servers keep the conversation's KV for as long as this session is open.
    with model.inference_session(max_length=args.max_length) as session:
        for question in questions():
            messages.append({"role": "user", "content": question})
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            room = args.max_length - ids.shape[1]
            if room <= 0:
                print(f"The conversation has {ids.shape[1]} tokens, and the session room for {args.max_length}.")
                return
            # A template may write the past in another way than it was generated. Setting the history costs nothing
            # where it agrees with what the servers hold: only what differs, and what follows it, is computed again.
            session.output_ids = ids
            answer = model.generate(None, max_new_tokens=min(args.new_tokens, room), streamer=streamer)
            messages.append({"role": "assistant", "content": tokenizer.decode(answer[0], skip_special_tokens=True)})
            stats = model.last_stats
            print(f"[{stats.tokens} tokens in {stats.laps} laps, {stats.acceptance:.0%} of them drafted]")


def main() -> None:
    args = parse()
    prefix = {"dht_prefix": args.dht_prefix} if args.dht_prefix else {}
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoDistributedSpecModelForCausalLM.from_pretrained(
        args.model, initial_peers=args.initial_peers, torch_dtype=torch.float32, spec=SpecConfig(strict=True), **prefix
    )
    try:
        chat(model, tokenizer, args)
    except KeyboardInterrupt:  # in the middle of an answer
        print()
    finally:
        model.close()


if __name__ == "__main__":
    main()
