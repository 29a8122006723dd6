"""Local swarms: they start, survive a kill, say why they do not start, and leave no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from host_helpers import host_module

from benchmarks.processes import LoggedProcess, StartupError
from benchmarks.swarm import InProcessSwarm, LocalSwarm, ServerSpec, free_ports, split_blocks
from benchmarks.toy_models import make_toy_llama
from benchmarks.wan import LinkShape

REPOSITORY = Path(__file__).resolve().parent.parent
TIMEOUT_S = 120.0

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
if os.fork() == 0:
    time.sleep(600)
print("READY", child.pid, flush=True)
time.sleep(600)
"""


def _process(tmp_path: Path, script: str) -> LoggedProcess:
    return LoggedProcess("script", [sys.executable, "-c", script], tmp_path / "script.log", {})


def _deadline(seconds: float = TIMEOUT_S) -> float:
    return time.monotonic() + seconds


def _is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


# --- one process --------------------------------------------------------------------------------------------------


def test_stop_kills_what_ignores_interrupts_and_what_has_left_the_group(tmp_path: Path):
    process = _process(tmp_path, STUBBORN)
    process.start()
    escaped = int(process.wait_for_log(r"READY (\d+)", _deadline()).group(1))
    members = {member.pid for member in process.members()}
    assert len(members) == 3 and {process.pid, escaped} <= members
    assert os.getpgid(escaped) != process.pid
    process.stop(grace_s=0.2)
    assert not process.members() and not any(map(_is_alive, members))
    process.stop(grace_s=0.2)  # twice is harmless


def test_process_that_ends_early_is_reported_with_its_log(tmp_path: Path):
    process = _process(tmp_path, "print('the reason'); raise SystemExit(3)")
    process.start()
    with pytest.raises(StartupError, match=r"ended with code 3[\s\S]*the reason"):
        process.wait_for_log("READY", _deadline())


def test_process_that_is_not_ready_in_time_is_reported(tmp_path: Path):
    process = _process(tmp_path, "import time; print('busy', flush=True); time.sleep(600)")
    process.start()
    try:
        process.wait_for_log("busy", _deadline())
        with pytest.raises(StartupError, match=r"did not log 'READY' in time[\s\S]*busy"):
            process.wait_for_log("READY", _deadline(0.1))
    finally:
        process.stop(grace_s=0.0)
    assert not process.members()


def test_restarted_process_is_judged_by_its_own_log(tmp_path: Path):
    marker = tmp_path / "second-run"
    process = _process(tmp_path, f"import os; print('NOT' if os.path.exists({str(marker)!r}) else 'READY')")
    process.start()
    process.wait_for_log("READY", _deadline())
    process.stop(grace_s=5.0)
    marker.touch()
    process.start()
    with pytest.raises(StartupError):
        process.wait_for_log("READY", _deadline())
    assert "READY" in process.log_path.read_text()


# --- plans --------------------------------------------------------------------------------------------------------


def test_blocks_are_split_evenly():
    assert split_blocks(30, 4) == [(0, 8), (8, 16), (16, 23), (23, 30)]
    assert split_blocks(3, 3) == [(0, 1), (1, 2), (2, 3)]
    with pytest.raises(ValueError, match="cannot split"):
        split_blocks(2, 3)
    with pytest.raises(ValueError, match="at least one block"):
        ServerSpec(4, 4)


def test_ports_are_distinct_and_outside_the_ephemeral_range():
    ports = free_ports(20)
    assert len(set(ports)) == 20 and all(20_000 <= port < 32_768 for port in ports)


# --- swarms of real peers -----------------------------------------------------------------------------------------


@pytest.mark.swarm
def test_swarm_starts_survives_a_kill_and_leaves_no_process(tmp_path: Path):
    model = make_toy_llama(tmp_path / "model", num_layers=2)
    wan = LinkShape(delay_s=0.005)
    with LocalSwarm(
        model, [(0, 1), ServerSpec(1, 2, extra_args=("--num_handlers", "1"))], work_dir=tmp_path, wan=wan
    ) as swarm:
        assert len(swarm.initial_peers) == 1
        assert swarm.relays is not None and not any(server.port == server.announced_port for server in swarm.servers)
        assert all(swarm.relays.counts(i).connections > 0 for i in range(2)), (
            "peers call each other through the relays"
        )
        assert "--num_handlers" in swarm.servers[1].process.command[-2:]
        everything = [process.pid for server in swarm.servers for process in server.process.members()]

        peer_id, killed = swarm.servers[0].peer_id, swarm.servers[0].process.members()
        assert {"p2pd", "torch_shm_manager"} <= {process.name() for process in killed}
        swarm.kill(0)
        assert not any(_is_alive(process.pid) for process in killed) and swarm.servers[1].process.running
        swarm.restart(0)
        assert swarm.servers[0].peer_id == peer_id
        everything += [process.pid for process in swarm.servers[0].process.members()] + [swarm.relays.pid]
    assert not any(map(_is_alive, everything))
    swarm.stop()


@pytest.mark.swarm
def test_server_that_cannot_start_is_reported_and_the_rest_is_stopped(tmp_path: Path):
    failing = (sys.executable, "-c", "print('no such model'); raise SystemExit(7)")
    swarm = LocalSwarm(tmp_path, [(0, 1)], work_dir=tmp_path, server_command=failing, wan=LinkShape())
    with pytest.raises(StartupError, match=r"server0 ended with code 7[\s\S]*no such model"), swarm:
        pass
    assert swarm._bootstrap is not None and not swarm._bootstrap.running
    assert not swarm._bootstrap.members()


@pytest.mark.swarm
def test_terminated_script_takes_its_swarm_along(tmp_path: Path):
    script = f"""
from benchmarks.swarm import LocalSwarm
import time
with LocalSwarm("unused", [], work_dir={str(tmp_path)!r}) as swarm:
    print(*(process.pid for process in swarm._bootstrap.members()), flush=True)
    time.sleep(600)
"""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        members = [int(pid) for pid in run.stdout.readline().split()]
        assert members and all(map(_is_alive, members))
        run.send_signal(signal.SIGTERM)
        assert run.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    assert not any(map(_is_alive, members))


@pytest.mark.swarm
def test_in_process_swarm_starts_and_stops_with_the_servers_of_a_factory(tmp_path: Path):
    class OwnServer(host_module("server.server").Server):  # type: ignore[misc]
        pass

    model = make_toy_llama(tmp_path / "model", num_layers=2)
    before = set(psutil.Process().children(recursive=True))
    with InProcessSwarm(model, split_blocks(2, 2), server_factory=OwnServer, update_period=3.0) as swarm:
        assert all(isinstance(server, OwnServer) and server.update_period == 3.0 for server in swarm.servers)
        assert all(server.module_container.is_healthy() for server in swarm.servers)
        swarm.stop_server(0)
        assert not swarm.servers[0].module_container.is_alive()
        assert swarm.servers[1].module_container.is_healthy()
    left = [child for child in psutil.Process().children(recursive=True) if child not in before]
    # Torch's helper serves this whole process and ends with it.
    assert [child.name() for child in left if child.name() != "torch_shm_manager"] == []
