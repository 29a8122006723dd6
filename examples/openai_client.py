"""OpenAI's own Python client on a swarm: point it at `bloombee-spec api`, and change nothing else.

    pip install openai
    bloombee-spec api MODEL --initial-peers /ip4/…/p2p/… --model-name swarm
    python examples/openai_client.py --model swarm "Why is the sky blue?"

The text appears as the swarm commits it.
"""

from __future__ import annotations

import argparse

from openai import OpenAI


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="of the server (default %(default)s)")
    parser.add_argument("--model", help="default: the one that the server has")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, help="the same seed gives the same answer, whatever the swarm's timing")
    return parser.parse_args()


def main() -> None:
    args = parse()
    client = OpenAI(base_url=args.url, api_key="none")  # the server asks for no key, the client insists on one
    model = args.model or next(iter(client.models.list())).id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": args.question}],
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:  # leaving this loop and closing the stream ends the generation on the swarm
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n[{chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens]")


if __name__ == "__main__":
    main()
