"""A shard as a WebDataset tar: `<key>.<stream>.npy` and `<key>.json` for each row.

The key is the row id, escaped as in a URI: a slash makes no folder and a dot no extension. The JSON
has the scalars of the row table and the sha256 of each of the row's npy files, as tar has no
checksum of contents. Values of scaled streams are in float32. A member `__earmill__`, which
WebDataset passes over, describes the streams. Our reader copies a remote shard to a temporary file.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, unquote

import numpy as np

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.common.arrow_types import plain_json
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.common.text import json_value
from earmill.pipeline.common.untrusted import MEMBER, loads_json, tar_members
from earmill.pipeline.formats.block_cache import (
    BlockCache,
    FrameSpan,
    ShardReader,
    other_row,
    outside,
)
from earmill.pipeline.formats.digest import ShardDigest, StreamDigest, digest_blocks
from earmill.pipeline.formats.format import Encoding, Format, Promise, refused
from earmill.pipeline.formats.row_table import row_table
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.formats.stream_layout import StreamLayout, described, layout_of
from earmill.pipeline.formats.values import pieces
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.scratch import own_folder

MB = 2**20
ABOUT = "__earmill__"
HASHES, COLUMNS = "npy_sha256", "columns"
# Values above this wait in a file while a row is written, and are not kept when it is read.
HELD_BYTES = 64 * MB
PIECE_BYTES = MB
EMPTY_KEY = "%"  # No quoted row id: a lone % escapes nothing.


@dataclass(frozen=True, slots=True)
class TarRow:
    """One row of a tar: its key, and offset and size of each of its members by suffix."""

    key: str
    members: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Npy:
    """The npy member of a row's stream: `start` is the first byte of its values in the tar."""

    name: str
    head: bytes
    start: int
    frames: int
    width: int
    dtype: np.dtype[Any]
    sha256: str


def key_of(row_id: str) -> str:
    """Return the key of a row; `row_id_of` is the inverse."""
    return quote(row_id, safe="").replace(".", "%2E") or EMPTY_KEY


def row_id_of(key: str) -> str:
    return "" if key == EMPTY_KEY else unquote(key)


class WebDatasetFormat(Format):
    """A shard as a WebDataset tar; see the module."""

    suffix = ".tar"
    has_scales = False
    media_type = "application/x-tar"
    summary = "one WebDataset tar a shard, npy and json members; for training in order"
    integrity = "sha256 of every npy member, in the row's json; the tar's own header checksums"

    def write(
        self,
        path: Path,
        rows: Sequence[FeatureRow],
        streams: Sequence[StreamInfo],
        encoding: Encoding,
    ) -> None:
        names = [info.name for info in streams]
        if len({name.lower() for name in names}) < len(names):
            raise CommitError(
                f"WebDataset takes stream names in any case for one, got {names}: rename one"
            )
        infos = [described(info, has_scales=False) for info in streams]
        scales = {info.name: info.scale_factor for info in infos if info.scale_factor != 1.0}
        more = {"scale_factor": scales} if scales else {}
        scalars = row_table(rows, streams, encoding.extra_types)
        layouts = [layout_of(info) for info in streams]
        dtypes = {each.name: each.in_values().stored_dtype(encoding.dtype) for each in layouts}
        about = {
            "streams": [info.to_dict() for info in infos],
            COLUMNS: {each.name: [each.stored_width, dtypes[each.name]] for each in layouts},
            "attrs": encoding.attrs or {},
        }
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
            _add_json(tar, ABOUT, about)
            for number, row in enumerate(rows):
                key = key_of(row.row_id)
                hashes = {
                    each.name: _add_npy(
                        tar, f"{key}.{each.name}.npy", row, each, dtypes[each.name], path.parent
                    )
                    for each in layouts
                }
                (cells,) = scalars.slice(number, 1).to_pylist()
                _add_json(tar, f"{key}.json", {**cells, **more, HASHES: hashes})

    def digest(self, path: Path, streams: Sequence[StreamInfo]) -> ShardDigest:
        with path.open("rb") as file:
            shard = TarContents(file)
            facts = [shard.facts(row) for row in shard.rows]

            def digest_of(layout: StreamLayout) -> StreamDigest:
                width, dtype = shard.about[COLUMNS][layout.name]
                kind = layout.from_values(np.empty(0, dtype)).dtype.name
                npys = [shard.npy(row, layout.name, width, dtype) for row in shard.rows]
                blocks = (layout.from_values(piece) for npy in npys for piece in shard.pieces(npy))
                counts = [[fact[name] for fact in facts] for name in layout.place_columns[2:]]
                return digest_blocks(blocks, width, kind, [npy.frames for npy in npys], *counts)

            digests = {layout.name: digest_of(layout) for layout in map(layout_of, streams)}
        return ShardDigest(tuple(row_id_of(row.key) for row in shard.rows), digests)

    def open(self, layout: Layout, rel: str, promise: Promise, cache: BlockCache) -> ShardReader:
        return TarShard(layout, rel, promise, cache)

    def reading(self, paths: Sequence[str]) -> Sequence[str]:
        return ("import webdataset", f'ds = webdataset.WebDataset("{paths[0]}").decode()')


