"""Does a link that idles between laps cost time, and do small no-ops keep it fast? Real TCP over a real round trip.

    python -m benchmarks.keep_warm

A frame of each size is sent after a silence, as in one tree per lap, and its way from the first byte to the last is
timed at the receiver's end (both ends share a clock). Beside it: the same with a no-op of 32 bytes every so often
during the silence, and with the kernel's restart after idle switched off, which is what no-ops are to achieve.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.report import aligned, write
from benchmarks.tunnel import FAR, NoTunnel, between

PORT, NOOP = 5000, b"\0" * 32
SIZES = (2_000, 14_000, 64_000, 256_000, 1_000_000)
WAYS = ("silence", "no-ops", "no restart")
BACKLOG_S = 10.0


@dataclass(frozen=True)
class Line:
    """Seconds beyond the delay until a frame is there, median."""

    congestion: str
    size: int
    way: str
    seconds: float


def receive() -> None:
    """Frames: length (8 bytes), then that much; the answer is when the last byte came."""
    with socket.create_server((FAR, PORT)) as server:
        connection, _ = server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, connection.makefile("rb") as stream:
            while header := stream.read(8):
                size = int.from_bytes(header, "big")
                stream.read(size)
                if size > len(NOOP):
                    connection.sendall(f"{time.monotonic():.6f}\n".encode())


def send(
    congestion: str, way: str, sizes: tuple[int, ...], repeats: int, silence_s: float, every_s: float, result: Path
) -> None:
    restart = "0" if way == "no restart" else "1"
    Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text(restart)
    connection = _connect()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    with connection, connection.makefile("rb") as stream:
        for turn in range(repeats + 1):  # the first one opens the window
            for size in sizes:
                _idle(connection, silence_s, every_s if way == "no-ops" else silence_s)
                started = time.monotonic()
                connection.sendall(size.to_bytes(8, "big") + bytes(size))
                arrived = float(stream.readline())
                if turn:
                    times[size].append(arrived - started)
    result.write_text(json.dumps({size: statistics.median(found) for size, found in times.items()}))


def _connect() -> socket.socket:
    for _ in range(100):
        try:
            return socket.create_connection((FAR, PORT), timeout=BACKLOG_S)
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise ConnectionRefusedError("the far end does not listen")


def _idle(connection: socket.socket, silence_s: float, every_s: float) -> None:
    end = time.monotonic() + silence_s
    while time.monotonic() + every_s < end:
        time.sleep(every_s)
        connection.sendall(len(NOOP).to_bytes(8, "big") + NOOP)
    time.sleep(max(0.0, end - time.monotonic()))


def measure(congestion: str, way: str, args: argparse.Namespace) -> list[Line]:
    delay_s, silence_s = args.delay_ms / 1e3, args.silence_ms / 1e3
    with tempfile.NamedTemporaryFile() as file:
        path = Path(file.name)
        between(
            delay_s, receive, lambda: send(congestion, way, SIZES, args.repeats, silence_s, args.every_ms / 1e3, path),
            limit_s=60 + 4 * (args.repeats + 1) * len(SIZES) * (silence_s + 1),
        )  # fmt: skip
        found = json.loads(path.read_text())
    return [Line(congestion, int(size), way, seconds - delay_s) for size, seconds in found.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay-ms", type=float, default=25.0, help="one way")
    parser.add_argument("--silence-ms", type=float, default=600.0)
    parser.add_argument("--every-ms", type=float, default=100.0, help="between no-ops")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--congestion", nargs="+", default=["cubic", "bbr"])
    parser.add_argument("--name", default="keep-warm")
    args = parser.parse_args()
    lines: list[Line] = []
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    try:
        for congestion in [each for each in args.congestion if each in known]:
            for way in WAYS:
                lines += measure(congestion, way, args)
                print(lines[-1], flush=True)
    except NoTunnel as e:
        print(f"cannot be measured here: {e}")
        return 2
    by = {(x.congestion, x.size, x.way): x.seconds for x in lines}
    print(aligned(("TCP", "bytes", *(f"{way}, ms" for way in WAYS)), [
        (congestion, f"{size:,}", *(f"{1e3 * by[congestion, size, way]:.0f}" for way in WAYS))
        for congestion, size in dict.fromkeys((x.congestion, x.size) for x in lines)
    ], rule=True))  # fmt: skip
    print(write(args.name, {"settings": vars(args), "lines": [asdict(x) for x in lines]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
