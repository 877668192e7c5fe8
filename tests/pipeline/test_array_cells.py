"""Columns that hold arrays of samples: read at their rate and scale, or refused before work."""

from __future__ import annotations

import gc
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from datasets import Array2D, Dataset, Features

from earmill import open_features
from earmill.pipeline.common.errors import MissingPackageError, RowError, SourceError
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.sources import open_source
from earmill.pipeline.sources.audio_cells import wav_of
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.source import FilesSpec, HfSpec
from tests.pipeline.again_jobs import _no_ray, run_here  # noqa: F401
from tests.pipeline.audio_factory import clip
from tests.pipeline.hf_data import BOTH, private_cache  # noqa: F401
from tests.pipeline.whole_clips import decode
from tests.short import spread

HZ = 16000
TONE = 0.5 * np.sin(np.arange(1600) / 10)
PCM = np.round(32767 * TONE).astype(np.int16)


def struct(array: pa.DataType, rate: pa.DataType | None = None, **more: pa.DataType) -> pa.DataType:
    fields = {**more, "array": array, "sampling_rate": rate or pa.int64()}
    return pa.struct(list(fields.items()))


def cells(values: Any, kind: pa.DataType, rows: int = 2) -> pa.Array:
    cell = {"array": values, "sampling_rate": HZ} if pa.types.is_struct(kind) else values
    return pa.array([cell] * rows, kind)


def lists(kind: pa.DataType) -> list[pa.DataType]:
    return [pa.list_(kind), pa.large_list(kind), pa.list_(kind, len(TONE))]


COLUMNS = {
    str(kind): cells(TONE.tolist(), kind)
    for of in (pa.float32(), pa.float64())
    for plain in lists(of)
    for kind in (plain, struct(plain), struct(plain, pa.int32(), path=pa.string()))
}
COLUMNS |= {
    "int16": cells(PCM.tolist(), pa.list_(pa.int16())),
    "int16 with a rate": cells(PCM.tolist(), struct(pa.list_(pa.int16()))),
    "int32": cells((PCM.astype(np.int32) << 16).tolist(), pa.list_(pa.int32())),
    "int8": cells((PCM >> 8).tolist(), pa.list_(pa.int8())),
    "channels": cells([TONE.tolist(), (-TONE).tolist()], pa.list_(pa.list_(pa.float32()))),
    "channels with a rate": cells(
        [TONE.tolist(), (-TONE).tolist()], struct(pa.list_(pa.list_(pa.float64())))
    ),
}


def write(folder: Path, column: pa.Array) -> dict[str, Path]:
    """The column as a Parquet file and as a folder of `save_to_disk`."""
    folder.mkdir(exist_ok=True)
    table = pa.table({"audio": column, "n": list(range(len(column)))})
    pq.write_table(table, folder / "a.parquet")
    Dataset(table).save_to_disk(folder / "saved")
    return {"parquet": folder / "a.parquet", "saved": folder / "saved"}


def opened(uri: Path, hz: int | None = None, **options: Any) -> Any:
    split = "train" if uri.suffix else None
    return open_source(HfSpec(kind="hf", uri=str(uri), split=split, **options), hz)


def read(source: Any) -> list[Any]:
    """Every row decoded, or the class of its error."""
    found: list[Any] = []
    for item, stream in source.fetch(list(source.items())):
        try:
            if isinstance(stream, RowError):
                raise stream
            with stream:
                found.append(decode(stream, uri=item.uri, channels="each"))
        except RowError as error:
            found.append(error.error_class)
    return found


@BOTH
@pytest.mark.parametrize(("name", "where"), spread(4, COLUMNS, ["parquet", "saved"]))
def test_an_array_is_read_at_its_rate_and_scale(
    name: str, where: str, streaming: bool, tmp_path: Path
) -> None:
    uri = write(tmp_path / "in", COLUMNS[name])[where]
    hz = None if pa.types.is_struct(COLUMNS[name].type) else HZ
    source = opened(uri, hz, streaming=streaming)
    channels = 2 if "channels" in name else 1
    for decoded in read(source):
        assert decoded.facts.rate_hz == HZ
        assert decoded.waveform.shape == (channels, len(TONE))
        exact = PCM / 32768 if name.startswith("int") else TONE
        exact = (PCM >> 8) / 128 if name == "int8" else exact
        np.testing.assert_array_equal(decoded.waveform[0], exact.astype(np.float32))
        if channels == 2:
            np.testing.assert_array_equal(decoded.waveform[1], -exact.astype(np.float32))
    items = list(source.items())
    estimated = streaming and where == "parquet"
    factor = channels if estimated else 1
    assert [item.seconds for item in items] == pytest.approx([factor * len(TONE) / HZ] * 2)
    assert [item.estimated for item in items] == [estimated] * 2
    assert [item.extra for item in items] == [{"n": 0}, {"n": 1}]


