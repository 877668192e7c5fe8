"""Provenance that all rows of a run share: code, packages, machine, device, models, dtype. Facts
that cannot be found out are null."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import amtcore
from earmill.pipeline.common.machine import processor_name

# Folders of earmill.pipeline and amtcore, whose sources make features.
SOURCES = (Path(__file__).resolve().parents[1], Path(amtcore.__file__).resolve().parent)
# The packages that touch a value between source bytes and stored frames; enough for one commit.
VALUE_PACKAGES = (
    *("earmill", "amtcore", "torch", "torchaudio", "numpy", "scipy", "numba", "triton"),
    *("soundfile", "miniaudio", "av", "soxr", "numcodecs", "pyarrow"),
)
_GIT_TIMEOUT_S = 10
# Keys of `Extractor.describe` about the calling process, which does not compute.
OF_A_WORKER = ("backend", "threads")


@lru_cache(maxsize=1)
def package_versions() -> dict[str, str]:
    """Return every installed distribution with its version, sorted by normalised name."""
    found: dict[str, str] = {}
    for dist in metadata.distributions():
        about = dist.metadata  # `dist.version` would parse the file again
        if name := about["Name"]:
            found.setdefault(name.lower().replace("_", "-"), about["Version"])
    return dict(sorted(found.items()))


def git_state(folder: Path | None = None) -> dict[str, Any] | None:
    """Return commit and cleanliness of the checkout that tracks this package, or None: an
    environment inside another project's checkout is not tracked there."""
    folder = folder or Path(__file__).resolve().parent
    if not _git(folder, "ls-files", "--", "."):
        return None
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": bool(status)} if commit else None


def _git(folder: Path, *command: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *command],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def code_sha256(folders: Sequence[Path] = SOURCES) -> str:
    """Hash the Python sources that make features, whatever way they were installed."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{folder.name}/{path.relative_to(folder).as_posix()}\0".encode())
            digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def host_info() -> dict[str, Any]:
    return {
        "name": socket.gethostname(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def device_info() -> dict[str, Any]:
    """Describe this machine's CPU with the keys that a worker on a GPU gives."""
    return {"device": "cpu", "backend": "cpu", "name": processor_name()}


def run_provenance(
    extractors: Iterable[Mapping[str, Any]], *, device: str, dtype: str
) -> dict[str, Any]:
    """Return the provenance for dataset.json, given `Extractor.describe()` of every model. The
    device is the job's `run.device`; commit records name the device of each shard."""
    return {
        "versions": package_versions(),
        "git": git_state(),
        "code_sha256": code_sha256(),
        "host": host_info(),
        "device": {"wanted": device},
        "models": [
            {key: value for key, value in described.items() if key not in OF_A_WORKER}
            for described in extractors
        ],
        "output_dtype": dtype,
    }
