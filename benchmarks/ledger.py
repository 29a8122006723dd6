"""Every byte of one generation, by link, direction and kind; what libp2p adds; and the planner's model of it.

The stages and the client count their frames by kind (`bloombee_spec.wire.ledger`), the relays of the emulated WAN
count what crosses them. On the client's links nothing else is under way while it decodes, so there the difference is
what libp2p adds to a frame. What is left on other links is the host's DHT, and opening streams.

    python -m benchmarks.ledger --codec auto --mbps 10
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.compare import FIRST, SPEC_SERVER, add_swarm_arguments, choose_prompts, make_jobs, wan_shape
from benchmarks.drafters import make_drafter_factory
from benchmarks.ledger_relay import STRANGER, Party, carried
from benchmarks.runner import Job
from benchmarks.smollm2 import ensure_smollm2
from benchmarks.swarm import LocalSwarm, split_blocks
from bloombee_spec.plan.route import Leg, Route
from bloombee_spec.wire.ledger import CLIENT_END, Traffic, Way, from_wire

KINDS = ("ids", "rows", "commits", "control", "headers")
TOLERANCE = 0.02
QUIET = ("--update_period", "120")  # seconds between announcements, which would fill the links
FIRST_TOKENS = 4  # decoded while streams open
SETTLE_S = 1.0  # for frames that are on their way
STRANGE_BYTES = 2000  # of the bootstrap peer's own, in one run


@dataclass(frozen=True)
class Line:
    """One direction of one link.

    :param relay: bytes that the relays carried; `libp2p` what it added to the frames
    :param model: bytes that the planner expects for the frames without control; None where it expects nothing
    :param modelled: the bytes that `model` is about, libp2p's share included
    """

    source: str
    target: str
    traffic: Traffic
    relay: int
    libp2p: float
    model: float | None = None
    modelled: float | None = None

    @property
    def rest(self) -> float:
        return self.relay - self.traffic.bytes - self.libp2p

    @property
    def error(self) -> float | None:
        return None if self.model is None or not self.modelled else self.model / self.modelled - 1.0


@dataclass(frozen=True)
class Run:
    """What one generation left: the ledgers of all parties, the bytes at the relays, the route as the planner saw it.

    :param libp2p_per_frame: bytes, as found on the client's links
    :param decoding: of the client's links only what came after the prompt, for which the planner has no model
    """

    text: tuple[int, ...]
    seconds: float
    sent: Mapping[tuple[Party, Party], Traffic]
    received: Mapping[tuple[Party, Party], Traffic]
    relay: Mapping[tuple[Party, Party], int]
    libp2p_per_frame: float
    decoding: Mapping[tuple[Party, Party], Traffic]
    route: Route
    codecs: tuple[str, ...]


def generate(swarm: LocalSwarm, model: Any, job: Job) -> Run:
    """One generation in a session of its own, in two calls: the first one opens all streams."""
    inputs = torch.tensor([job.ids])
    options = {"do_sample": False}
    before = carried(swarm)
    with model.inference_session(max_length=len(job.ids) + job.new_tokens) as session:
        first = model.generate(inputs, max_new_tokens=FIRST_TOKENS, **options)
        time.sleep(SETTLE_S)
        opened, open_relay = client_traffic(session), carried(swarm)
        began = time.monotonic()
        more = model.generate(None, max_new_tokens=job.new_tokens - FIRST_TOKENS, **options)
        seconds = time.monotonic() - began
        route, codecs = session._ring.meter.route, session._ring.codecs.used
        time.sleep(SETTLE_S)
        decoding = {link: minus(now, opened[link]) for link, now in client_traffic(session).items()}
        per_frame = libp2p_per_frame(decoding, open_relay, carried(swarm))
        stages = session.close()
    after = carried(swarm)
    ledgers: dict[Party, dict[Way, Traffic]] = {CLIENT_END: from_wire(session.traffic)}
    for index, statistics in enumerate(stages):
        if statistics is None:
            raise RuntimeError(f"stage {index} did not say what it counted")
        ledgers[index] = from_wire(statistics.traffic)
    sent, received = by_link(ledgers)
    relay = {link: size - before.get(link, 0) for link, size in after.items()}
    strange = sum(size for link, size in relay.items() if STRANGER in link)
    assert strange <= STRANGE_BYTES, f"{strange} bytes of connections whose owner is not known"
    text = (*first[0, len(job.ids) :].tolist(), *more[0].tolist())
    return Run(text, seconds, sent, received, relay, per_frame, decoding, route, tuple(codecs))


def client_traffic(session: Any) -> dict[tuple[Party, Party], Traffic]:
    """Of the client's streams so far, by source and target."""
    return {
        (CLIENT_END, way.other) if way.outgoing else (way.other, CLIENT_END): replace(traffic)
        for way, traffic in session._ring.ledger.entries.items()
    }


