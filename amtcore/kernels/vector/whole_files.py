"""Atomic files of compiled code: a line `<mark> <sha256 of the code>`, then the code."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path


def read(path: Path, mark: str) -> bytes | None:
    """Return the code if the file has the mark and the right checksum, else None."""
    try:
        head, _, code = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    return code if head == _head(mark, code) else None


def write(path: Path, mark: str, code: bytes) -> None:
    """Replace the file atomically: a reader gets the old file or the new one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_head(mark, code) + b"\n" + code)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _head(mark: str, code: bytes) -> bytes:
    return f"{mark} {hashlib.sha256(code).hexdigest()}".encode()
