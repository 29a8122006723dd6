"""Link estimates that outlive a session: one store per process, saved now and then."""

from __future__ import annotations

import atexit
import os
import threading
import time
from pathlib import Path

from hivemind.utils.logging import get_logger

from bloombee_spec.client.measured import RouteMeter
from bloombee_spec.plan.store import PeerStore

logger = get_logger(__name__)

SAVE_INTERVAL = 60.0  # seconds

_lock = threading.Lock()
_store: PeerStore | None = None
_saved = 0.0


def peers_file() -> Path:
    """`$XDG_CACHE_HOME/bloombee_spec/peers.json`, or below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "bloombee_spec" / "peers.json"


def recall(meter: RouteMeter) -> None:
    """Start a session from what is known about its peers."""
    with _lock:
        meter.recall(_opened())


def known_bandwidth(peer: str) -> float | None:
    """Bandwidth of the link into a stage, bit/s, as an earlier session measured it."""
    with _lock:
        record = _opened().get(peer)
    return record.link.bandwidth_bps if record is not None and record.link.samples else None


def remember(meter: RouteMeter) -> None:
    """Keep what a session learned; never raises."""
    global _saved
    with _lock:
        meter.remember(_opened())
        if time.monotonic() - _saved > SAVE_INTERVAL:
            _saved = time.monotonic()
            _save()


def _opened() -> PeerStore:
    global _store, _saved
    if _store is None:
        _store, _saved = PeerStore(peers_file()), time.monotonic()
        atexit.register(_save)
    return _store


def _save() -> None:
    if _store is not None and len(_store):
        try:
            _store.save()
        except OSError as e:
            logger.debug(f"Link estimates are not kept: {e}")
