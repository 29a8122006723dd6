"""The relay of the emulated WAN over real sockets: order, counts, and lower bounds of delay only."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from benchmarks.wan import LinkShape, RelaySpec, WanRelays

READ_BYTES = 256 << 10  # the event loop's largest read
TIMEOUT_S = 60.0


@contextmanager
def _listener() -> Iterator[tuple[socket.socket, int]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT_S)
        yield server, server.getsockname()[1]


@contextmanager
def _relayed(
    to_server: LinkShape, from_server: LinkShape | None = None, in_process: bool = True
) -> Iterator[tuple[WanRelays, socket.socket]]:
    with (
        _listener() as (server, port),
        WanRelays([RelaySpec(port, to_server, from_server)], in_process=in_process) as relays,
    ):
        yield relays, server


def _connect(relays: WanRelays, server: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = socket.create_connection(("127.0.0.1", relays.ports[0]), timeout=TIMEOUT_S)
    accepted, _ = server.accept()
    accepted.settimeout(TIMEOUT_S)
    return client, accepted


def _receive(end: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = end.recv(1 << 16)
        assert chunk, f"the connection ended after {len(data)} of {size} bytes"
        data += chunk
    return bytes(data)


def _is_closed(end: socket.socket) -> bool:
    try:
        return end.recv(1) == b""
    except ConnectionResetError:
        return True


def test_each_connection_is_counted_by_its_caller() -> None:
    with _relayed(LinkShape()) as (relays, server):
        ends = [_connect(relays, server) for _ in range(2)]
        for i, (client, accepted) in enumerate(ends, 1):
            client.sendall(b"x" * 100 * i)
            _receive(accepted, 100 * i)
            accepted.sendall(b"y" * 10 * i)
            _receive(client, 10 * i)
        ports = [client.getsockname()[1] for client, _ in ends]
        for client, accepted in ends:
            client.close()
            accepted.close()
        found = relays.connection_counts(0)
        assert [(c.caller_port, c.to_server, c.from_server) for c in found] == [
            (ports[0], 100, 10),
            (ports[1], 200, 20),
        ]
        assert (relays.counts(0).to_server, relays.counts(0).from_server) == (300, 30)


@pytest.mark.parametrize("in_process", [True, False])
def test_message_is_delayed_in_each_direction_and_counted(in_process: bool):
    with _relayed(LinkShape(delay_s=0.06), LinkShape(delay_s=0.03), in_process) as (relays, server):
        client, accepted = _connect(relays, server)
        with client, accepted:
            for sender, receiver, delay in ((client, accepted, 0.06), (accepted, client, 0.03)):
                start = time.monotonic()
                sender.sendall(b"x" * 1000)
                assert _receive(receiver, 1000) == b"x" * 1000
                assert time.monotonic() - start >= delay
            client.sendall(b"y" * 234)
            _receive(accepted, 234)
            counts = relays.counts(0)
            assert (counts.to_server, counts.from_server, counts.connections, counts.held) == (1234, 1000, 1, 0)
        assert (relays.pid == os.getpid()) is in_process


def test_opening_a_connection_takes_a_round_trip():
    with _relayed(LinkShape(delay_s=0.05)) as (relays, server):
        start = time.monotonic()
        client, accepted = _connect(relays, server)
        assert time.monotonic() - start >= 0.1
        client.close()
        accepted.close()


def test_bandwidth_bounds_the_transfer_and_is_shared_by_connections():
    size, rate = 200_000, 8e6  # 0.2 s each
    with _relayed(LinkShape(bits_per_s=rate)) as (relays, server):
        pairs = [_connect(relays, server) for _ in range(2)]
        start = time.monotonic()
        for client, _ in pairs:
            threading.Thread(target=client.sendall, args=(b"z" * size,), daemon=True).start()
        for _, accepted in pairs:
            _receive(accepted, size)
        assert time.monotonic() - start >= 2 * size * 8 / rate
        for pair in pairs:
            for end in pair:
                end.close()


@pytest.mark.parametrize("shared", [True, False])
def test_small_message_waits_behind_a_large_one_of_another_connection_only_on_a_shared_link(shared: bool):
    size = 400_000  # 0.8 s on the link
    with _relayed(LinkShape(bits_per_s=4e6, shared=shared)) as (relays, server):
        (large, large_accepted), (small, small_accepted) = (_connect(relays, server) for _ in range(2))
        with large, large_accepted, small, small_accepted:
            large.sendall(b"l" * size)
            _wait_for(lambda: relays.counts(0).to_server == size)
            small.sendall(b"s")
            _receive(small_accepted, 1)
            assert (relays.counts(0).held == 0) is shared
            _receive(large_accepted, size)


def test_order_and_content_survive_jitter_and_many_small_writes():
    with _relayed(LinkShape(delay_s=0.001, jitter_s=0.02, bits_per_s=50e6)) as (relays, server):
        client, accepted = _connect(relays, server)
        with client, accepted:
            messages = [bytes([i % 256]) * (1 + 37 * i % 5000) for i in range(300)]
            for message in messages:
                client.sendall(message)
            expected = b"".join(messages)
            assert _receive(accepted, len(expected)) == expected


def test_slow_start_delays_a_large_message_but_not_a_small_one():
    shape = LinkShape(delay_s=0.03, idle_s=0.5, initial_window_bytes=10_000)
    with _relayed(shape) as (relays, server):
        client, accepted = _connect(relays, server)
        with client, accepted:
            start = time.monotonic()
            client.sendall(b"a" * 60_000)  # 10k, 20k, 30k: two more round trips
            _receive(accepted, 60_000)
            assert time.monotonic() - start >= 0.03 + 2 * 0.06


def test_relay_stops_reading_when_its_buffer_is_full():
    limit = 1 << 20
    with _relayed(LinkShape(buffer_bytes=limit)) as (relays, server):
        client, accepted = _connect(relays, server)
        with client, accepted:
            total = 64 << 20
            payload = os.urandom(1 << 20) * 64
            sender = threading.Thread(target=client.sendall, args=(payload,), daemon=True)
            sender.start()
            _wait_until_steady(relays)
            counts = relays.counts(0)
            assert limit < counts.held <= counts.peak_held <= limit + READ_BYTES
            assert counts.to_server < total and sender.is_alive(), "the sender waits, nothing is lost"
            assert _receive(accepted, total) == payload
            sender.join(TIMEOUT_S)
            assert relays.counts(0).held == 0 and relays.counts(0).peak_held <= limit + READ_BYTES


def _wait_until_steady(relays: WanRelays) -> None:
    carried = -1
    while carried != (carried := relays.counts(0).to_server) or carried == 0:
        time.sleep(0.2)


def test_half_close_passes_after_the_data_and_the_other_direction_stays_open():
    with _relayed(LinkShape(delay_s=0.02)) as (relays, server):
        client, accepted = _connect(relays, server)
        with client, accepted:
            client.sendall(b"question")
            client.shutdown(socket.SHUT_WR)
            assert _receive(accepted, 8) == b"question"
            assert accepted.recv(1) == b""
            accepted.sendall(b"answer")
            assert _receive(client, 6) == b"answer"


def test_cut_resets_connections_and_refuses_new_ones_until_restored():
    with _relayed(LinkShape(delay_s=0.01)) as (relays, server):
        client, accepted = _connect(relays, server)
        relays.cut(0)
        assert _is_closed(client) and _is_closed(accepted)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", relays.ports[0]), timeout=TIMEOUT_S)
        relays.restore(0)
        again, accepted_again = _connect(relays, server)
        again.sendall(b"back")
        assert _receive(accepted_again, 4) == b"back"
        for end in (client, accepted, again, accepted_again):
            end.close()


def test_silent_cut_holds_what_is_sent_until_restored():
    with _relayed(LinkShape()) as (relays, server):
        client, accepted = _connect(relays, server)
        with client, accepted:
            relays.cut(0, silent=True)
            client.sendall(b"late")
            accepted.settimeout(0.3)
            with pytest.raises(TimeoutError):
                accepted.recv(1)
            relays.restore(0)
            accepted.settimeout(TIMEOUT_S)
            assert _receive(accepted, 4) == b"late"


def test_shape_can_be_changed_while_a_connection_is_open():
    with _relayed(LinkShape()) as (relays, server):
        client, accepted = _connect(relays, server)
        with client, accepted:
            relays.set_shape(0, to_server=LinkShape(delay_s=0.2))
            start = time.monotonic()
            client.sendall(b"slow")
            _receive(accepted, 4)
            assert time.monotonic() - start >= 0.2


def test_reset_of_one_side_reaches_the_other():
    with _relayed(LinkShape(delay_s=0.01)) as (relays, server):
        client, accepted = _connect(relays, server)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        client.close()
        with pytest.raises(ConnectionResetError):
            accepted.recv(1)
        accepted.close()


def test_unreachable_server_closes_the_client():
    with _listener() as (_, port):
        pass
    with WanRelays([RelaySpec(port, LinkShape())], in_process=True) as relays, socket.socket() as client:
        client.settimeout(TIMEOUT_S)
        with pytest.raises(ConnectionResetError):
            client.connect(("127.0.0.1", relays.ports[0]))
            client.recv(1)


def test_no_descriptor_is_left_behind():
    def descriptors() -> int:
        return psutil.Process().num_fds()

    with _relayed(LinkShape(delay_s=0.001)) as (relays, server):
        _exchange_and_close(relays, server)
        before = descriptors()
        for _ in range(50):
            _exchange_and_close(relays, server)
        _wait_for(lambda: relays.counts(0).open_connections == 0)
        assert relays.counts(0).connections == 51
        assert descriptors() <= before
    outside = descriptors()
    for in_process in (True, False):
        with _relayed(LinkShape(), in_process=in_process) as (relays, server):
            _exchange_and_close(relays, server)
    assert descriptors() <= outside


def _exchange_and_close(relays: WanRelays, server: socket.socket) -> None:
    client, accepted = _connect(relays, server)
    client.sendall(b"ping")
    _receive(accepted, 4)
    client.close()
    assert _is_closed(accepted)
    accepted.close()


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def test_relay_process_ends_with_its_controller_and_reports_errors():
    with _listener() as (_, port):
        relays = WanRelays([RelaySpec(port, LinkShape())])
        with relays:
            process = psutil.Process(relays.pid)
            with pytest.raises(IndexError):
                relays.cut(1)
            taken = WanRelays([RelaySpec(port, LinkShape(), listen_port=port)])
            with pytest.raises(RuntimeError, match="could not start"), taken:
                pass
        assert not process.is_running()
        with pytest.raises(RuntimeError, match="not running"):
            relays.counts(0)
