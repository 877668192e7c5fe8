"""The index holds every planned row once, and is refused while anything is missing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from earmill.pipeline.common.errors import CommitError, OutputError
from earmill.pipeline.dataset.description import open_dataset
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.snapshot import require_current
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.outputs import (
    PLAN,
    contents,
    dataset_file,
    make_bad,
    make_row,
    publish,
    s3_server,
    small_dataset,
    spec_of_formats,
    write_plan,
)

# An index is made of the row tables: the formats of the features do not matter.
PARQUET = spec_of_formats("parquet")
commit = partial(publish, formats=("parquet",))


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    with s3_server() as options:
        yield options


def begun(folder: Path, plan: dict[str, list[str]]) -> Layout:
    """An output with a plan and no commits."""
    layout = Layout.open(folder)
    write_plan(layout, plan)
    open_dataset(layout, dataset_file(spec=PARQUET))
    return layout


def read_index(layout: Layout) -> list[dict[str, Any]]:
    return pq.read_table(layout.path(finalise(layout).index.path)).to_pylist()


def test_the_index_lists_good_and_bad_rows_in_the_order_of_the_plan(tmp_path: Path) -> None:
    index = read_index(small_dataset(tmp_path))
    a, b, bad, c, mute = index
    assert a == {
        "row_id": "a.wav",
        "plan_row_id": "a.wav",
        "channel": -1,
        "shard": "00000",
        "row": 0,
        "seconds": 0.3,
        "uri": "corpus/a.wav",
        "modulation_start": 0,
        "modulation_n_frames": 30,
        "envelope_start": 0,
        "envelope_n_frames": 30,
        "status": "ok",
        "stage": None,
        "error_class": None,
        "message": None,
        "attempts": None,
        "extra_speaker": "s5",
        "extra_take": 3,
    }
    assert (b["row_id"], b["row"], b["modulation_start"], b["envelope_n_frames"]) == (
        "b.wav",
        1,
        30,
        7,
    )
    assert (c["shard"], c["row"], c["modulation_n_frames"]) == ("00001", 0, 120)
    assert bad == {
        **dict.fromkeys(a),
        "row_id": "bad.wav",
        "plan_row_id": "bad.wav",
        "shard": "00000",
        "uri": "corpus/bad.wav",
        "status": "quarantined",
        "stage": "decode",
        "error_class": "not_audio",
        "message": "expected audio",
        "attempts": 1,
    }
    assert (mute["row_id"], mute["error_class"]) == ("mute.wav", "zero_length")


def test_starts_and_lengths_point_at_the_values(tmp_path: Path) -> None:
    import zarr

    layout = small_dataset(tmp_path)
    for line in read_index(layout):
        if line["status"] != "ok":
            continue
        row = make_row(line["row_id"], line["modulation_n_frames"])
        attempt = line["shard"].rjust(8, "0")
        store = zarr.open_group(layout.path(f"data/{line['shard']}-{attempt}.zarr"), mode="r")
        for name, values in row.streams.items():
            start, stop = line[f"{name}_start"], line[f"{name}_start"] + line[f"{name}_n_frames"]
            assert store[f"{name}/values"][start:stop].tobytes() == values.tobytes()


def test_it_is_named_by_its_content_and_doing_it_again_changes_nothing(tmp_path: Path) -> None:
    layout = small_dataset(tmp_path)
    first = finalise(layout)
    content = layout.read_bytes(first.index.path)
    assert first.index.path == f"index/{hashlib.sha256(content).hexdigest()[:16]}.parquet"
    path = require_current(layout).snapshot.path
    described = layout.read_bytes(path)
    assert path == f"snapshots/{hashlib.sha256(described).hexdigest()[:16]}.json"
    assert (first.entry.rows_ok, first.entry.rows_bad) == (3, 2)
    assert verify(layout).seconds == pytest.approx(1.57)
    before = {
        name: layout.read_bytes(name)
        for name in ("README.md", "croissant.json", "provenance.jsonld")
    }
    assert finalise(layout) == first
    assert contents(layout, "index") == {first.index.path: content}
    assert {name: layout.read_bytes(name) for name in before} == before


def test_an_index_of_the_same_rows_in_other_bytes_is_kept(tmp_path: Path) -> None:
    layout = small_dataset(tmp_path)
    first = finalise(layout)
    table = pq.read_table(layout.path(first.index.path))
    layout.delete(first.index.path)
    pq.write_table(table, tmp_path / "other.parquet", compression="none")
    content = (tmp_path / "other.parquet").read_bytes()
    name = f"index/{hashlib.sha256(content).hexdigest()[:16]}.parquet"
    layout.write_bytes(name, content)
    assert finalise(layout).index.path == name
    assert layout.list("index") == [name]


def test_a_resumed_run_on_a_bucket_gives_the_same_index(tmp_path: Path, s3: dict[str, Any]) -> None:
    undisturbed = small_dataset(tmp_path / "a")
    resumed = Layout.open("s3://out/resumed", s3)
    write_plan(resumed, PLAN)
    open_dataset(resumed, dataset_file(created="2031-01-01T00:00:00Z", spec=PARQUET))
    commit(resumed, "00002", "eeeeeeee", [], [make_bad("mute.wav", "zero_length")])
    commit(resumed, "00001", "dddddddd", [make_row("c.flac", 120)])
    rows = [make_row("b.wav", 7), make_row("a.wav")]
    commit(resumed, "00000", "cccccccc", rows, [make_bad("bad.wav")], plan_rows=PLAN["00000"])
    path = finalise(resumed).index.path
    assert path == finalise(undisturbed).index.path
    assert resumed.read_bytes(path) == undisturbed.read_bytes(path)


def test_channels_of_a_row_stand_together(tmp_path: Path) -> None:
    layout = begun(tmp_path, {"00000": ["z", "a"]})
    rows = [make_row(f"{n}#ch{k}", plan_row_id=n, channel=k) for n in "az" for k in (1, 0)]
    commit(layout, rows=rows[:3], bad=[make_bad("z#ch0")])
    index = read_index(layout)
    assert [line["row_id"] for line in index] == ["z#ch0", "z#ch1", "a#ch0", "a#ch1"]
    assert [line["plan_row_id"] for line in index] == ["z", "z", "a", "a"]
    assert [line["row"] for line in index] == [None, 2, 0, 1]


def test_a_dataset_without_one_good_row_can_be_closed(tmp_path: Path) -> None:
    layout = begun(tmp_path, {"00000": ["x"], "00001": ["y"]})
    commit(layout, "00000", bad=[make_bad("x")])
    commit(layout, "00001", bad=[make_bad("y")])
    assert [line["status"] for line in read_index(layout)] == ["quarantined"] * 2


def test_carried_columns_of_different_types_are_brought_together(tmp_path: Path) -> None:
    layout = begun(tmp_path, {f"{n:05d}": [str(n)] for n in range(4)})
    extras: list[dict[str, Any] | None] = [
        {"n": 1, "mixed": 1, "only": True},
        {"n": 2.5, "mixed": "b"},
        {"n": 3, "mixed": None},
        None,
    ]
    for number, extra in enumerate(extras):
        rows = [make_row(str(number), extra=extra)] if extra is not None else []
        bad = [] if extra is not None else [make_bad(str(number))]
        commit(layout, f"{number:05d}", rows=rows, bad=bad)
    index = read_index(layout)
    assert [line["extra_n"] for line in index] == [1.0, 2.5, 3.0, None]
    assert [line["extra_mixed"] for line in index] == ["1", "b", None, None]
    assert [line["extra_only"] for line in index] == [True, None, None, None]


def _publish_all(layout: Layout, **rows: list[str]) -> None:
    for shard, row_ids in rows.items():
        commit(layout, shard.removeprefix("s"), rows=[make_row(row_id) for row_id in row_ids])


BROKEN: dict[str, tuple[Callable[[Layout], None], str]] = {
    "shard missing": (
        lambda layout: _publish_all(layout, s00000=["a", "b"]),
        "1 of 2 shards have no commit: '00001'",
    ),
    "row missing": (
        lambda layout: _publish_all(layout, s00000=["a"], s00001=["c"]),
        "shard 00000: row missing: 'b'",
    ),
    "row in the wrong shard": (
        lambda layout: _publish_all(layout, s00000=["a", "b", "c"], s00001=["c"]),
        "shard 00000: row not in the plan: 'c'",
    ),
    "row foreign": (
        lambda layout: _publish_all(layout, s00000=["a", "b", "new"], s00001=["c"]),
        "shard 00000: row not in the plan: 'new'",
    ),
    "shard foreign": (
        lambda layout: _publish_all(layout, s00000=["a", "b"], s00001=["c"], s00002=["d"]),
        "commits of shards that are not in the plan: '00002'",
    ),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_it_refuses_while_plan_and_commits_do_not_add_up(name: str, tmp_path: Path) -> None:
    layout = begun(tmp_path, {"00000": ["a", "b"], "00001": ["c"]})
    damage, message = BROKEN[name]
    damage(layout)
    with pytest.raises(CommitError, match=message) as caught:
        finalise(layout)
    assert "\n" not in str(caught.value)
    assert layout.list("index") == []
    assert not layout.exists("README.md")


def test_commits_of_another_plan_or_spec_are_refused(tmp_path: Path) -> None:
    layout = begun(tmp_path, {"00000": ["a"], "00001": ["b"]})
    commit(layout, "00000", rows=[make_row("a")], plan_id="older")
    commit(layout, "00001", rows=[make_row("b")], spec_sha256="other")
    with pytest.raises(CommitError, match=r"commit of plan older.*commit of another spec, other"):
        finalise(layout)


def test_there_must_be_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"holds no dataset\.json"):
        finalise(Layout.open(tmp_path))
