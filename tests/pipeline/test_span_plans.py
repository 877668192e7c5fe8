"""Where recordings are cut into spans, which stay whole, and what the plan says of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from earmill.pipeline.common.errors import (
    SourceError,
    SourceOutage,
)
from earmill.pipeline.planning import spans as planning
from earmill.pipeline.planning.make_plan import check_items, make_plan
from earmill.pipeline.planning.spans import SpannedSource, cut_into, planned_source
from earmill.pipeline.sources import Item, fetch, open_source
from earmill.pipeline.spec.source import ManifestSpec
from earmill.pipeline.spec.spans import SpansSpec
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.only_plan import only_plan
from tests.pipeline.span_data import MEL, spanned, write
from tests.pipeline.test_row_pipeline import make_spec
from tests.pipeline.test_span_reads import Counting, counting


@pytest.mark.parametrize("seconds", [15.0, 19.99, 24.9, 25.0, 25.1, 100.0, 8640.5])
@pytest.mark.parametrize("ends", [(None, None), (3.0, None), (None, 1e5), (3.0, 1e5)])
def test_spans_cover_a_row_without_gap_or_overlap(
    seconds: float, ends: tuple[float | None, float | None]
) -> None:
    item = Item("x", "x.wav", start_s=ends[0], end_s=ends[1], seconds=seconds, position=7)
    found = list(cut_into(item, 10))
    assert [part.row_id for part in found] == [
        f"x#span{k + 1}of{len(found)}" for k in range(len(found))
    ]
    begin = ends[0] or 0.0
    assert (found[0].start_s, found[-1].end_s) == (begin, ends[1])
    assert {part.part_of for part in found} == {(begin, ends[1])} and len(found) >= 2
    for one, other in pairwise(found):
        assert one.end_s == other.start_s and one.seconds == 10.0
    assert 5.0 <= found[-1].seconds < 15.0
    assert sum(part.seconds for part in found) == pytest.approx(seconds)
    assert {part.position for part in found} == {7}


def test_what_cannot_be_cut_stays_whole_and_the_plan_says_so(tmp_path: Path) -> None:
    for kind in ("wav", "flac", "mp3", "ogg"):
        write(tmp_path / "in", 9.0, kind).rename(tmp_path / "in" / f"long.{kind}")
    write(tmp_path / "in", 2.9, "wav").rename(tmp_path / "in" / "short.wav")
    spec = spanned(tmp_path / "in", 2, MEL)
    plan = make_plan(planned_source(spec), spec)
    ids = [item.row_id for item in plan.items()]
    assert [i for i in ids if "#span" not in i] == ["long.mp3", "long.ogg", "short.wav"]
    assert {i.split("#")[0] for i in ids if "#span" in i} == {"long.flac", "long.wav"}
    assert plan.in_order == 2
    assert any("2 long recordings are computed in order" in note for note in plan.notes)
    layout = Layout.open(str(tmp_path / "out"))
    plan.write(layout)
    stored = only_plan(layout)
    assert list(stored.items()) == list(plan.items()) and stored.in_order == 2
    assert all(item.part_of == (0.0, None) for item in stored.items() if "#span" in item.row_id)


@pytest.mark.parametrize(
    ("names", "channels", "said"),
    [
        (("day#span1of2", "x"), "mean", "has the form of a span's id"),
        (("a", "a"), "mean", "more than once: 'a'"),
        (("a", "a#ch0"), "each", "gives a channel of row 'a'"),
    ],
)
def test_a_recording_in_spans_and_another_row_are_not_called_alike(
    tmp_path: Path, names: tuple[str, str], channels: str, said: str
) -> None:
    """They would be read as one recording, or as spans of one."""
    write(tmp_path / "in", 9.0, "wav")
    table = tmp_path / "in" / "rows.csv"
    table.write_text(f"uri,id,start,end\nday.wav,{names[0]},,\nday.wav,{names[1]},0,2\n")
    source = f"{{kind: manifest, uri: {table}}}"
    spec = spanned(tmp_path / "in", 2, MEL, source=source, audio__channels=channels)
    with pytest.raises(SourceError, match=said):
        make_plan(planned_source(spec), spec)
    with pytest.raises(SourceError, match=said):
        check_items(list(planned_source(spec).items()), spec)


def test_a_plan_without_spans_is_what_it_was(tmp_path: Path) -> None:
    write(tmp_path / "in", 9.0, "wav")
    spec = make_spec(tmp_path / "in")
    plan = make_plan(planned_source(spec), spec)
    assert type(planned_source(spec)) is type(open_source(spec.source))
    assert "spans" not in spec.canonical()["audio"]
    layout = Layout.open(str(tmp_path / "out"))
    raw = layout.read_bytes(plan.write(layout))
    assert b"part_of" not in raw and b"in_order" not in raw


def test_a_part_is_told_from_a_row_with_the_same_ends(tmp_path: Path) -> None:
    """What the models hear before it is another, so plans of the two are two."""
    write(tmp_path / "in", 6.0, "wav")
    spec = spanned(tmp_path / "in", 2, MEL)
    plan = make_plan(planned_source(spec), spec)

    class Rows(SpannedSource):
        def items(self) -> Iterator[Item]:
            from dataclasses import replace

            return (replace(item, part_of=None) for item in super().items())

    assert spec.audio.spans is not None
    plain = make_plan(Rows(open_source(spec.source), spec.audio.spans), spec)
    assert plain.plan_id != plan.plan_id


def test_rows_that_begin_within_a_second_stay_whole(tmp_path: Path) -> None:
    write(tmp_path / "in", 9.0, "wav")
    table = tmp_path / "in" / "rows.csv"
    table.write_text("uri,id,start\nday.wav,odd,0.5\nday.wav,even,1\n")
    spec = spanned(tmp_path / "in", 2, MEL, source=f"{{kind: manifest, uri: {table}}}")
    source = planned_source(spec)
    ids = [item.row_id for item in source.items()]
    assert ids == ["odd", *(f"even#span{k}of4" for k in range(1, 5))]
    assert source.in_order == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(("tolerance_s", "rows"), [(0.9, 5), (1.0, 1)])
def test_rows_whose_file_may_end_before_their_last_span_stay_whole(
    tolerance_s: float, rows: int, tmp_path: Path
) -> None:
    write(tmp_path / "in", 9.1, "wav")
    table = tmp_path / "in" / "rows.csv"
    table.write_text("uri,id,end\nday.wav,day,10\n")
    spec = spanned(tmp_path / "in", 2, MEL, source=f"{{kind: manifest, uri: {table}}}")
    audio = spec.audio.model_copy(update={"span_tolerance_s": tolerance_s})
    source = planned_source(spec.model_copy(update={"audio": audio}))
    assert len(list(source.items())) == rows


@pytest.fixture(name="large")
def files_that_count_as_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (fetch, planning):
        monkeypatch.setattr(module, "MEMORY_BYTES", 64 << 10)
    monkeypatch.setattr(fetch, "BLOCK_BYTES", 8 << 10)
    for kind in ("wav", "flac"):
        write(tmp_path, 60.0, kind).rename(tmp_path / f"a.{kind}")
    return tmp_path


def listed_at(address: str, folder: Path, **columns: str) -> SpannedSource:
    """Both files behind a server, in spans of 20 s."""
    heads, cells = ",".join(["uri", *columns]), ",".join(["", *columns.values()])
    lines = "\n".join(f"{address}/a.{kind}{cells}" for kind in ("wav", "flac"))
    (folder / "rows.csv").write_text(f"{heads}\n{lines}\n")
    spec = ManifestSpec(kind="manifest", uri=str(folder / "rows.csv"), allow=(address,))
    return SpannedSource(open_source(spec), SpansSpec(seconds=20))


def test_the_length_of_a_large_remote_file_is_read_from_its_header(large: Path) -> None:
    with counting(large) as (address, served, _):
        found = list(listed_at(address, large).items())
        assert [item.seconds for item in found] == [20.0] * 6
        assert {item.part_of for item in found} == {(0.0, None)}
        for kind in ("wav", "flac"):
            assert served[f"/a.{kind}"] < 40 << 10 < (large / f"a.{kind}").stat().st_size


def test_a_store_that_goes_away_meanwhile_ends_the_planning(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan in which the recording is whole would be another one."""

    def lost(self: fetch.RangedStream, size: int | None = -1) -> bytes:
        self.failure = OSError("gone")
        raise self.failure

    with counting(large) as (address, _, _):
        source = listed_at(address, large)
        monkeypatch.setattr(fetch.RangedStream, "read", lost)
        with pytest.raises(SourceOutage, match="gone"):
            list(source.items())


@pytest.mark.parametrize("columns", [{}, {"end": "60"}], ids=["length guessed", "length given"])
def test_a_large_file_whose_server_gives_no_ranges_is_not_fetched_for_each_span(
    large: Path, monkeypatch: pytest.MonkeyPatch, columns: dict[str, str]
) -> None:
    monkeypatch.setattr(Counting, "has_ranges", False)
    with counting(large) as (address, served, _):
        source = listed_at(address, large, **columns)
        assert [item.part_of for item in source.items()] == [None, None]
        assert source.in_order == 2
        for kind in ("wav", "flac"):  # one answer each, which is not read to its end
            assert served[f"/a.{kind}"] == (large / f"a.{kind}").stat().st_size


def test_a_source_that_does_not_read_parts_is_not_cut(tmp_path: Path) -> None:
    write(tmp_path / "in", 9.0, "wav")
    files = open_source(spanned(tmp_path / "in", 2).source)

    class Whole:
        items = staticmethod(files.items)

    source = SpannedSource(Whole(), SpansSpec(seconds=2))  # type: ignore[arg-type]
    assert [item.row_id for item in source.items()] == ["day.wav"] and source.in_order == 1