@BOTH
def test_a_two_dimensional_feature_of_datasets(streaming: bool, tmp_path: Path) -> None:
    features = Features({"audio": Array2D((2, len(TONE)), "float32")})
    data = np.stack([TONE, -TONE]).astype(np.float32)
    table = Dataset.from_dict({"audio": [data, data]}, features=features)
    table.save_to_disk(tmp_path / "saved")
    table.to_parquet(str(tmp_path / "a.parquet"))
    for uri in (tmp_path / "saved", tmp_path / "a.parquet"):
        for decoded in read(opened(uri, HZ, streaming=streaming)):
            np.testing.assert_array_equal(decoded.waveform, data)


@BOTH
@pytest.mark.parametrize("where", ["parquet", "saved"])
def test_what_is_wrong_with_a_cell_costs_its_row(
    where: str, streaming: bool, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    for folder in (tmp_path / "in", tmp_path / "in/saved"):
        folder.mkdir(exist_ok=True)
    good = {"array": TONE.tolist(), "sampling_rate": HZ}
    rows = [
        (good, None),
        (None, "unreadable"),
        ({"array": None, "sampling_rate": HZ}, "unreadable"),
        ({"array": [], "sampling_rate": HZ}, "zero_length"),
        ({"array": [0.5, float("nan")], "sampling_rate": HZ}, "non_finite"),
        ({"array": [0.5, None], "sampling_rate": HZ}, "not_audio"),
        ({"array": [0.5], "sampling_rate": None}, "sample_rate"),
        ({"array": [0.5], "sampling_rate": 0}, "sample_rate"),
        ({"array": [0.5], "sampling_rate": -HZ}, "sample_rate"),
        ({"array": None, "path": "there.wav"}, None),
        ({"array": TONE.tolist(), "path": "gone.wav", "sampling_rate": HZ}, None),
        (good, None),
    ]
    kind = struct(pa.list_(pa.float32()), path=pa.string())
    uris = write(tmp_path / "in", pa.array([cell for cell, _ in rows], kind))
    for folder in (tmp_path / "in", uris["saved"]):
        (folder / "there.wav").write_bytes(clip("wav", 0.1))
    found = read(opened(uris[where], streaming=streaming))
    classes = [one if isinstance(one, str) else None for one in found]
    assert classes == [error_class for _, error_class in rows]


@BOTH
def test_channels_that_are_none(streaming: bool, tmp_path: Path) -> None:
    """Lists of other lengths, and (samples, channels), which would be 1600 channels."""
    rows = [
        [TONE.tolist(), TONE[:-1].tolist()],
        [TONE.tolist(), None],
        [[value, value] for value in TONE.tolist()],
        [[]],
        [TONE.tolist()],
        [],
    ]
    column = pa.array(rows, pa.list_(pa.list_(pa.float32())))
    found = read(opened(write(tmp_path / "in", column)["parquet"], HZ, streaming=streaming))
    assert found[:4] == ["not_audio"] * 4
    assert found[4].waveform.shape == (1, len(TONE))
    assert found[5:] == ["zero_length"]


REFUSED = {
    "list<float>": (cells(TONE.tolist(), pa.list_(pa.float32())), r"set audio\.array_rate_hz"),
    "list<int16>": (cells(PCM.tolist(), pa.list_(pa.int16())), r"set audio\.array_rate_hz"),
    "no rate": (
        pa.array([{"array": [0.5], "path": None}] * 2),
        r"struct<.*>: .*set audio\.array_rate_hz",
    ),
    "list<int64>": (
        cells(PCM.tolist(), struct(pa.list_(pa.int64()))),
        "full scale of int64 cannot be told: cast it to int16, int32 or float32",
    ),
    "list<uint8>": (cells([1, 2], pa.list_(pa.uint8())), "full scale of uint8 .*cast it"),
    "several clips": (
        cells([{"bytes": b"x", "path": "a"}], pa.list_(pa.struct([("bytes", pa.binary())]))),
        r"list<.*struct<bytes: binary>>: .*of several clips a row make as many rows",
    ),
    "texts": (cells(["a.wav"], pa.list_(pa.string())), "of several clips a row"),
    "cubes": (cells([[[0.5]]], pa.list_(pa.list_(pa.list_(pa.float32())))), "of several clips"),
    "booleans": (cells([True], pa.list_(pa.bool_())), "list<.*bool>: expected the bytes"),
    "numbers": (pa.array([1, 2]), r"int64: expected .*source\.audio_column"),
    "other fields": (pa.array([{"a": 1}] * 2), r"struct<a: int64>: expected .*audio_column"),
}


@BOTH
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_before_work(
    name: str, streaming: bool, tmp_path: Path
) -> None:
    column, expected = REFUSED[name]
    for uri in write(tmp_path / "in", column).values():
        with pytest.raises(SourceError, match=f"column 'audio' holds .*{expected}") as caught:
            opened(uri, streaming=streaming)
        assert str(caught.value).startswith(f"source {uri}: ")
        assert "\n" not in str(caught.value)


@BOTH
def test_paths_beside_arrays_of_nothing(streaming: bool, tmp_path: Path) -> None:
    """`{path, array: null}`, as datasets are shipped whose arrays were dropped."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/x.wav").write_bytes(clip("wav", 0.2))
    column = pa.array(
        [{"path": "x.wav", "array": None}, {"path": "y.wav", "array": None}],
        pa.struct([("path", pa.string()), ("array", pa.null())]),
    )
    uri = write(tmp_path / "in", column)["parquet"]
    source = opened(uri, streaming=streaming)
    good, missing = read(source)
    assert good.facts.seconds == pytest.approx(0.2, abs=1e-4) and missing == "unreadable"
    assert (source.missing, source.first_missing) == (1, str(tmp_path / "in/y.wav"))


def test_a_table_whose_paths_are_missing_says_so(tmp_path: Path) -> None:
    pq.write_table(pa.table({"audio": ["x.wav", "y.wav"]}), tmp_path / "a.parquet")
    source = {"kind": "hf", "uri": str(tmp_path / "a.parquet"), "split": "train"}
    job = {"source": source, "extract": [{"model": "m"}], "output": {"uri": "o"}}
    spec = JobSpec.load(job)
    plan = make_plan(open_source(spec.source), spec)
    assert plan.notes[-1].startswith("2 of 2 rows name a file that cannot be found, first ")


def test_the_wav_of_an_array_is_what_others_read(tmp_path: Path) -> None:
    for name, subtype in (("float", "FLOAT"), ("double", "DOUBLE"), ("int16", "PCM_16")):
        of = {"float": pa.float32(), "double": pa.float64(), "int16": pa.int16()}[name]
        values = PCM if name == "int16" else TONE
        (cell,) = cells(values.tolist(), pa.list_(of), 1)
        content = wav_of(cell, HZ, "x")
        assert content == wav_of(cell, float(HZ), "x")
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            assert (file.samplerate, file.channels, file.subtype) == (HZ, 1, subtype)
            np.testing.assert_array_equal(
                file.read(), PCM / 32768 if name == "int16" else (TONE.astype(of.to_pandas_dtype()))
            )


def test_the_rate_is_for_arrays_alone(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(clip("wav", 0.1))
    with pytest.raises(SourceError, match=r"audio\.array_rate_hz: expected .*got kind: files"):
        open_source(FilesSpec(kind="files", uri=str(tmp_path)), HZ)


def test_a_job_of_arrays_has_the_features_of_its_files(tmp_path: Path, go: Any) -> None:
    """The rate reaches the workers; a job without it has the hash it had."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(0, 0.1, HZ // 2).astype(np.float32) for _ in range(3)]
    (tmp_path / "files").mkdir()
    for number, array in enumerate(arrays):
        soundfile.write(tmp_path / f"files/{number}.wav", array, HZ, subtype="FLOAT")
    column = pa.array([array.tolist() for array in arrays], pa.list_(pa.float32()))
    uri = write(tmp_path / "in", column)["parquet"]
    values = {}
    for name, source, audio in (
        ("a", {"kind": "hf", "uri": str(uri), "split": "train"}, {"array_rate_hz": HZ}),
        ("b", {"kind": "files", "uri": str(tmp_path / "files")}, {}),
    ):
        job = {"source": source, "extract": [{"model": "melspectrogram", "fs_hz": HZ}]}
        output = {"uri": str(tmp_path / name), "formats": ["zarr"], "dtype": "float32"}
        spec = JobSpec.load(job | {"output": output, "audio": audio})
        assert ("array_rate_hz" in spec.canonical()["audio"]) == bool(audio)
        end, _ = go(spec, resume=False)
        assert (end.rows_ok, end.rows_bad) == (3, 0)
        rows = open_features(tmp_path / name)
        values[name] = [{k: v.tobytes() for k, v in row.features.items()} for row in rows]
    assert values["a"] == values["b"]


class TestAudioFolder:
    """`datasets` would need torchcodec to hand out its files."""

    @pytest.fixture(autouse=True)
    def tables_of_datasets(self) -> Iterator[None]:
        """`datasets` opens metadata.csv and leaves it to be closed with the garbage."""
        yield
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "unclosed file", ResourceWarning)
            gc.collect()

    @BOTH
    @pytest.mark.parametrize("listed", ["", "metadata.csv", "metadata.jsonl"])
    def test_it_is_read_where_it_is(self, listed: str, streaming: bool, tmp_path: Path) -> None:
        folder = tmp_path / "in"
        folder.mkdir()
        names = ["a.wav", "b.wav", "d#1.wav", "e[1].wav"]
        for seed, name in enumerate(names):
            (folder / name).write_bytes(clip("wav", 0.2, seed=seed))
        if listed == "metadata.csv":
            rows = "".join(f"{name},{name}\n" for name in names)
            (folder / listed).write_text(f"file_name,text\n{rows}")
        elif listed:
            rows = "".join(f'{{"file_name": "{n}", "text": "{n}"}}\n' for n in names)
            (folder / listed).write_text(rows)
        source = opened(folder, streaming=streaming)
        items = list(source.items())
        assert [item.extra for item in items] == [{"text": n} if listed else {} for n in names]
        assert [item.seconds for item in items] == pytest.approx([0.2] * 4, abs=1e-4)
        wanted = [(folder / name).read_bytes() for name in names]
        again = opened(folder, streaming=streaming)  # a worker's
        for order in (slice(None), slice(None, None, -1)):
            streams = [stream for _, stream in again.fetch(items[order])]
            assert [stream.read() for stream in streams] == wanted[order]

    @BOTH
    def test_labels_and_splits(self, streaming: bool, tmp_path: Path) -> None:
        for name in ("x/a.wav", "y/b.wav", "z/c.wav"):
            (tmp_path / "labels" / name).parent.mkdir(parents=True)
            (tmp_path / "labels" / name).write_bytes(clip("wav", 0.1))
        items = list(opened(tmp_path / "labels", streaming=streaming).items())
        assert [item.extra for item in items] == [{"label": 0}, {"label": 1}, {"label": 2}]
        for name in ("train/a.wav", "train/b.wav", "test/c.wav"):
            (tmp_path / "splits" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "splits" / name).write_bytes(clip("wav", 0.1))
        source = open_source(
            HfSpec(kind="hf", uri=str(tmp_path / "splits"), split="test", streaming=streaming)
        )
        assert len(list(source.items())) == 1

    def test_a_listed_file_that_is_missing_is_one_bad_row(self, tmp_path: Path) -> None:
        folder = tmp_path / "in"
        folder.mkdir()
        (folder / "a.wav").write_bytes(clip("wav", 0.1))
        (folder / "metadata.csv").write_text("file_name,text\na.wav,x\ngone.wav,y\n")
        source = opened(folder)
        found = read(source)
        assert found[1] == "unreadable" and source.missing == 1

    def test_a_folder_of_nothing_that_is_known(self, tmp_path: Path) -> None:
        (tmp_path / "in").mkdir()
        (tmp_path / "in/a.xyz").write_bytes(b"x")
        with pytest.raises(SourceError, match=r"data files found in .*in; .* take kind: files"):
            opened(tmp_path / "in")

    def test_what_needs_torchcodec_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def missing(*args: Any, **options: Any) -> None:
            raise ImportError("To support encoding audio data, please install 'torchcodec'.")

        monkeypatch.setattr(datasets, "load_from_disk", missing)
        uri = write(tmp_path / "in", cells([0.5], struct(pa.list_(pa.float32()))))["saved"]
        with pytest.raises(MissingPackageError, match=r"install 'torchcodec'.*streaming: true"):
            opened(uri)


