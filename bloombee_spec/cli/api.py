"""`bloombee-spec api`: a swarm's model behind OpenAI's HTTP API."""

from __future__ import annotations

import argparse
import socket
from typing import Any

from bloombee_spec.cli.client_options import add_client_arguments, connect

GRACE_S = 5  # that answers on their way have after an interrupt


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "api",
        help="an OpenAI-compatible HTTP server for a model that a swarm serves",
        description="Serves /v1/models, /v1/completions and /v1/chat/completions. There is no authentication: "
        "whoever reaches the port may use it.",
    )
    add_client_arguments(parser)
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    http.add_argument("--port", type=int, default=8000, help="(default 8000)")
    http.add_argument("--model-name", help="how clients name the model (default MODEL)")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-running", type=int, default=2, help="requests that generate at a time (default 2)")
    limits.add_argument(
        "--max-waiting", type=int, default=16, help="requests that may wait; more get 429 (default 16)"
    )
    limits.add_argument("--max-length", type=int, default=2048, help="tokens, prompt included (default 2048)")
    limits.add_argument("--max-choices", type=int, default=8, help="largest n (default 8)")
    limits.add_argument("--default-tokens", type=int, default=512, help="chat without max_tokens (default 512)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from bloombee_spec.cli.report import fail, say
    from bloombee_spec.hosts.base import HostError

    try:
        from bloombee_spec.api.app import make_app
        from bloombee_spec.api.server import ApiServer
    except ImportError as e:
        return fail(f"{e}; the server needs pip install 'bloombee-spec[api]'")
    from bloombee_spec.api.job import Limits
    from bloombee_spec.api.service import Service
    from bloombee_spec.api.slots import Slots

    model = None
    try:
        limits = Limits(args.max_length, args.max_choices, args.default_tokens)
        Slots(args.max_running, args.max_waiting)  # complains now, not when the event loop runs
        if not 0 <= args.port < 65536:
            raise ValueError(f"--port is {args.port}, expected 0 to 65535")
        model, tokenizer = connect(args, strict=True)
        name = args.model_name or str(args.model)
        with _listen(args.host, args.port) as listening:
            host = f"[{args.host}]" if ":" in args.host else args.host
            say(f"serving {name!r} at http://{host}:{listening.getsockname()[1]}/v1")
            slots = (args.max_running, args.max_waiting)
            app = make_app(lambda: Service(model, tokenizer, name, limits, Slots(*slots)))
            ApiServer(app, GRACE_S).run(sockets=[listening])
    except KeyboardInterrupt:
        return 0
    except (HostError, OSError, ValueError) as e:
        return fail(str(e))
    finally:
        if model is not None:
            model.close()
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """
    :raises OSError: the address is taken, or not of this machine
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as e:
        raise OSError(f"cannot listen on {host}, port {port}: {e.strerror or e}") from None