class TarContents:
    """The rows of a local, seekable tar, read from its headers; a CommitError if it is damaged."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file: Any = file
        self.rows: list[TarRow] = []
        self.about: dict[str, Any] = {}
        described = (0, 0)
        try:
            for _, member in tar_members(self._file):
                place = (member.offset_data, member.size)
                if member.name == ABOUT:
                    described = place
                    continue
                name = MEMBER.fullmatch(member.name)
                if name is None or not member.isreg():
                    raise refused(repr(member.name), "no member of a shard has this name")
                if not self.rows or self.rows[-1].key != name[1]:
                    self.rows.append(TarRow(name[1]))
                self.rows[-1].members[name[2]] = place
        except tarfile.TarError as error:
            raise refused("tar", str(error)) from error
        self.about = self._json(*described)

    def facts(self, row: TarRow) -> dict[str, Any]:
        return self._json(*row.members["json"])

    def _json(self, start: int, size: int) -> dict[str, Any]:
        self._file.seek(start)
        found: dict[str, Any] = loads_json(self._file.read(min(size, HELD_BYTES)), max_chars=None)
        return found

    def npy(self, row: TarRow, stream: str, width: int, dtype: str) -> Npy:
        """Read the header of a row's values; a CommitError if it is not as committed."""
        name = f"{stream}.npy"
        start, size = row.members[name]
        self._file.seek(start)
        if np.lib.format.read_magic(self._file) != (1, 0):
            raise refused(f"{row.key}.{name}", "expected version 1.0 of npy")
        shape, fortran, kind = np.lib.format.read_array_header_1_0(self._file)
        behind = self._file.tell()
        wanted = np.dtype(dtype).newbyteorder("<")
        fits = len(shape) == 2 and shape[1] == width and kind == wanted and not fortran
        if not fits or math.prod(shape) * wanted.itemsize != start + size - behind:
            raise refused(
                f"{row.key}.{name}",
                f"expected (n, {width}) {dtype} in {size} bytes, its header claims {shape} {kind}",
            )
        self._file.seek(start)
        head = self._file.read(behind - start)
        sha256 = self.facts(row)[HASHES][stream]
        return Npy(f"{row.key}.{name}", head, behind, shape[0], width, wanted, sha256)

    def pieces(self, npy: Npy) -> Iterator[np.ndarray]:
        """Yield the values in blocks of about `PIECE_BYTES`; then CommitError for a wrong hash."""
        digest, row_bytes = hashlib.sha256(npy.head), npy.width * npy.dtype.itemsize
        step = max(1, PIECE_BYTES // row_bytes)
        for first in range(0, npy.frames, step):
            self._file.seek(npy.start + first * row_bytes)
            piece = self._file.read(min(step, npy.frames - first) * row_bytes)
            digest.update(piece)
            yield np.frombuffer(piece, npy.dtype).reshape(-1, npy.width)
        if digest.hexdigest() != npy.sha256:
            raise refused(npy.name, "its sha256 is not the one in its row's json")


class TarShard:
    """A published tar, for reading at random; see `ShardReader`."""

    def __init__(self, layout: Layout, rel: str, promise: Promise, cache: BlockCache) -> None:
        self._rel, self._promise, self._cache = rel, promise, cache
        self._file = _local_copy(layout, rel)
        try:
            self._contents = TarContents(self._file)
            if len(self._contents.rows) != promise.rows:
                raise refused(
                    rel, f"expected {promise.rows} rows, it holds {len(self._contents.rows)}"
                )
        except BaseException:
            self.close()
            raise

    def read(self, stream: str, span: FrameSpan) -> np.ndarray:
        rows = self._contents.rows
        if span.row >= len(rows) or rows[span.row].key != key_of(span.row_id):
            there = row_id_of(rows[span.row].key) if span.row < len(rows) else None
            raise other_row(self._rel, span, there)
        key = (self._rel, stream, span.row)
        kept = self._cache.get(key)
        if kept is None:
            npy = self._contents.npy(rows[span.row], stream, *self._promise.columns[stream])
            if npy.frames > self._promise.frames[stream]:
                raise outside(self._rel, stream, self._promise.frames[stream], npy.frames)
            # The part of a row that is too large to keep is read alone.
            if npy.frames * npy.width * npy.dtype.itemsize > HELD_BYTES:
                if span.last > npy.frames:
                    raise outside(self._rel, stream, span.last, npy.frames)
                return self._frames(npy, span.first, span.last)
            kept = self._cache.put(key, (self._frames(npy, 0, npy.frames),))
        (values,) = kept
        if span.last > len(values):
            raise outside(self._rel, stream, span.last, len(values))
        return values[span.first : span.last].copy()

    def close(self) -> None:
        self._file.close()

    def _frames(self, npy: Npy, first: int, last: int) -> np.ndarray:
        found = np.empty((last - first, npy.width), npy.dtype.newbyteorder("="))
        at = 0
        for piece in self._contents.pieces(npy):
            low, high = max(first, at), min(last, at + len(piece))
            if low < high:
                found[low - first : high - first] = piece[low - at : high - at]
            at += len(piece)
        return found


def _local_copy(layout: Layout, rel: str) -> IO[bytes]:
    if layout.is_local:
        return layout.open_file(rel)
    file = tempfile.TemporaryFile(dir=own_folder())
    try:
        with layout.open_file(rel) as stream:
            shutil.copyfileobj(stream, file, PIECE_BYTES)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def _add(tar: tarfile.TarFile, name: str, content: Any, size: int) -> None:
    member = tarfile.TarInfo(name)  # of nobody, in 1970
    member.size = size
    tar.addfile(member, content)


def _add_json(tar: tarfile.TarFile, name: str, value: Mapping[str, Any]) -> None:
    content = json.dumps(json_value(value), default=plain_json, allow_nan=False).encode()
    _add(tar, name, io.BytesIO(content), len(content))


def _add_npy(
    tar: tarfile.TarFile, name: str, row: FeatureRow, layout: StreamLayout, kind: str, folder: Path
) -> str:
    values = row.streams[layout.name]
    dtype = np.dtype(kind).newbyteorder("<")
    header = {"descr": dtype.str, "fortran_order": False, "shape": (len(values), values.shape[1])}
    digest = hashlib.sha256()
    with tempfile.SpooledTemporaryFile(HELD_BYTES, dir=str(folder)) as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.seek(0)
        digest.update(file.read())
        for piece in pieces(values):
            held = np.ascontiguousarray(layout.to_values(piece), dtype)
            block = held.reshape(-1).view(np.uint8).data
            digest.update(block)
            file.write(block)
        size = file.tell()
        file.seek(0)
        _add(tar, name, file, size)
    return digest.hexdigest()


WEBDATASET = WebDatasetFormat()