def minus(now: Traffic, before: Traffic) -> Traffic:
    return Traffic(*[a - b for a, b in zip(astuple(now), astuple(before))])


def libp2p_per_frame(
    decoding: Mapping[tuple[Party, Party], Traffic], before: Mapping[Any, int], after: Mapping[Any, int]
) -> float:
    """Over the links to the first stage and from the last one, which carry many frames.

    :param before: bytes at the relays when `decoding` began
    """
    last = max(max(link) for link in decoding)
    links = ((CLIENT_END, 0), (last, CLIENT_END))
    beyond = sum(after[link] - before[link] - decoding[link].bytes for link in links)
    return beyond / sum(decoding[link].frames for link in links)


def by_link(
    ledgers: Mapping[Party, Mapping[Way, Traffic]],
) -> tuple[dict[tuple[Party, Party], Traffic], dict[tuple[Party, Party], Traffic]]:
    """By source and target: what sources counted, and what targets did."""
    sent: dict[tuple[Party, Party], Traffic] = {}
    received: dict[tuple[Party, Party], Traffic] = {}
    for party, ways in ledgers.items():
        for way, traffic in ways.items():
            side, link = (sent, (party, way.other)) if way.outgoing else (received, (way.other, party))
            side[link] = side.get(link, Traffic()).plus(traffic)
    return sent, received


def legs(route: Route) -> dict[tuple[Party, Party], tuple[Leg, str]]:
    """What the planner knows of each link: the leg, and what its rows are."""
    last = len(route.stages) - 1
    found = {(CLIENT_END, 0): (route.uplink, "n_ids"), (last, CLIENT_END): (route.downlink, "n_commits")}
    found.update({(i, i + 1): (hop, "n_rows") for i, hop in enumerate(route.hops)})
    if route.restart is not None and last:
        found[last, 0] = (route.restart, "n_commits")
    return found


def lines_of(run: Run) -> list[Line]:
    lines = []
    known = legs(run.route)
    for link in sorted(run.sent, key=lambda link: (link[0] % 100, link[1])):
        source, target = link
        traffic = run.sent[link]
        model = modelled = None
        if link in known:
            leg, counted = known[link]
            part = run.decoding.get(link, traffic)
            frames = part.frames - part.messages
            model = frames * leg.frame_bytes + getattr(part, counted) * leg.row_bytes
            headers = part.headers * frames / part.frames + run.libp2p_per_frame * frames
            modelled = part.ids + part.rows + part.commits + headers
        libp2p = run.libp2p_per_frame * traffic.frames
        lines.append(Line(name(source), name(target), traffic, run.relay[link], libp2p, model, modelled))
    return lines


def name(party: Party) -> str:
    return "client" if party == CLIENT_END else f"stage {party}"


def table(lines: Sequence[Line]) -> str:
    head = ("from", "to", "frames", *KINDS, "sum", "libp2p", "overhead", "relay", "rest", "model", "error")
    rows = []
    for line in lines:
        traffic = line.traffic
        rows.append(
            (
                line.source, line.target, traffic.frames, *[getattr(traffic, kind) for kind in KINDS], traffic.bytes,
                f"{line.libp2p:.0f}", f"{line.libp2p / traffic.bytes:.1%}", line.relay, f"{line.rest:.0f}",
                "-" if line.model is None else f"{line.model:.0f}",
                "-" if line.error is None else f"{line.error:+.1%}",
            )
        )  # fmt: skip
    return report.aligned(head, rows, rule=True)


