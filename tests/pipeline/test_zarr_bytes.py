"""Our Zarr writer against zarr-python, byte by byte, and what zarr-python reads of our stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr

from amtcore.features.base import StreamInfo
from earmill.pipeline.formats.digest import digest_rows, same_bits
from earmill.pipeline.formats.dtypes import Caster, as_stored
from earmill.pipeline.formats.format import Encoding
from earmill.pipeline.formats.registry import format_of, read_back
from earmill.pipeline.formats.rows import FeatureRow, Spilled
from earmill.pipeline.formats.zarr import write as zarr_sink
from earmill.pipeline.worker.feature_values import stored
from tests.pipeline import event_data
from tests.pipeline.outputs import STREAMS, make_row, stream
from tests.pipeline.zarr_reference import write_with_zarr

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
    """Enough for frames of blosc that kernels make, of more than one block."""
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


@pytest.fixture(params=[2**20, 160], ids=["1 MB", "160 bytes"])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zarr_sink, "CHUNK_BYTES", request.param)
    monkeypatch.setattr(zarr_sink, "CHUNKS_PER_OBJECT", 3)


def contents(path: Path) -> Mapping[str, bytes]:
    files = (file for file in path.rglob("*") if file.is_file())
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def write(path: Path, case: str) -> Path:
    rows, streams, dtype = CASES[case]
    ZARR.write(path, rows, streams, Encoding(dtype or "float16", attrs=ATTRS))
    return path


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("chunk_bytes")
def test_every_byte_is_the_one_that_zarr_writes(case: str, tmp_path: Path) -> None:
    rows, streams, dtype = CASES[case]
    write_with_zarr(rows, streams, tmp_path / "theirs", ATTRS, dtype or "float16")
    ours, theirs = contents(write(tmp_path / "ours", case)), contents(tmp_path / "theirs")
    assert sorted(ours) == sorted(theirs)
    assert [name for name, content in ours.items() if content != theirs[name]] == []


@pytest.mark.parametrize("case", ["float16", "float32", "events", "int8"])
@pytest.mark.usefixtures("chunk_bytes")
def test_zarr_reads_our_stores(case: str, tmp_path: Path) -> None:
    rows, streams, _ = CASES[case]
    group = zarr.open_group(write(tmp_path / "ours", case), mode="r")
    for info in streams:
        wanted = np.concatenate([row.streams[info.name] for row in rows])
        assert same_bits([group[f"{info.name}/values"][:]], [wanted])
        assert group[f"{info.name}/row_id"][:].tolist() == [row.row_id for row in rows]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("chunk_bytes")
def test_a_store_is_compared_with_its_rows(case: str, tmp_path: Path) -> None:
    rows, streams, dtype = CASES[case]
    path, digest = write(tmp_path / "ours", case), digest_rows(rows, streams, dtype or "float16")
    assert ZARR.problems(path, rows, streams, digest) == []
    assert read_back("zarr", path, streams) == digest


def changed(row: FeatureRow, at: int) -> FeatureRow:
    """One bit of one value is another."""
    values = row.streams["modulation"].copy()
    values.reshape(-1).view(np.uint16)[at] ^= 1
    return replace(row, streams={**row.streams, "modulation": values})


@pytest.mark.usefixtures("chunk_bytes")
def test_a_store_of_other_rows_is_told(tmp_path: Path) -> None:
    path, (rows, streams, dtype) = write(tmp_path / "ours", "float16"), CASES["float16"]
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


@pytest.mark.parametrize(
    ("blocks", "wanted", "same"),
    [
        ([[1, 2], [3]], [[1], [2, 3]], True),
        ([], [[]], True),
        ([[1, 2], []], [[1, 2]], True),
        ([[1, 2]], [[1, 2], [3]], False),
        ([[1, 2], [3]], [[1, 2]], False),
        ([[1, 2, 3]], [[1, 2]], False),
        ([[1, 3]], [[1, 2]], False),
        ([[0.0]], [[-0.0]], False),
        ([[np.nan]], [[np.nan]], True),
    ],
)
def test_blocks_are_the_same_bits_however_they_are_cut(
    blocks: list[list[float]], wanted: list[list[float]], same: bool
) -> None:
    def arrays(parts: list[list[float]]) -> list[np.ndarray]:
        return [np.array(part, np.float32) for part in parts]

    assert same_bits(arrays(blocks), arrays(wanted)) is same
