"""The sha256 of an open file, in constant memory."""

from __future__ import annotations

import hashlib
from typing import BinaryIO


def sha256_of(stream: BinaryIO) -> str:
    """Hash of everything a file gives from where it stands."""
    return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
