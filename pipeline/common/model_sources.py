"""Which models these are: a key for what is kept of them, without importing one."""

from __future__ import annotations

import hashlib
import sys
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path

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
