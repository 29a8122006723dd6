"""Server configuration: one dataclass, and the command-line flags made from it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import Any

HEADS = ("auto", "none", "embed", "lm_head", "both")


@dataclass(frozen=True)
class SpecServerConfig:
    """What a server offers to plugin clients. Every limit is per server process."""

    heads: str = "auto"
    """auto, none, embed, lm_head or both: which of the model's ends to load beside the blocks. `auto` loads the
    embeddings with the first
    block and the norm + LM head with the last one."""
    max_sessions: int = 64
    """Open plugin sessions; one more is refused."""
    max_lanes: int = 32
    """Streams (batch rows) in one session."""
    max_arena: int = 256
    """Live candidates of one stream in the KV cache (credits granted to a client)."""
    max_rows: int = 0
    """Rows in one forward, beyond which candidates wait for the next one, so that a committed token never waits for
    long. 0: as many as take at
    most 2.5 times as long as one row, by measurement at start."""
    max_prefill: int = 256
    """Prompt tokens in one chunk."""
    idle_timeout: float = 300.0
    """Seconds without any frame from the client after which a session is closed."""
    alloc_timeout: float = 60.0
    """Longest wait for KV cache memory, in seconds."""
    park_timeout: float = 10.0
    """Seconds for which the KV of a session that lost a neighbour is kept, so that the client can go on with it."""
    leave_timeout: float = 20.0
    """Longest time, in seconds, for which a server that is told to stop goes on serving, so that sessions can move."""
    transfer_mbps: float = 1000.0
    """Mbit/s that KV and rows may take together while other servers are prepared with them."""
    log_mib: int = 256
    """Memory for output rows of committed tokens, in MiB: from them a new next stage rebuilds its KV."""
    log_disk_mib: int = 1024
    """Disk for such rows when the memory is used up, in MiB."""
    max_outbox: int = 64 << 20
    """Bytes queued towards one peer; a peer that reads more slowly than that ends the session."""

    def __post_init__(self) -> None:
        if self.heads not in HEADS:
            raise ValueError(f"heads is {self.heads!r}, expected one of {', '.join(HEADS)}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "heads" and (value < 0 or (value == 0 and field.name != "max_rows")):
                raise ValueError(f"{field.name} is {value}, expected a positive number")

    def wants_embed(self, first_block: bool) -> bool:
        return self.heads in ("embed", "both") or (self.heads == "auto" and first_block)

    def wants_lm_head(self, last_block: bool) -> bool:
        return self.heads in ("lm_head", "both") or (self.heads == "auto" and last_block)


def add_spec_arguments(parser: argparse.ArgumentParser) -> None:
    """One `--spec-…` flag per field of `SpecServerConfig`."""
    docs = _field_docs()
    for field in fields(SpecServerConfig):
        parser.add_argument(
            f"--spec-{field.name.replace('_', '-')}",
            dest=f"spec_{field.name}",
            default=field.default,
            type=type(field.default),
            choices=HEADS if field.name == "heads" else None,
            help=docs[field.name].replace("%", "%%"),
        )


def spec_config_from_args(args: dict[str, Any]) -> SpecServerConfig:
    """Removes the plugin's entries from parsed arguments and returns the configuration they describe."""
    return SpecServerConfig(**{field.name: args.pop(f"spec_{field.name}") for field in fields(SpecServerConfig)})


def _field_docs() -> dict[str, str]:
    """The string below each field, so that flags and dataclass cannot drift apart."""
    import ast
    import inspect
    import textwrap

    body = ast.parse(textwrap.dedent(inspect.getsource(SpecServerConfig))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for node, below in zip(body.body, body.body[1:]):
        if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            assert isinstance(node.target, ast.Name)
            docs[node.target.id] = " ".join(str(below.value.value).split())
    return docs