def total_error(lines: Sequence[Line]) -> float:
    """Of the planner's model, all links that it knows together."""
    known = [line for line in lines if line.model is not None]
    return sum(line.model or 0.0 for line in known) / sum(line.modelled or 0.0 for line in known) - 1.0


def plot(lines: Sequence[Line], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 0.5 + 0.35 * len(lines)), layout="constrained")
    labels = [f"{line.source} → {line.target}" for line in lines]
    left = [0.0] * len(lines)
    parts = [(kind, [float(getattr(line.traffic, kind)) for line in lines]) for kind in KINDS]
    parts.append(("libp2p", [line.libp2p for line in lines]))
    for kind, sizes in parts:
        shares = [100 * size / (line.traffic.bytes + line.libp2p) for size, line in zip(sizes, lines)]
        axes.barh(labels, shares, left=left, label=kind)
        left = [a + b for a, b in zip(left, shares)]
    axes.invert_yaxis()
    axes.set_xlabel("% of the link's bytes")
    axes.legend(fontsize=8, ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def measure(swarm: LocalSwarm, job: Job, codec: str, acceptance: float) -> Iterator[tuple[str, Run]]:
    """Plain decoding first, then with a scripted drafter that replays its text."""
    from bloombee_spec import AutoDistributedSpecModelForCausalLM, SpecConfig

    plain = SpecConfig(strict=True, codec=codec, speculate=False)
    model = AutoDistributedSpecModelForCausalLM.from_pretrained(
        str(swarm.model), initial_peers=swarm.initial_peers, dht_prefix=swarm.dht_prefix, torch_dtype=torch.float32,
        show_route=False, spec=plain,
    )  # fmt: skip
    try:
        generate(swarm, model, Job("warm-up", job.ids[:8], 2 * FIRST_TOKENS))
        first = generate(swarm, model, job)
        yield "plain", first
        target = {"ids": job.ids, "target": first.text, "vocab_size": model.config.vocab_size}
        script = make_drafter_factory({"acceptance": acceptance, "siblings": (0.1,), "depth": 16}, target)
        model.attach(model._spec_host, SpecConfig(strict=True, codec=codec, drafter=script))
        run = generate(swarm, model, job)
        assert run.text == first.text, "speculation changed the text"
        yield f"scripted(h={acceptance:g})", run
    finally:
        model.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_swarm_arguments(parser)
    parser.add_argument("--codec", default="auto", help="activation codec of all links (default auto)")
    parser.add_argument("--acceptance", type=float, default=0.8, help="of the scripted drafter (default 0.8)")
    parser.add_argument("--name", default="ledger", help="of the files in benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = args.model or ensure_smollm2()
    chosen = [prompt for prompt in choose_prompts(1) if prompt.name == FIRST["chat"]]
    [job] = make_jobs(path, chosen, args.new_tokens)
    n_blocks = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    document: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(args).items()}}
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="bloombee-spec-") as work_dir:
        print(f"starting {args.stages} servers …", flush=True)
        with LocalSwarm(
            path, split_blocks(n_blocks, args.stages), work_dir=work_dir, wan=wan_shape(args),
            server_command=SPEC_SERVER, extra_args=QUIET,
        ) as swarm:  # fmt: skip
            for method, run in measure(swarm, job, args.codec, args.acceptance):
                lines = lines_of(run)
                print(f"\n{method}, {len(run.text)} tokens in {run.seconds:.1f} s, codecs {', '.join(run.codecs)}")
                print(f"libp2p adds {run.libp2p_per_frame:.1f} bytes to a frame\n\n{table(lines)}")
                print(f"model against all links that it knows: {total_error(lines):+.2%}", flush=True)
                worst = max(worst, abs(total_error(lines)))
                document[method] = {
                    "libp2p_per_frame": run.libp2p_per_frame,
                    "lines": [{**asdict(line), "error": line.error} for line in lines],
                }
    written = report.write(args.name, document)
    plot(lines, written.with_suffix(".png"))
    print(f"\n{written} and {written.with_suffix('.png')}")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
