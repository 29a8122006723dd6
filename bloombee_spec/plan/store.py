"""What was learned about each peer, kept between sessions in one small JSON file."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloombee_spec.plan.compute import ComputeProfile
from bloombee_spec.plan.links import LinkEstimate

logger = logging.getLogger(__name__)

VERSION = 1
MAX_FILE_BYTES = 1 << 20
MAX_KEY_LENGTH = 128
MAX_POINTS = 16


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """:param link: towards the peer; :param compute: of its stage, when it has been measured"""

    link: LinkEstimate
    compute: ComputeProfile | None = None


class PeerStore:
    """Peer id -> `PeerRecord`, the most recently updated `limit` of them.

    A file that is missing, too large, damaged or of another version reads as empty (with one warning): estimates are
    a convenience and are measured again. Saving replaces the file in one step, so a crash leaves the old one or the
    new one.
    """

    def __init__(self, path: str | os.PathLike[str], limit: int = 256, clock: Callable[[], float] = time.time):
        if limit < 1:
            raise ValueError(f"a store of {limit} peers")
        self.path, self.limit, self._clock = Path(path), limit, clock
        self._records: dict[str, tuple[float, PeerRecord]] = {}
        self._load()

    def __len__(self) -> int:
        return len(self._records)

    def get(self, peer: str) -> PeerRecord | None:
        entry = self._records.get(peer)
        return entry[1] if entry else None

    def put(self, peer: str, record: PeerRecord) -> None:
        """:raises ValueError: a peer id that is empty or longer than 128 characters"""
        if not 0 < len(peer) <= MAX_KEY_LENGTH:
            raise ValueError(f"a peer id of {len(peer)} characters; 1 to {MAX_KEY_LENGTH} are kept")
        self._records[peer] = (self._clock(), record)
        self._trim()

    def save(self) -> None:
        """:raises OSError: the directory cannot be written"""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        peers = {peer: _encode(at, record) for peer, (at, record) in self._records.items()}
        text = json.dumps({"version": VERSION, "peers": peers}, separators=(",", ":"), allow_nan=False)
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except BaseException:
            os.unlink(name)
            raise

    def _trim(self) -> None:
        while len(self._records) > self.limit:
            del self._records[min(self._records, key=lambda peer: self._records[peer][0])]

    def _load(self) -> None:
        try:
            if self.path.stat().st_size > MAX_FILE_BYTES:
                raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(data, dict) or data.get("version") != VERSION or not isinstance(data["peers"], dict):
                raise ValueError("not a peer file of this version")
            peers = data["peers"]
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, RecursionError) as error:
            logger.warning("%s is not usable, link estimates start afresh: %s", self.path, error)
            return
        for peer, entry in peers.items():
            try:
                if 0 < len(peer) <= MAX_KEY_LENGTH:
                    self._records[peer] = _decode(entry)
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                logger.warning("%s: the entry of peer %.16s is not usable: %s", self.path, peer, error)
        self._trim()


def _encode(at: float, record: PeerRecord) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "at": round(at, 3),
        "delay_s": record.link.delay_s,
        "bandwidth_bps": record.link.bandwidth_bps,
        "samples": record.link.samples,
    }
    if record.compute is not None:
        entry["compute"] = [list(point) for point in record.compute.points]
    return entry


def _decode(entry: Any) -> tuple[float, PeerRecord]:
    if not isinstance(entry, dict):
        raise ValueError("not an object")
    at = _number(entry["at"])
    link = LinkEstimate(_number(entry["delay_s"]), _number(entry["bandwidth_bps"]), int(_number(entry["samples"])))
    compute = None
    if "compute" in entry:
        points = entry["compute"]
        if not isinstance(points, list) or len(points) > MAX_POINTS:
            raise ValueError("compute is not a short list of points")
        compute = ComputeProfile(tuple((_number(rows), _number(seconds)) for rows, seconds in points))
    return at, PeerRecord(link, compute)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e18:
        raise ValueError(f"{value!r:.40} is not a usable number")
    return float(value)
