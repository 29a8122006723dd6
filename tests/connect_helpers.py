"""Clients of any swarm, in this process, on chosen servers and for any checkpoint of the swarm."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bloombee_spec import AutoDistributedSpecModelForCausalLM, SpecConfig

THREAD_LIMIT_S = 240.0


@contextmanager
def connect(
    model: Path | str,
    initial_peers: Sequence[str],
    dht_prefix: str,
    spec: SpecConfig,
    *,
    peers: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> Iterator[Any]:
    """:param peers: base58 ids of the servers that may be used; None: all of them"""
    client = AutoDistributedSpecModelForCausalLM.from_pretrained(
        str(model), initial_peers=list(initial_peers), dht_prefix=dht_prefix, torch_dtype=dtype, show_route=False,
        allowed_servers=None if peers is None else list(peers), max_retries=2, spec=spec, **kwargs,
    )  # fmt: skip
    try:
        yield client
    finally:
        client.close()


def at_once(*tasks: Callable[[], Any]) -> list[Any]:
    """Results of tasks that run in a thread each; the first error is raised here."""
    results: list[Any] = [None] * len(tasks)
    errors: list[BaseException] = []
    together = threading.Barrier(len(tasks))

    def run(index: int, task: Callable[[], Any]) -> None:
        try:
            together.wait(THREAD_LIMIT_S)
            results[index] = task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(tasks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(THREAD_LIMIT_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), f"not done within {THREAD_LIMIT_S:.0f} s"
    return results
