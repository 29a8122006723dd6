"""Two network namespaces with a delay between them, so that real TCP meets a real round trip.

The relay of `wan.py` ends each TCP connection at a loopback hop, whose round trip is nothing: windows are open at once
there. Here packets themselves wait, between two tun devices. Needs Linux with /dev/net/tun, and user namespaces or
root; nothing outside the namespaces is touched.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import heapq
import os
import select
import socket
import struct
import subprocess
import time
import traceback
from collections.abc import Callable
from pathlib import Path

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 1500
NEAR, FAR = "10.77.0.1", "10.77.0.2"


class NoTunnel(RuntimeError):
    """This machine does not allow it."""


def between(delay_s: float, far: Callable[[], None], near: Callable[[], None], *, limit_s: float) -> None:
    """Run `far` in a process at address FAR, and `near` in one at NEAR, until `near` is done.

    :param delay_s: one way
    :raises NoTunnel: namespaces or tun devices are not allowed here
    :raises RuntimeError: `near` failed, or took longer than `limit_s` seconds
    """
    ends = [_End(address, run) for address, run in ((FAR, far), (NEAR, near))]
    try:
        tuns = [end.tun() for end in ends]
        for end in ends:
            end.go()
        _carry(tuns, delay_s, ends[1], time.monotonic() + limit_s)
    finally:
        for end in ends:
            end.close()


class _End:
    """A process in a network namespace of its own, which waits for `go`."""

    def __init__(self, address: str, run: Callable[[], None]):
        self._mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                self._mine.close()
                tun = _namespace(address)
                theirs.sendmsg([b"t"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [tun]))])
                theirs.recv(1)
                run()
                status = 0
            except BaseException as e:
                traceback.print_exc()
                theirs.send(repr(e).encode()[:200])
            finally:
                os._exit(status)
        theirs.close()

    def tun(self) -> int:
        """:raises NoTunnel: the namespace could not be made"""
        data, control, *_ = self._mine.recvmsg(200, socket.CMSG_LEN(4))
        if not control:
            raise NoTunnel(f"no network namespace with a tun device: {data.decode(errors='replace')}")
        return int(struct.unpack("i", control[0][2][:4])[0])

    def go(self) -> None:
        self._mine.send(b"g")

    @property
    def ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
        return self.status is not None

    def close(self) -> None:
        self._mine.close()
        if not self.ended:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)


def _namespace(address: str) -> int:
    root, user, group = os.geteuid() == 0, os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET | (0 if root else CLONE_NEWUSER)) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    if not root:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH14x", b"slow0", IFF_TUN | IFF_NO_PI))
    for command in (
        f"ip addr add {address}/24 dev slow0", f"ip link set slow0 mtu {MTU} txqueuelen 10000 up", "ip link set lo up"
    ):  # fmt: skip
        subprocess.run(command.split(), check=True, capture_output=True)
    Path("/proc/sys/net/ipv4/tcp_no_metrics_save").write_text("1")
    return tun


def _carry(tuns: list[int], delay_s: float, until: _End, deadline: float) -> None:
    """Pass packets on after their delay, until an end is done."""
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while not until.ended:
        now = time.monotonic()
        if now > deadline:
            raise RuntimeError("the near end took too long")
        wait = max(0.0, min(waiting[0][0] - now, 0.05)) if waiting else 0.05
        for tun in select.select(tuns, [], [], wait)[0]:
            for _ in range(64):
                try:
                    packet = os.read(tun, MTU + 64)
                except BlockingIOError:
                    break
                count += 1
                heapq.heappush(waiting, (time.monotonic() + delay_s, count, tuns[1 - tuns.index(tun)], packet))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, target, packet = heapq.heappop(waiting)
            os.write(target, packet)
    if until.status:
        raise RuntimeError("the near end failed")
