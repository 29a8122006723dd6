"""`bloombee-spec drain` ends a process politely, waits for it, and says why it cannot."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bloombee_spec.cli.main import main

POLITE = "import signal,sys,time\nsignal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(3)))\n"
WAIT = "print('ready', flush=True)\ntime.sleep(60)"


def start(code: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_a_server_is_asked_to_leave_and_waited_for() -> None:
    process = start(POLITE + WAIT)
    assert main(["drain", str(process.pid)]) == 0
    assert process.wait(1) == 3, "it was not asked, or not waited for"


def test_one_that_stays_is_reported_and_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    process = start("import signal,time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT)
    try:
        assert main(["drain", str(process.pid), "--timeout", "0.5"]) == 1
        assert "still runs" in capsys.readouterr().err
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_no_such_process(capsys: pytest.CaptureFixture[str]) -> None:
    process = start("import sys\nprint('ready')")
    process.wait()
    assert main(["drain", str(process.pid)]) == 1
    assert "no process" in capsys.readouterr().err
    assert main(["drain", "1"]) == 1
