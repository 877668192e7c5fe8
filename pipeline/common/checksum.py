"""The sha256 of an open file, in constant memory."""

from __future__ import annotations

import hashlib
from typing import BinaryIO


def sha256_of(stream: BinaryIO) -> str:
    """Hash of everything a file gives from where it stands."""
    return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]


def digest_of(stream: BinaryIO) -> str:
    """sha256 of all bytes of a stream, from its own cache if it has one."""
    cached = getattr(stream, "digest", None)
    if callable(cached):
        return str(cached())
    stream.seek(0)
    return sha256_of(stream)
