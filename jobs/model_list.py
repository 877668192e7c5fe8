"""The list of models, kept as JSON: making it imports torch and numba, which takes seconds.

What is kept comes from the models themselves and holds for these sources and these versions; where
other distributions bring models, their sources may change freely, and nothing is kept.
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

_OURS = "earmill"
_DECIDE = ("earmill", "torch", "torchaudio", "numba", "numpy")


def listed_models() -> list[dict[str, Any]]:
    """Every model as `ModelInfo.to_dict` says it."""
    path = _path()
    if path is not None:
        with contextlib.suppress(OSError, ValueError):
            kept = json.loads(path.read_text())
            if isinstance(kept, list):
                return kept
    made = _made()
    if path is not None and not any(model["error"] for model in made):
        with contextlib.suppress(OSError):
            _keep(path, json.dumps(made))
    return made


def _made() -> list[dict[str, Any]]:
    from amtcore.features.build import list_models

    # As they are read back: tuples become lists.
    text = json.dumps([model.to_dict() for model in list_models()], default=str)
    listed: list[dict[str, Any]] = json.loads(text)
    return listed


def _path() -> Path | None:
    """The file for these sources and versions; None where nothing may be kept."""
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
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "earmill" / f"models-{digest.hexdigest()[:32]}.json"


def _keep(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(name, path)
