"""What is kept for the next command, as JSON files in the user's cache: one file a kind and key.

    $XDG_CACHE_HOME or ~/.cache / earmill / <kind>-<hash of the key>.json

Nothing in it is needed: what is missing, damaged or not to be written is found out anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
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
