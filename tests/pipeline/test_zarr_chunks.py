"""Chunks of a Zarr store: what is decoded, and how every kind of damage is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zarr
from numcodecs import Blosc, VLenUTF8, Zstd

from earmill import open_features
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.block_cache import join_frames
from earmill.pipeline.formats.format import Promise
from earmill.pipeline.formats.half import BLOCK, widen
from earmill.pipeline.formats.rows import OutFile
from earmill.pipeline.formats.values import converted
from earmill.pipeline.formats.zarr.arrays import ChunkCodec, read_vector
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.reader_data import make_row
from tests.pipeline.test_shard_files import root as root  # one shard over many objects
from tests.pipeline.test_trust import edit_json, inner_codecs, recommit, store_of, values_of

OBJECT = "modulation/values/c/0/0"
CHUNKS = 3
INDEX_BYTES = 16 * CHUNKS + 4


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    return shutil.copytree(root, tmp_path / "copy")


def crc(body: bytes) -> bytes:
    return google_crc32c.value(body).to_bytes(4, "little")


def first(place: Path) -> np.ndarray:
    return open_features(place, format="zarr", streams=["modulation"])[0].features["modulation"]


def replace_index(path: Path, chunk: int, offset: int, nbytes: int) -> None:
    """Point one chunk elsewhere, with the checksum of an index that says so."""
    content = path.read_bytes()
    index = np.frombuffer(content[-INDEX_BYTES:-4], "<u8").reshape(-1, 2).copy()
    index[chunk] = offset, nbytes
    path.write_bytes(content[:-INDEX_BYTES] + index.tobytes() + crc(index.tobytes()))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), f"{OBJECT} is missing although it is committed"),
        (lambda path: path.write_bytes(b""), r"expected 52 bytes from byte .*ends after"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"ends after \d+; it is damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), r"the file ends after"),
        (lambda path: path.write_bytes(path.read_bytes()[4:]), r"the file ends after"),
        (lambda path: replace_index(path, 0, 2**64 - 1, 2**64 - 1), "chunk 0 is missing although"),
        (lambda path: replace_index(path, 1, 10**9, 5), "index of chunks points out of the object"),
        (lambda path: replace_index(path, 1, 2**64 - 9, 20), "points out of the object"),
        (lambda path: replace_index(path, 0, 0, 3), "the CRC-32C of a chunk does not fit its"),
        (lambda path: replace_index(path, 1, 0, 30), "the CRC-32C of a chunk does not fit its"),
    ],
)
def test_damage_to_an_object_is_told(
    copy: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(store_of(copy) / OBJECT)
    with pytest.raises(CommitError, match=message) as caught:
        first(copy)
    assert "row 'speaker 0/clip_0000.wav', stream modulation" in str(caught.value)
    assert "earmill verify" in str(caught.value) and "\n" not in str(caught.value)


def test_an_object_that_no_commit_names_is_not_read(copy: Path) -> None:
    def forget(record: Any) -> None:
        record["files"] = [one for one in record["files"] if not one["path"].endswith("c/1/0")]

    edit_json(copy / "commits/00000.json", forget)
    with pytest.raises(CommitError, match="committed objects cannot hold"):
        first(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: inner_codecs(root)[1]["configuration"].update(cname="zlib"), "got"),
        (lambda root: inner_codecs(root).pop(0), "expected bytes, then blosc or zstd"),
        (
            lambda root: inner_codecs(root)[0]["configuration"].update(endian="big"),
            "expected bytes",
        ),
        (
            lambda root: values_of(root)["codecs"][0]["configuration"].update(
                index_location="start"
            ),
            "an index at their end",
        ),
        (
            lambda root: values_of(root)["chunk_key_encoding"]["configuration"].update(
                separator="."
            ),
            "an index at their end",
        ),
    ],
)
def test_what_zarr_knows_but_our_writers_do_not_write_is_refused(
    copy: Path, change: Callable[[Any], None], message: str
) -> None:
    path = store_of(copy) / "zarr.json"
    edit_json(path, change)
    recommit(copy, path)
    with pytest.raises(CommitError, match=message):
        first(copy)


@pytest.mark.parametrize("compressor", ["blosc", "zstd", ""])
def test_a_frame_of_another_size_is_refused_before_it_is_decoded(compressor: str) -> None:
    encode: Any = {"blosc": Blosc("lz4"), "zstd": Zstd(3)}.get(compressor)
    for size in (1, 255, 256, 300, 70_000, 2**20):
        values = np.arange(size, dtype=np.uint8)
        body = bytes(values) if encode is None else bytes(encode.encode(bytes(values)))
        stored = np.frombuffer(body + crc(body), np.uint8)
        codec = ChunkCodec(compressor, True)
        for least, most in ((0, 2**20), (size, size)):
            np.testing.assert_array_equal(codec.decode(stored, least, most), values)
        for wrong in (size + 1, max(0, size - 1)):
            if wrong != size:
                with pytest.raises(CommitError, match=f"of {wrong} bytes, got one of {size}"):
                    codec.decode(stored, wrong, wrong)
    with pytest.raises(CommitError, match="of 99 bytes, got one of"):
        codec.decode(stored, 0, 99)


@pytest.mark.parametrize("compressor", ["blosc", "zstd"])
@pytest.mark.parametrize("body", [b"", b"12345", bytes(100)])
def test_bytes_that_are_no_frame_are_refused(compressor: str, body: bytes) -> None:
    stored = np.frombuffer(body + crc(body), np.uint8)
    with pytest.raises(CommitError, match=rf"no {compressor} frame"):
        ChunkCodec(compressor, True).decode(stored, 0, 1000)


def test_row_ids_are_as_many_as_the_metadata_claims(copy: Path) -> None:
    """The number of texts is checked before memory for them is taken."""
    path = store_of(copy) / "modulation/row_id/c/0"
    committed = OutFile(path.relative_to(copy).as_posix(), 0, "")
    array = {"shape": [3], "codecs": [{"name": "vlen-utf8"}, {"name": "crc32c"}]}
    texts = ["", "ü", "a/b.wav" * 40]
    content = bytes(VLenUTF8().encode(np.array(texts, object)))

    def read(content: bytes) -> list[str]:
        path.write_bytes(content + crc(content))
        promise = Promise(3, {}, {}, {committed.path: replace(committed, bytes=len(content) + 4)})
        rel = committed.path.removesuffix("/c/0")
        found: list[str] = read_vector(Layout.open(copy), rel, array, promise)
        return found

    assert read(content) == texts
    for wrong in (b"\2" + content[1:], b"\xff\xff\xff\xff"):
        with pytest.raises(CommitError, match="another number"):
            read(wrong)
    for short in (content[:-1], content[:2]):
        with pytest.raises(ValueError, match="truncated"):
            read(short)


def test_zarr_reads_the_same_numbers(root: Path) -> None:
    """The store is what it says it is: an ordinary one, compressed by blosc with shuffled bits."""
    values = zarr.open_group(store_of(root), mode="r")["modulation/values"]
    rows = [row.features["modulation"] for row in open_features(root, format="zarr")]
    np.testing.assert_array_equal(values[:], np.concatenate(rows))
    metadata = json.loads((store_of(root) / "modulation/values/zarr.json").read_text())
    _, compressor, checksum = metadata["codecs"][0]["configuration"]["codecs"]
    assert checksum["name"] == "crc32c" and compressor["name"] == "blosc"
    kept = compressor["configuration"]
    assert (kept["cname"], kept["shuffle"], kept["typesize"]) == (
        "lz4",
        "bitshuffle",
        2,
    )
    np.testing.assert_array_equal(rows[0], make_row(0, 1.0).streams["modulation"])


@pytest.mark.parametrize("scale", [1.0, 2.0**-8, 2.0**-16])
def test_every_float16_becomes_the_same_float32(scale: float) -> None:
    """All 65536 of them, NaN and infinities included, in blocks with and without those."""
    numbers = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = numbers[np.isfinite(numbers)]
    for values in (
        numbers,
        finite,
        np.resize(finite, (2 * BLOCK // 3, 3)),
        finite[::2],
        finite[:0],
    ):
        with np.errstate(invalid="ignore"):
            wanted = values.astype(np.float32) * np.float32(scale)
        found = converted(values, np.dtype(np.float32), scale)
        assert found.shape == values.shape and found.flags.owndata
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))
        if values is not numbers:
            half = converted(values, np.dtype(np.float16), scale)
            np.testing.assert_array_equal(half, wanted.astype(np.float16))


def test_pieces_must_be_what_was_asked_for() -> None:
    """Memory of frames that nobody gave would come out as features."""
    whole = np.arange(12, dtype=np.float16).reshape(6, 2)
    pieces = [(4, whole[4:]), (0, whole[:4])]
    for dtype in (np.float16, np.float32, np.float64):
        found = join_frames(pieces, (6, 2), np.dtype(dtype), 0.5)
        np.testing.assert_array_equal(found, 0.5 * whole.astype(dtype))
    for some in (pieces[:1], [], [*pieces, (0, whole[:1])]):
        with pytest.raises(CommitError, match="expected 6 frames, the file gave"):
            join_frames(some, (6, 2), np.dtype(np.float32))
    with pytest.raises(ValueError, match="in C order"):
        widen(whole, np.empty((6, 4), np.float32)[:, ::2])
