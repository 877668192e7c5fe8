"""WebDataset tars as output, read back by the `webdataset` package itself."""

from __future__ import annotations

import datetime
import gc
import json
import tarfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

from earmill import open_features
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats import webdataset as tar_format
from earmill.pipeline.formats.digest import digest_rows
from earmill.pipeline.formats.format import Encoding, format_of
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.formats.values import Spilled
from earmill.pipeline.formats.webdataset import key_of, row_id_of
from tests.pipeline.encoded import encode
from tests.pipeline.event_data import STREAMS as SPIKE_STREAMS
from tests.pipeline.event_data import spike_rows
from tests.pipeline.outputs import STREAMS, make_row, s3_server, stream
from tests.pipeline.reader_data import check_row, write_set

ODD_IDS = [
    "a.wav",
    "dir/b.c.flac",
    "../../up.wav",
    "/abs.wav",
    "x.tar/key",
    "%2E",
    "ünï ✓.wav",
    "__meta__",
    "tab\tnew\nline",
    "x" * 400,
    "~-_",
]


def written(folder: Path, rows: list[FeatureRow], **options: Any) -> Path:
    streams = options.pop("streams", STREAMS)
    encoding = Encoding(attrs={"spec_sha256": "ab"}, **options)
    return encode("webdataset", rows, streams, folder=folder, name="s.tar", encoding=encoding)


def by_package(path: Path) -> list[dict[str, Any]]:
    """The samples as the package gives them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves its file to the collector
        dataset = webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False)
        samples = [*dataset.decode()]
        gc.collect()
    return samples


def test_the_package_reads_every_row_and_value(tmp_path: Path) -> None:
    rows = [make_row(row_id, 5 + n) for n, row_id in enumerate(ODD_IDS)]
    samples = by_package(written(tmp_path, rows))
    assert [row_id_of(sample["__key__"]) for sample in samples] == ODD_IDS
    for row, sample in zip(rows, samples, strict=True):
        for info in STREAMS:
            values = sample[f"{info.name}.npy"]
            assert values.dtype == np.float16
            np.testing.assert_array_equal(values, row.streams[info.name])
        facts = sample["json"]
        assert facts["row_id"] == row.row_id
        assert facts["uri"] == f"corpus/{row.row_id}" and facts["pcm_sha256"] == "cd" * 32
        assert (facts["extra_speaker"], facts["extra_take"]) == (f"s{len(row.row_id)}", 3)
        assert facts["modulation_n_frames"] == len(row.streams["modulation"])


def test_the_package_reads_events_with_their_steps(tmp_path: Path) -> None:
    rows = spike_rows()
    samples = by_package(written(tmp_path, rows, streams=SPIKE_STREAMS))
    for row, sample in zip(rows, samples, strict=True):
        np.testing.assert_array_equal(sample["spikes.npy"], row.streams["spikes"])
        assert sample["json"]["spikes_n_steps"] == row.steps["spikes"]


@pytest.mark.parametrize("row_id", ["", *ODD_IDS, "%", "a%b.c"])
def test_keys_are_safe_and_give_the_row_id_back(row_id: str) -> None:
    key = key_of(row_id)
    assert row_id_of(key) == row_id
    assert key and not {".", "/", "\\", " ", "\n"} & {*key} and key.isascii()


def test_keys_of_different_rows_differ() -> None:
    ids = ["", "%", "%25", "a.b", "a%2Eb", "a/b", "a%2Fb", "A", "a"]
    assert len({key_of(row_id) for row_id in ids}) == len(ids)


def test_members_have_no_time_owner_or_mode_of_their_own(tmp_path: Path) -> None:
    with tarfile.open(written(tmp_path, [make_row("a"), make_row("b")])) as tar:
        members = tar.getmembers()
    assert [member.name for member in members] == [
        "__earmill__",
        *(f"a.{end}" for end in ("modulation.npy", "envelope.npy", "json")),
        *(f"b.{end}" for end in ("modulation.npy", "envelope.npy", "json")),
    ]
    marks = {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in members}
    assert marks == {(0, 0, 0, "", "", 0o644)}


def test_the_streams_are_described(tmp_path: Path) -> None:
    with tarfile.open(written(tmp_path, [])) as tar:
        file = tar.extractfile("__earmill__")
        assert file is not None
        about = json.load(file)
    assert [info["name"] for info in about["streams"]] == [info.name for info in STREAMS]
    assert about["columns"] == {"modulation": [8, "float16"], "envelope": [2, "float16"]}
    assert about["attrs"] == {"spec_sha256": "ab"}


def test_columns_that_json_has_no_form_for(tmp_path: Path) -> None:
    day = datetime.date(2026, 1, 2)
    extra = {"nan": float("nan"), "day": day, "list": [1.5, float("inf")], "none": None}
    types = {"nan": "double", "day": "date32[day]", "list": {"list": ["double"]}, "none": "string"}
    (sample,) = by_package(written(tmp_path, [make_row("a", extra=extra)], extra_types=types))
    facts = {name: sample["json"][f"extra_{name}"] for name in extra}
    assert facts == {"nan": None, "day": "2026-01-02", "list": [1.5, None], "none": None}


def test_stream_names_that_differ_in_case_only(tmp_path: Path) -> None:
    streams = [stream("loud"), stream("Loud")]
    with pytest.raises(CommitError, match="in any case for one"):
        written(tmp_path, [make_row("a", streams=streams)], streams=streams)


def test_a_long_row_is_never_held_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_format, "HELD_BYTES", 1000)
    monkeypatch.setattr(tar_format, "PIECE_BYTES", 300)
    (info,) = streams = [stream("modulation")]
    row = make_row("long.wav", 5000, streams=streams)
    values = row.streams["modulation"]
    spilled = Spilled(np.float16, info.width)
    for start in range(0, len(values), 700):
        spilled.append(values[start : start + 700])
    held = [make_row("a", 3, streams=streams), row]
    long = FeatureRow(**{**vars(row), "streams": {"modulation": spilled}})
    path = written(tmp_path / "x", [held[0], long], streams=streams)
    assert path.read_bytes() == written(tmp_path / "y", held, streams=streams).read_bytes()
    assert format_of("webdataset").digest(path, streams) == digest_rows(held, streams, "float16")


def test_slices_of_long_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_set(tmp_path, n_rows=3, seconds=lambda row: 20.0, formats=["webdataset"])
    monkeypatch.setattr(tar_format, "HELD_BYTES", 1000)
    monkeypatch.setattr(tar_format, "PIECE_BYTES", 300)
    features = open_features(tmp_path, streams=["modulation"])
    whole = features[1].features["modulation"]
    assert len(whole) == 2000
    part = features.slice(1, 3.0, 7.5).features["modulation"]
    np.testing.assert_array_equal(part, whole[300:750])


def test_a_set_in_a_bucket(tmp_path: Path) -> None:
    with s3_server() as options:
        write_set("s3://out/set", formats=["webdataset"], storage_options=options, finalised=True)
        features = open_features("s3://out/set", storage_options=options)
        for number in (19, 0, 7):
            check_row(features[number], number)


def test_an_npy_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_set(tmp_path, n_rows=2, formats=["webdataset"])
    (path,) = (tmp_path / "data").glob("*.tar")
    content = path.read_bytes()
    for theirs in (b"'descr': '|O', ", b"'descr': '<f8',"):
        path.write_bytes(content.replace(b"'descr': '<f2',", theirs))
        with pytest.raises(CommitError, match="run `earmill verify`"):
            open_features(tmp_path)[0]