@pytest.mark.parametrize("name", ["o[1]", "o?1", "o*", "o::x"])
def test_no_pattern_is_made_of_a_name(name: str, tmp_path: Path) -> None:
    """`datasets` read the rows of `o#1` where `o?1` was named."""
    for folder in (name, "o#1"):
        write(tmp_path / folder, cells(TONE.tolist(), struct(pa.list_(pa.float32()))))
    for uri in (tmp_path / name / "a.parquet", tmp_path / name):
        with pytest.raises(SourceError, match="in a path for patterns; link it"):
            open_source(HfSpec(kind="hf", uri=str(uri), split="train"))
    (tmp_path / "plain").symlink_to(tmp_path / name)
    assert len(read(opened(tmp_path / "plain/a.parquet"))) == 2
    if name != "o::x":
        assert len(read(opened(tmp_path / name / "saved"))) == 2


@BOTH
def test_no_file_is_left_out_without_a_word(streaming: bool, tmp_path: Path) -> None:
    for name in ("a.parquet", "b::c.parquet"):
        column = cells(TONE.tolist(), struct(pa.list_(pa.float32())))
        pq.write_table(pa.table({"audio": column}), tmp_path / name)
    for uri in (tmp_path, tmp_path / "*.parquet"):
        with pytest.raises(SourceError, match=r"leaves out files with ::.*b::c\.parquet"):
            open_source(HfSpec(kind="hf", uri=str(uri), split="train", streaming=streaming))
