"""A long-running command with a log file, in a session of its own, that leaves no process behind when it is stopped.

Servers fork handlers, DHT peers and daemons, some of which leave the process group. An environment variable with a
unique value, which all of them inherit, finds them again.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

TAG = "BLOOMBEE_SPEC_PROCESS"
POLL_S = 0.1
TAIL_LINES = 30


class StartupError(RuntimeError):
    """A process ended, or was not ready in time; the message shows the end of its log."""


class LoggedProcess:
    """`command` with its output in `log_path`; can be started again after it was stopped or killed.

    :param env: added to this process's environment
    """

    def __init__(self, name: str, command: Sequence[str], log_path: Path, env: Mapping[str, str]) -> None:
        self.name, self.command, self.log_path = name, list(command), log_path
        self._env = dict(env)
        self._tag = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def pid(self) -> int:
        """Process id, also the id of the process group and session."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        if self.running:
            raise RuntimeError(f"{self.name} is already running (pid {self.pid})")
        with self.log_path.open("ab") as log:
            log.write((" ".join(self.command) + "\n").encode())
            log.flush()
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._env, TAG: self._tag},
                start_new_session=True,
                # A shell's background job ignores SIGINT, and its children would inherit that.
                preexec_fn=_heed_interrupts if signal.getsignal(signal.SIGINT) == signal.SIG_IGN else None,
            )

    def wait_for_log(self, pattern: str, deadline: float) -> re.Match[str]:
        """Wait until this run's log matches `pattern`.

        :param deadline: on the clock `time.monotonic`
        :raises StartupError: the process ended, or the deadline passed
        """
        while True:
            ended = not self.running  # asked before the log is read, or its last lines could be missed
            if match := re.search(pattern, self.log()):
                return match
            if ended:
                raise StartupError(self._describe(f"ended with code {self._returncode()}"))
            if time.monotonic() >= deadline:
                raise StartupError(self._describe(f"did not log {pattern!r} in time"))
            time.sleep(POLL_S)

    def log(self) -> str:
        """What the current run has logged."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def members(self) -> list[psutil.Process]:
        """All living processes that this one has started, itself included, wherever they have moved to."""
        found = []
        for process in psutil.process_iter():
            try:
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and process.environ().get(TAG) == self._tag:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process group, if its leader still runs; returns at once."""
        if self.running:  # otherwise the number may already be another group's
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                pass

    def wait(self, deadline: float) -> bool:
        """Wait for the end of the leader until `deadline` (on `time.monotonic`); whether it came."""
        try:
            if self._process is not None:
                self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL to the group and to whatever has left it; returns when all of it is gone."""
        self.send_signal(signal.SIGKILL)
        self.reap()

    def stop(self, grace_s: float) -> None:
        """SIGINT to the group, `grace_s` seconds to end in order, then `kill`."""
        self.send_signal(signal.SIGINT)
        try:
            self.wait(time.monotonic() + grace_s)
        finally:
            self.kill()

    def reap(self) -> None:
        """Kill and await whatever of this process is still there."""
        while members := self.members():
            for process in members:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    pass
            psutil.wait_procs(members, timeout=1.0)
        if self._process is not None:
            self._process.wait()

    def _returncode(self) -> int | None:
        return None if self._process is None else self._process.returncode

    def _describe(self, what: str) -> str:
        tail = "\n".join(self.log().splitlines()[-TAIL_LINES:])
        return f"{self.name} {what}; the end of {self.log_path}:\n{tail}"


def _heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
