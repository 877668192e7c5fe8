"""Checksums of byte streams in constant memory."""

from __future__ import annotations

import hashlib
from typing import BinaryIO

HASH_BLOCK_BYTES = 1 << 20


def sha256_of(stream: BinaryIO) -> str:
    """sha256 of a stream from its start, in constant memory."""
    stream.seek(0)
    digest = hashlib.sha256()
    while block := stream.read(HASH_BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()
