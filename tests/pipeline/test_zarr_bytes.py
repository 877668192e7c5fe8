"""The bytes of a Zarr store, what zarr-python reads of it, and how it is compared with its rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import zarr

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.formats.digest import digest_rows
from earmill.pipeline.formats.format import Encoding, format_of
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.formats.values import Caster, Spilled, as_stored
from earmill.pipeline.formats.zarr import write as zarr_sink
from earmill.pipeline.worker.extraction import stored
from tests.pipeline import event_data
from tests.pipeline.outputs import STREAMS, make_row, stream

ATTRS = {"spec_sha256": "ab" * 32, "models": ["dau1997"], "calibration": {"ü": 0.1, "a": None}}
# A full object and a begun one, of full chunks and a begun one.
LENGTHS = {"a/é ß 音.wav": 30, "b": 1, "empty": 0, "c#ch1": 95}
ZARR = format_of("zarr")

Rows = Sequence[FeatureRow]


def frames(dtype: str) -> Rows:
    return [make_row(row_id, n, dtype=dtype) for row_id, n in LENGTHS.items()]


def silence() -> Rows:
    zeros = {info.name: np.full((40, info.width), -0.0, np.float16) for info in STREAMS}
    return [replace(make_row("silence"), streams=zeros)]


def long() -> Rows:
    """Enough for frames of blosc of more than one block."""
    return [make_row("long", 30_000, dtype="float16")]


def spilled() -> Rows:
    row, held = make_row("long", 77), {}
    for info in STREAMS:
        held[info.name] = Spilled("float16", info.width)
        held[info.name].append(row.streams[info.name])
    return [replace(row, streams=held)]


def int8() -> Rows:
    clips = [make_row(row_id, n, dtype="float32") for row_id, n in LENGTHS.items()]
    held = [stored(clip.streams, Caster("int8", INT8_STREAMS)) for clip in clips]
    return [
        replace(clip, streams=each.streams, steps=each.steps)
        for clip, each in zip(clips, held, strict=True)
    ]


INT8_STREAMS = as_stored(STREAMS, "int8")
CASES: dict[str, tuple[Rows, Sequence[StreamInfo], str]] = {
    "float16": (frames("float16"), STREAMS, "float16"),
    "float32": (frames("float32"), STREAMS, "float32"),
    "silence": (silence(), STREAMS, "float16"),
    "long": (long(), STREAMS, "float16"),
    "spilled": (spilled(), STREAMS, "float16"),
    "events": (event_data.spike_rows(), event_data.STREAMS, "float16"),
    "int8": (int8(), INT8_STREAMS, "int8"),
    "nothing": ([], STREAMS, "float16"),
    "scaled": (frames("float16"), [replace(each, scale_factor=2.0**-8) for each in STREAMS], ""),
    "whole clips": (frames("float16"), [stream(rate=0.0), STREAMS[1]], ""),
}


# A store of 60,000 files takes 10 CPU seconds.
SHORT = pytest.mark.parametrize(
    ("case", "chunk_bytes"),
    [
        pytest.param(case, size, marks=[pytest.mark.long] * ((case, size) == ("long", "160 bytes")))
        for case in CASES
        for size in ("1 MB", "160 bytes")
    ],
    indirect=["chunk_bytes"],
)


@pytest.fixture(params=["1 MB", "160 bytes"])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    size = {"1 MB": 2**20, "160 bytes": 160}[request.param]
    monkeypatch.setattr(zarr_sink, "CHUNK_BYTES", size)
    monkeypatch.setattr(zarr_sink, "CHUNKS_PER_OBJECT", 3)
    return str(size)


def contents(path: Path) -> Mapping[str, bytes]:
    files = (file for file in path.rglob("*") if file.is_file())
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def write(path: Path, case: str) -> Path:
    rows, streams, dtype = CASES[case]
    ZARR.write(path, rows, streams, Encoding(dtype or "float16", attrs=ATTRS))
    return path


# sha256 of all files of a store, with chunks of 1 MB and of 160 bytes. A job that is resumed by a
# later release writes the bytes that an uninterrupted job writes.
PINNED = {
    ("events", "1048576"): "745b2a1623ccf387e9399fbe37b49b1ae5e7741d9d3725f3fdcfba200e63fc65",
    ("events", "160"): "ad1ca2287046c0c6e023bc6dbd961fc90d317d5970afb9d11c4b7947c7475c90",
    ("float16", "1048576"): "d52395278f8d40594f9550d076bcf8e93efee222052541519ddefb5f6941399b",
    ("float16", "160"): "973b2c30a93de5349f47f9465482fa11e77876fae2ab7689dc96e0ec565f76aa",
    ("float32", "1048576"): "5a0133d1c9b0706ff1a270aa11397c3fb65a8a182312cc7246efcd4c6e93f8d5",
    ("float32", "160"): "c07633c64c04650e38f7f8344c369a58a380166fafaa0609a8cca0e6cf1ba8cb",
    ("int8", "1048576"): "a985e4757a9c5ac7777cedc5b9a3034fb4bfb8ebaab6ac31e661455579fc3408",
    ("int8", "160"): "2c5e3fb6890597ccd8ef8f557510908ee6a5011ac1eac351d2f7fda5f3f70564",
    ("long", "1048576"): "5f841ff108d37d64e292c9e11ac4ef1b9d401fbc873766f19be9bc7cd0fd5515",
    ("long", "160"): "692dd72fbafbe02f519163e45bba05411d2ba27b62df9579f8f49caa8f5602b0",
    ("nothing", "1048576"): "275e7c33689d846379e42a595ab09db92893788cc985e65a1c9ee8038e0a3a50",
    ("nothing", "160"): "275e7c33689d846379e42a595ab09db92893788cc985e65a1c9ee8038e0a3a50",
    ("scaled", "1048576"): "41860da1010bc5cbe2e9f977d50d90dd31b2f4aa47b2d77c8842b41e5b14a26c",
    ("scaled", "160"): "6bf4937e963aabe1a0d2075dfb4ee1b8df1847bb22da5cffb2c40804bb60a087",
    ("silence", "1048576"): "e82b1747d1a0283a4e4ef78530ac8765230d6c9db196da6c1d65ca29739870c1",
    ("silence", "160"): "9b0c600791a33bfc18db98f2fcd50bbd459384a00da1599a65549e92d88e87cb",
    ("spilled", "1048576"): "4fc9724a2a5299b0d208b8f4c3e9d011a93088abd444070dfe8b91b173c9ac92",
    ("spilled", "160"): "01fcab05d23e33250a8780c4fe66823cc112a1b60c63fa53c6e7017826f57555",
    ("whole clips", "1048576"): "323b9bfb0b501eb1f9e9736642ef30a6b2f428e7f1f54a8fabd78ea0183f4f4b",
    ("whole clips", "160"): "8154c7fc9a8e6a7024aee4c08c9c2d0fb3b19a10a253ec8ea4e4cedebe8def06",
}


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(contents(path).items()):
        digest.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[Path]]:
    """Return a function: a case and the bytes of a chunk to two stores, which are only read."""

    @cache
    def written(case: str, chunk_bytes: str) -> list[Path]:
        folder = tmp_path_factory.mktemp("stores")
        with ThreadPoolExecutor(2) as pool:  # a worker writes two shards at a time
            return [*pool.map(lambda name: write(folder / name, case), ("a", "b"))]

    return written


@SHORT
def test_equal_rows_are_equal_bytes_in_every_process_and_release(
    case: str, twins: Callable[[str, str], list[Path]], chunk_bytes: str
) -> None:
    found = [sha256_of(store) for store in twins(case, chunk_bytes)]
    assert found == 2 * [PINNED[case, chunk_bytes]]


@pytest.mark.parametrize("case", ["float16", "float32", "events", "int8"])
def test_zarr_reads_our_stores(
    case: str, twins: Callable[[str, str], list[Path]], chunk_bytes: str
) -> None:
    rows, streams, _ = CASES[case]
    group = zarr.open_group(twins(case, chunk_bytes)[0], mode="r")
    for info in streams:
        wanted = np.concatenate([row.streams[info.name] for row in rows])
        values = group[f"{info.name}/values"][:]
        assert values.dtype == wanted.dtype and values.tobytes() == wanted.tobytes()
        assert group[f"{info.name}/row_id"][:].tolist() == [row.row_id for row in rows]


@SHORT
def test_a_store_is_compared_with_its_rows(
    case: str, twins: Callable[[str, str], list[Path]], chunk_bytes: str
) -> None:
    rows, streams, dtype = CASES[case]
    path, digest = twins(case, chunk_bytes)[0], digest_rows(rows, streams, dtype or "float16")
    assert ZARR.problems(path, rows, streams, digest) == []
    assert format_of("zarr").digest(path, streams) == digest


def changed(row: FeatureRow, at: int) -> FeatureRow:
    """One bit of one value is another."""
    values = row.streams["modulation"].copy()
    values.reshape(-1).view(np.uint16)[at] ^= 1
    return replace(row, streams={**row.streams, "modulation": values})


def test_a_store_of_other_rows_is_told(
    twins: Callable[[str, str], list[Path]], chunk_bytes: str
) -> None:
    path, (rows, streams, dtype) = twins("float16", chunk_bytes)[0], CASES["float16"]
    a, b, c, d = rows
    another = "stream modulation: the values read back differ from those written"
    wrong = {
        "a bit of the first": ([changed(a, 0), b, c, d], [another]),
        "a bit of the last": ([a, b, c, changed(d, -1)], [another]),
        "order": ([a, c, b, d], ["expected 4 row ids, read back 'b' for 'empty' at row 1"]),
        "id": ([a, replace(b, row_id="x"), c, d], ["expected 4 row ids, read back 'b' for 'x'"]),
        "one less": ([a, b, c], ["expected 3 row ids, read back 4"]),
    }
    for case, (others, found) in wrong.items():
        told = ZARR.problems(path, others, streams, digest_rows(others, streams, dtype))
        assert [line.startswith(found[0]) for line in told[:1]] == [True], case
