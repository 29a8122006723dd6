"""`bloombee-spec generate`: text of a model that a swarm serves, shown as it is committed."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bloombee_spec.cli.client_options import add_client_arguments, connect

INTERRUPTED = 130
MAX_PROMPT_BYTES = 16 << 20


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="generate text with a model that a swarm serves",
        description="Streams the text to standard output; figures go to standard error where that is a terminal.",
    )
    add_client_arguments(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", metavar="FILE", help="a file that holds the prompt; - is standard input")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message to a chat model")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: a system message before it")
    sampling = parser.add_argument_group("decoding")
    sampling.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="at most (default 128)")
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default 0)")
    sampling.add_argument("--top-p", type=float, default=1.0, help="(default 1, off)")
    sampling.add_argument("--top-k", type=int, default=0, help="(default 0, off)")
    sampling.add_argument("--repetition-penalty", type=float, help="(default: the checkpoint's own)")
    sampling.add_argument("--seed", type=int, help="of the sampling noise (default: a new one each time)")
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the text; may be repeated")
    parser.add_argument("--json", action="store_true", help="one JSON object at the end instead of text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from bloombee_spec.api.errors import ApiError
    from bloombee_spec.cli.report import fail
    from bloombee_spec.client.relay import RelayError
    from bloombee_spec.client.routing import NoPluginRoute
    from bloombee_spec.client.stage_link import RingError
    from bloombee_spec.hosts.base import HostError, NoRoute

    model = None
    try:
        with _noted_ctrl_c() as pressed:
            job = _job(args)
            model, tokenizer = connect(args)
            _generate(model, tokenizer, job, args, pressed)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the text has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERRUPTED
    except (ApiError, HostError, NoRoute, NoPluginRoute, RingError, RelayError, OSError, ValueError) as e:
        return fail(str(e))
    finally:
        if model is not None:
            model.close()
    return INTERRUPTED if pressed.is_set() else 0


@contextmanager
def _noted_ctrl_c() -> Iterator[threading.Event]:
    """Ctrl-C raises as ever, and is remembered: an exception in a destructor or a library's callback can get lost."""
    pressed = threading.Event()

    def interrupt(*_: Any) -> None:
        pressed.set()
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # where no handler can be set
        yield pressed
        return
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _job(args: argparse.Namespace) -> Any:
    """
    :raises ValueError: a value is out of range
    """
    from bloombee_spec.api.job import Job

    for name, low, high in (
        ("max_new_tokens", 1, 1 << 20), ("temperature", 0, 100), ("top_p", 0, 1), ("top_k", 0, 1 << 24),
        ("repetition_penalty", 0.01, 100), ("seed", 0, 2**63 - 1),
    ):  # fmt: skip
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, expected {low} to {high}")
    if args.system is not None and not args.chat:
        raise ValueError("--system goes with --chat")
    if "" in args.stop:
        raise ValueError("--stop needs a text")
    text = args.prompt if args.prompt_file is None else _read(args.prompt_file)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages = (*system, {"role": "user", "content": text}) if args.chat else None
    return Job(
        text=None if args.chat else text, messages=messages, max_tokens=args.max_new_tokens,
        temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, seed=args.seed,
        repetition_penalty=args.repetition_penalty, stop=tuple(args.stop),
    )  # fmt: skip


def _read(file: str) -> str:
    if file == "-":
        data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    else:
        with Path(file).open("rb") as opened:
            data = opened.read(MAX_PROMPT_BYTES + 1)
    if len(data) > MAX_PROMPT_BYTES:
        raise ValueError(f"{file} is longer than {MAX_PROMPT_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"{file} is not UTF-8: {e}") from None


def _generate(model: Any, tokenizer: Any, job: Any, args: argparse.Namespace, pressed: threading.Event) -> None:
    from bloombee_spec.api.generation import Generation
    from bloombee_spec.api.job import Limits
    from bloombee_spec.cli.live import LiveLine

    generation = Generation(model, tokenizer, job, Limits(max_length=1 << 24))
    text = ""
    with closing(generation), LiveLine() as live:
        live.show("opening a session, reading the prompt …")
        started = time.perf_counter()
        for piece in generation:
            if pressed.is_set():
                raise KeyboardInterrupt
            text += piece.text
            if not args.json:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
            live.show(_progress(generation.tokens, generation.laps, time.perf_counter() - started))
    if args.json:
        _print_json(generation, text)
        return
    print(flush=True)
    stats = generation.stats
    if live.active and stats is not None:
        figures = f"{stats.laps} laps, {stats.acceptance:.0%} drafted, {stats.mode} over {len(stats.route)} stages"
        print(f"[{_progress(generation.tokens, stats.laps, generation.seconds)}; {figures}]", file=sys.stderr)


def _progress(tokens: int, laps: int, seconds: float) -> str:
    speed = f"{tokens / seconds:.1f} tok/s" if seconds > 0 else "- tok/s"
    return f"{tokens} tokens, {speed}" + (f", {tokens / laps:.2f} accepted per lap" if laps else "")


def _print_json(generation: Any, text: str) -> None:
    (choice,), stats = generation.choices, generation.stats
    report = {
        "text": text,
        "ids": choice.ids,
        "finish_reason": choice.finish,
        "prompt_tokens": len(generation.prompt),
        "tokens": generation.tokens,
        "laps": generation.laps,
        "tokens_per_lap": generation.tokens / generation.laps if generation.laps else None,
        "seconds": generation.seconds,
        "tok_s": generation.tokens / generation.seconds if generation.seconds > 0 else None,
        "stats": None if stats is None else asdict(stats),
    }
    print(json.dumps(report, ensure_ascii=False))
