"""Whose connections the relays of a swarm carry, and how many bytes between whom."""

from __future__ import annotations

import os
from collections import defaultdict

import psutil

from benchmarks.swarm import LocalSwarm
from bloombee_spec.wire.ledger import CLIENT_END

Party = int  # index of a stage, or CLIENT_END
STRANGER = -2  # the bootstrap peer, and whoever hung up before anybody asked who it was
_callers: dict[int, Party] = {}  # local port to its owner, also of connections that have ended


def carried(swarm: LocalSwarm) -> dict[tuple[Party, Party], int]:
    """Bytes so far between the servers and this process with its children, by source and target.

    :raises RuntimeError: this swarm has no relays
    """
    if swarm.relays is None:
        raise RuntimeError("only a swarm behind an emulated WAN has relays that count")
    _learn(swarm)
    found: defaultdict[tuple[Party, Party], int] = defaultdict(int)
    for callee in range(len(swarm.servers)):
        for counts in swarm.relays.connection_counts(callee):
            caller = _callers.get(counts.caller_port, STRANGER)
            found[caller, callee] += counts.to_server
            found[callee, caller] += counts.from_server
    return dict(found)


def _learn(swarm: LocalSwarm) -> None:
    assert swarm.relays is not None
    owners = {member.pid: index for index, server in enumerate(swarm.servers) for member in server.process.members()}
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    for connection in psutil.net_connections("tcp"):
        if connection.raddr and connection.raddr.port in swarm.relays.ports and connection.pid is not None:
            if connection.pid in owners:
                _callers[connection.laddr.port] = owners[connection.pid]
            elif connection.pid in own:
                _callers[connection.laddr.port] = CLIENT_END
