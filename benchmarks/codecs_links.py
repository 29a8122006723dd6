"""Tokens per second by codec on links of several speeds: one swarm, one client, the codecs taking turns.

Turns, so that whatever else the machine does meets all of them; the figure is the median of each codec's rate against
that of `raw` in the same turn.

    python -m benchmarks.codecs_links --mbps 10 20 1000 --codecs auto lossless int8 tah4
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.compare import FIRST, LOSSY, SPEC_SERVER, choose_prompts, make_jobs
from benchmarks.drafters import make_drafter_factory
from benchmarks.ledger import QUIET
from benchmarks.runner import Job
from benchmarks.smollm2 import ensure_smollm2
from benchmarks.swarm import LocalSwarm, split_blocks
from benchmarks.wan import LinkShape

SCRIPT: dict[str, Any] = {"acceptance": 0.8, "siblings": (0.1,), "depth": 16}


@dataclass(frozen=True)
class Turn:
    """One generation. `identical` compares it with plain decoding through raw rows."""

    mbps: float
    codec: str
    turn: int
    prefill_s: float
    decode_s: float
    tokens: int
    row_bytes: float
    laps: int
    used: tuple[str, ...]
    identical: bool

    @property
    def rate(self) -> float:
        """Tokens per second, the prompt's time included: it crosses the same links."""
        return self.tokens / (self.prefill_s + self.decode_s)


class Bench:
    """A client of a running swarm, to be asked for one codec after the other."""

    def __init__(self, swarm: LocalSwarm, job: Job):
        from bloombee_spec import AutoDistributedSpecModelForCausalLM, SpecConfig

        self.swarm, self.job = swarm, job
        self._script: dict[str, Any] = {"ids": job.ids}
        self._drafter = make_drafter_factory(SCRIPT, self._script)
        self.model = AutoDistributedSpecModelForCausalLM.from_pretrained(
            str(swarm.model), initial_peers=swarm.initial_peers, dht_prefix=swarm.dht_prefix,
            torch_dtype=torch.float32, show_route=False, spec=SpecConfig(strict=True, codec="raw", speculate=False),
        )  # fmt: skip
        self.text = self._generate()
        self._script.update(target=self.text, vocab_size=self.model.config.vocab_size)

    def set_speed(self, mbps: float, delay_s: float) -> None:
        assert self.swarm.relays is not None
        shape = LinkShape(delay_s=delay_s, bits_per_s=mbps * 1e6)
        for index in range(len(self.swarm.servers)):
            self.swarm.relays.set_shape(index, shape, shape)

    def turn(self, mbps: float, codec: str, turn: int) -> Turn:
        from bloombee_spec import SpecConfig

        config = SpecConfig(strict=True, codec=codec, drafter=self._drafter)
        self.model.attach(self.model._spec_host, config)
        text = self._generate()
        stats = self.model.last_stats
        hops = [stage.traffic for stage in stats.stages if stage is not None]
        return Turn(
            mbps, codec, turn, stats.prefill_s, stats.decode_s, len(text), _bytes_per_row(hops), stats.laps,
            tuple(stats.codecs[1:-1]), text == self.text,
        )  # fmt: skip

    def _generate(self) -> tuple[int, ...]:
        ids = torch.tensor([self.job.ids])
        out = self.model.generate(ids, max_new_tokens=self.job.new_tokens, do_sample=False)
        return tuple(out[0, len(self.job.ids) :].tolist())


def _bytes_per_row(stages: Sequence[tuple[int, ...]]) -> float:
    """Of all rows that stages received."""
    from bloombee_spec.wire.ledger import from_wire

    ways = [traffic for numbers in stages for way, traffic in from_wire(numbers).items() if not way.outgoing]
    return sum(way.rows for way in ways) / max(1, sum(way.n_rows for way in ways))


def table(turns: Sequence[Turn]) -> str:
    head = ("Mbit/s", "codec", "tok/s", "x raw", "bytes per row", "laps", "prompt, s", "used", "same text")
    rows = []
    for mbps, codec in dict.fromkeys((turn.mbps, turn.codec) for turn in turns):
        own = [turn for turn in turns if (turn.mbps, turn.codec) == (mbps, codec)]
        rows.append(
            (
                f"{mbps:g}", codec, f"{statistics.median(turn.rate for turn in own):.2f}", f"{ratio(turns, own):.3f}",
                f"{statistics.median(turn.row_bytes for turn in own):.0f}",
                f"{statistics.median(turn.laps for turn in own):g}",
                f"{statistics.median(turn.prefill_s for turn in own):.2f}", " ".join(own[-1].used),
                "yes" if all(turn.identical for turn in own) else "no",
            )
        )  # fmt: skip
    return report.aligned(head, rows, rule=True)


def ratio(turns: Sequence[Turn], own: Sequence[Turn]) -> float:
    """Median over turns of the rate against raw's in the same turn."""
    raw = {(turn.mbps, turn.turn): turn.rate for turn in turns if turn.codec == "raw"}
    return statistics.median(turn.rate / raw[turn.mbps, turn.turn] for turn in own)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbps", type=float, nargs="+", default=[10.0, 20.0, 1000.0], help="of every link")
    parser.add_argument("--codecs", nargs="+", default=["auto", "lossless", "int8", "tah4"], help="beside raw")
    parser.add_argument("--turns", type=int, default=3, help="generations of each codec at each speed (default 3)")
    parser.add_argument("--stages", type=int, default=4, help="servers (default 4)")
    parser.add_argument("--delay-ms", type=float, default=25.0, help="one-way delay of every link (default 25)")
    parser.add_argument("--new-tokens", type=int, default=40, help="tokens per generation (default 40)")
    parser.add_argument("--name", default="codecs-links", help="of the file in benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = ensure_smollm2()
    [job] = make_jobs(path, [p for p in choose_prompts(1) if p.name == FIRST["chat"]], args.new_tokens)
    n_blocks = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    turns: list[Turn] = []
    with tempfile.TemporaryDirectory(prefix="bloombee-spec-") as work_dir:
        print(f"starting {args.stages} servers …", flush=True)
        with LocalSwarm(
            path, split_blocks(n_blocks, args.stages), work_dir=Path(work_dir), server_command=SPEC_SERVER,
            wan=LinkShape(delay_s=args.delay_ms / 1e3), extra_args=QUIET,
        ) as swarm:  # fmt: skip
            bench = Bench(swarm, job)
            try:
                for mbps in args.mbps:
                    bench.set_speed(mbps, args.delay_ms / 1e3)
                    for turn in range(-1, args.turns):  # the first one learns the links
                        for codec in ("raw", *args.codecs) if turn >= 0 else ("raw", "auto"):
                            turns += [bench.turn(mbps, codec, turn)]
                            print(turns[-1], flush=True)
            finally:
                bench.model.close()
    turns = [turn for turn in turns if turn.turn >= 0]
    document: dict[str, object] = {
        "settings": {k: str(v) for k, v in vars(args).items()},
        "turns": [asdict(turn) for turn in turns],
    }
    print(f"\n{table(turns)}\n\n{report.write(args.name, document)}")
    return 0 if all(turn.identical for turn in turns if turn.codec not in LOSSY) else 1


if __name__ == "__main__":
    sys.exit(main())
