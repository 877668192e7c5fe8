"""JSON files in the user's cache: one file for each kind and key.

    $XDG_CACHE_HOME or ~/.cache / earmill / <kind>-<hash of the key>.json

Nothing in it is needed: what is missing, damaged or not to be written is found out anew.

`models_key` is the key of what is kept about models. It imports none of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def read_kept(kind: str, key: str) -> Any:
    """What `keep` was given; None where there is nothing to be read."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(_path(kind, key).read_text())
    return None


def keep(kind: str, key: str, value: Any) -> None:
    """Keep a JSON value, whole or not at all; where nothing can be written it is left."""
    with contextlib.suppress(OSError):
        path = _path(kind, key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps(value))
        os.replace(name, path)


def _path(kind: str, key: str) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "earmill" / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


_OURS = "earmill"
_DECIDE = ("earmill", "torch", "torchaudio", "numba", "numpy")


def models_key() -> str | None:
    """Hash of the models' sources and of the versions that they depend on.

    None where another distribution brings models: its sources may change freely, so that nothing
    can be kept.
    """
    points = sorted(entry_points(group="earmill.models"), key=lambda each: each.name)
    if any(each.dist is None or each.dist.name != _OURS for each in points):
        return None
    spec = find_spec("amtcore")
    if spec is None or spec.origin is None:
        return None
    digest = hashlib.sha256(sys.version.encode())
    for name in _DECIDE:
        digest.update(f"{name} {version(name)}\n".encode())
    for each in points:
        digest.update(f"{each.name} {each.value}\n".encode())
    for source in sorted(Path(spec.origin).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()
