"""A read-only Zarr store over a `Layout`, which refuses holes and what was not committed.

The only metadata it gives is the root's, once `zarr.trust` has found it as committed. Zarr
takes a missing chunk for one full of fill values, so a lost object would read as silence. The sinks
write every chunk: here a missing one is an error. It also remembers each object's shard index
(about 1 kB, asked for before every partial read) and uses the layout's own filesystem, hence one
session and one set of credentials, and works wherever the layout does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.core.buffer import Buffer, BufferPrototype

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.trust import Promise
from earmill.pipeline.formats.zarr.trust import (
    MAX_METADATA_BYTES,
    ROOT_METADATA,
    checked_metadata,
)
from earmill.pipeline.storage.layout import Layout

CHUNK_FOLDER = "/c/"


class LayoutStore(Store):
    """One shard's store.

    Args:
        layout: Where the dataset is.
        rel: The store's folder in it.
        promise: What commit and dataset.json say of it.
    """

    supports_writes = False
    supports_deletes = False
    supports_listing = False

    def __init__(self, layout: Layout, rel: str, promise: Promise) -> None:
        super().__init__(read_only=True)
        self.layout, self.rel, self._promise = layout, rel, promise
        self._tails: dict[tuple[str, int], bytes] = {}

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, LayoutStore)
            and self.rel == other.rel
            and self.layout.url() == other.layout.url()
        )

    __hash__ = None  # type: ignore[assignment]  # as other stores: equal by place, not hashable

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """The bytes of a key, or None where a metadata key is missing.

        Raises:
            CommitError: A chunk is missing.
        """
        try:
            data = await asyncio.to_thread(self._fetch, key, byte_range)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as err:
            if CHUNK_FOLDER in key:
                raise CommitError(
                    f"{self.layout.url(self.rel)}: {key} is missing although the shard is "
                    "committed; run `earmill verify`"
                ) from err
            return None
        return prototype.buffer.from_bytes(data)

    async def get_partial_values(
        self,
        prototype: BufferPrototype,
        key_ranges: Iterable[tuple[str, ByteRequest | None]],
    ) -> list[Buffer | None]:
        """Several `get`s at once."""
        return await asyncio.gather(*(self.get(k, prototype, r) for k, r in key_ranges))

    async def exists(self, key: str) -> bool:
        """Whether a key is there."""
        return await asyncio.to_thread(self.layout.exists, f"{self.rel}/{key}")

    def _fetch(self, key: str, byte_range: ByteRequest | None) -> bytes:
        if key == ROOT_METADATA:
            content = self._cat(key, 0, MAX_METADATA_BYTES + 1)
            return checked_metadata(self.rel, content, self._promise)
        if CHUNK_FOLDER not in key:
            raise FileNotFoundError(key)
        if not isinstance(byte_range, SuffixByteRequest):
            return self._cat(key, *_bounds(byte_range))
        tail = (key, byte_range.suffix)
        if tail not in self._tails:
            self._tails[tail] = self._cat(key, -byte_range.suffix, None)
        return self._tails[tail]

    def _cat(self, key: str, start: int | None, end: int | None) -> bytes:
        path = self.layout.inside(f"{self.rel}/{key}")
        return bytes(self.layout.fs.cat_file(path, start=start, end=end))

    async def set(self, key: str, value: Buffer) -> None:
        """Never."""
        raise self._refused()

    async def delete(self, key: str) -> None:
        """Never."""
        raise self._refused()

    def _refused(self) -> ValueError:
        return ValueError("published shards are read-only: nothing is edited, write a new dataset")

    def list(self) -> AsyncIterator[str]:
        """Not offered: what a shard holds is in its consolidated metadata."""
        raise NotImplementedError(self.list.__doc__)

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Not offered."""
        raise NotImplementedError(self.list.__doc__)

    def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Not offered."""
        raise NotImplementedError(self.list.__doc__)


def _bounds(byte_range: Any) -> tuple[int | None, int | None]:
    if isinstance(byte_range, RangeByteRequest):
        return byte_range.start, byte_range.end
    if isinstance(byte_range, OffsetByteRequest):
        return byte_range.offset, None
    return None, None
