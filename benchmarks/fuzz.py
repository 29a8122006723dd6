"""Bytes that a peer might send, at every decoder: frames, control messages, activation codecs, codecs of a link.

Valid encodings are damaged, and noise is sent as it is. A decoder may decode or refuse with its declared error;
anything else is a failure, and so are more memory than it declares and a second without an answer. Every batch has a
seed of its own, so a failure is seen again with `--target NAME --seed S --batch N`.

    python -m benchmarks.fuzz --inputs 1000000
"""

from __future__ import annotations

import argparse
import random
import resource
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from benchmarks import report
from benchmarks.fuzz_targets import Case, Target, targets

BATCH = 50  # inputs made from one valid encoding
TRACED = 16  # one batch in so many runs under tracemalloc, which is slow
LIMIT_S = 1.0  # for one input, on the clock of this process
NOISE = 0.1  # share of inputs that were never valid
ROOM = 1 << 30  # bytes of address space for all decoders together: what tracemalloc does not see, torch's tensors


class Hang(BaseException):
    """Not an Exception: no decoder may catch it."""


class Failed(Exception):
    """What a decoder did wrong, and how to see it again."""


@dataclass
class Count:
    inputs: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    peak_bytes: int = 0
    peak_share: float = 0.0  # of the declared bound


@dataclass
class Tally:
    counts: dict[str, Count] = field(default_factory=dict)

    @property
    def inputs(self) -> int:
        return sum(count.inputs for count in self.counts.values())

    @property
    def refused(self) -> int:
        return sum(count.refused for count in self.counts.values())


def fuzz(chosen: Sequence[Target], *, seed: int, inputs: int = 0, seconds: float = 0.0, first_batch: int = 0) -> Tally:
    """Goes on until both `inputs` were tried and `seconds` have passed.

    :raises Failed: at the first input that a decoder does not stand
    """
    tally = Tally({target.name: Count() for target in chosen})
    end = time.monotonic() + seconds
    next_batch = dict.fromkeys(tally.counts, first_batch)
    with address_limit(ROOM):
        while tally.inputs < inputs or time.monotonic() < end:
            for target in chosen:
                for _ in range(target.weight):
                    _batch(target, seed, next_batch[target.name], tally.counts[target.name])
                    next_batch[target.name] += 1
    return tally


def _batch(target: Target, seed: int, batch: int, count: Count) -> None:
    rng = random.Random(f"{seed} {target.name} {batch}")
    case = target.make(rng)
    traced = batch % TRACED == 0
    began = time.perf_counter()
    for number in range(BATCH):
        noise = rng.random() < NOISE
        data = rng.randbytes(rng.randrange(len(case.valid) + 4)) if noise else mutated(case.valid, rng)
        data = case.valid if number == 0 else data
        if case.repair is not None and rng.random() < 0.75:
            data = case.repair(data)
        try:
            count.refused += _one(case, data, traced, count)
        except (Exception, Hang) as error:
            raise Failed(
                f"{target.name}: {error!r}\nagain: --target {target.name} --seed {seed} --batch {batch}, "
                f"input {number}: {data[:200].hex()}{'…' if len(data) > 200 else ''}"
            ) from error
    count.inputs += BATCH
    count.seconds += time.perf_counter() - began


def _one(case: Case, data: bytes, traced: bool, count: Count) -> bool:
    """Whether it was refused."""
    refused = False
    with time_limit(LIMIT_S):
        began = time.thread_time()
        if traced:
            tracemalloc.start()
        try:
            case.decode(data)
        except case.error:
            refused = True
        finally:
            if traced:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
        count.slowest_s = max(count.slowest_s, time.thread_time() - began)
    if traced:
        bound = case.bound(len(data))
        count.peak_bytes = max(count.peak_bytes, peak)
        count.peak_share = max(count.peak_share, peak / bound)
        if peak > bound:
            raise MemoryError(f"{peak} bytes for an input of {len(data)}, at most {bound} are declared")
    return refused


def mutated(valid: bytes, rng: random.Random) -> bytes:
    """`valid` with bits flipped, bytes set, inserted, deleted or repeated, or cut off."""
    out = bytearray(valid)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(out) + 1)
        action = rng.randrange(7)
        if action == 0 and out:
            out[at % len(out)] ^= 1 << rng.randrange(8)
        elif action == 1 and out:
            out[at % len(out)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif action == 2:
            del out[at:]
        elif action == 3:
            out[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif action == 4:
            del out[at : at + rng.randrange(1, 9)]
        elif action == 5:
            out[at:at] = out[at : at + rng.randrange(1, 33)]
        else:  # a varint, or a length of msgpack, as large as they come
            out[at : at + 5] = rng.choice((b"\xff\xff\xff\xff\x7f", b"\xc6\xff\xff\xff\xff", b"\xdd\x7f\xff\xff\xff"))
    return bytes(out)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """:raises Hang: the block used more processor time than that; only in the main thread, where signals arrive"""

    def give_up(number: int, frame: object) -> None:
        raise Hang(f"no answer after {seconds:g} s")

    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("inputs are timed by a signal, which only the main thread gets")
    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def address_limit(room: int) -> Iterator[None]:
    """Within it this process may map `room` bytes more than now; an allocation beyond that raises."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        present = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (present + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def table(tally: Tally) -> str:
    head = ("decoder", "inputs", "refused", "inputs/s", "slowest, ms", "most memory, KiB", "of its bound")
    rows = [
        (
            name, count.inputs, f"{count.refused / max(1, count.inputs):.0%}",
            f"{count.inputs / max(1e-9, count.seconds):.0f}", f"{count.slowest_s * 1e3:.1f}",
            f"{count.peak_bytes / 1024:.0f}", f"{count.peak_share:.0%}",
        )
        for name, count in tally.counts.items()
    ]  # fmt: skip
    return report.aligned(head, rows, rule=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=0, help="try at least so many")
    parser.add_argument("--seconds", type=float, default=0.0, help="go on for at least so long")
    parser.add_argument("--seed", type=int, default=None, help="default: of the clock; it is printed")
    parser.add_argument("--target", action="append", help="only this decoder; may be given more than once")
    parser.add_argument("--batch", type=int, default=0, help="begin with this batch, to see a failure again")
    parser.add_argument("--name", default="fuzz", help="of the file in benchmarks/results")
    args = parser.parse_args()
    chosen = [target for target in targets() if args.target is None or target.name in args.target]
    if not chosen:
        parser.error(f"there are the targets {', '.join(target.name for target in targets())}")
    seed = time.time_ns() % 2**32 if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    began = time.monotonic()
    try:
        tally = fuzz(chosen, seed=seed, inputs=args.inputs, seconds=args.seconds, first_batch=args.batch)
    except Failed as failure:
        print(failure)
        return 1
    taken = time.monotonic() - began
    print(table(tally))
    print(f"{tally.inputs} inputs in {taken:.0f} s, {tally.refused} refused, none failed")
    counts = {name: asdict(count) for name, count in tally.counts.items()}
    path = report.write(args.name, {"seed": seed, "seconds": taken, "inputs": tally.inputs, "targets": counts})
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
