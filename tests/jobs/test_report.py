"""`earmill report`: the page says what the dataset holds, and is safe, whole and small."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import earmill
from amtcore.features.spike_events import SpikeEvents
from earmill.jobs.cli import run
from earmill.jobs.report.build import Options, report_html
from earmill.jobs.report.plots import (
    histogram,
    hours_text,
    nice_ratios,
    nice_steps,
    number_text,
    seconds_text,
    short_text,
)
from earmill.jobs.report.row_panels import clip_values, panels
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.dataset.description import open_dataset
from earmill.pipeline.loader.rows import Row
from earmill.pipeline.storage.layout import Layout
from tests.jobs.html_page import Element, parsed
from tests.pipeline import outputs
from tests.pipeline.reader_data import write_set

N_ROWS = 999
# Ends an element, an attribute, a script; brackets of templates; right to left, line break, bell.
HOSTILE = "</bdi><script>alert(1)</script>\"' onload=x {{ 7*7 }} \u202egpj.\n\x07.wav"
SHOWN = "</bdi><script>alert(1)</script>\"' onload=x {{ 7*7 }} \\u202egpj."


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of 999 rows and a quarantined one: as many as the table shows."""
    uri = str(tmp_path_factory.mktemp("report") / "out")
    write_set(
        uri,
        n_rows=N_ROWS,
        rows_per_shard=250,
        seconds=lambda row: 0.05 + 0.01 * (row % 50),
        finalised=True,
        formats=("parquet",),
    )
    return uri


@pytest.fixture(scope="module")
def html(dataset: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("page") / "report.html"
    assert run(["report", dataset, "--out", str(out)]) == 0
    return out.read_text("utf-8")


@pytest.fixture(scope="module")
def page(html: str) -> Element:
    return parsed(html)


def figures(page: Element) -> dict[str, str]:
    """The numbers at a glance, by name."""
    lists = page.all("dl")
    (found,) = (one for one in lists if one.attributes["class"].startswith("figures "))
    return {
        one.all("dt")[0].text: one.all("span", class_="value")[0].text for one in found.all("div")
    }


def table_rows(page: Element) -> list[list[str]]:
    (body,) = page.by_id("rows-table").all("tbody")
    return [[c.text for c in row.children if isinstance(c, Element)] for row in body.all("tr")]


def test_figures_are_those_of_the_dataset(dataset: str, page: Element) -> None:
    features, records = earmill.open_features(dataset), commits(Layout.open(dataset))
    seconds = features.table.column("seconds").to_numpy()
    shown = figures(page)
    assert shown["rows"] == f"{N_ROWS}" == f"{len(features)}"
    assert shown["quarantined"] == "1"
    assert shown["shards"] == f"{len(records)}" == "4"
    assert shown["audio"] == hours_text(float(seconds.sum()))
    nbytes = sum(file.bytes for record in records.values() for file in record.files)
    assert shown["stored"] == f"{nbytes / 1000:.1f} kB"


def test_the_table_has_every_row_as_it_is(dataset: str, page: Element) -> None:
    features = earmill.open_features(dataset)
    rows = table_rows(page)
    assert [row[0] for row in rows[:-1]] == features.table.column("row_id").to_pylist()
    known = features.table.column("seconds").to_pylist()
    assert [row[2] for row in rows[:-1]] == [seconds_text(value) for value in known]
    assert rows[-1][:2] == ["broken.wav no", "not_audio"]
    assert rows[0][5:] == ["0", ""] and rows[1][5:] == ["1", "utterance 1"]


def test_quarantine_names_reason_and_row(page: Element) -> None:
    section = page.by_id("quarantine")
    assert "not_audio" in page.by_id("reasons").text
    assert "broken.wav" in section.text and "at decode, shard 00001" in section.text


def test_distributions_count_every_row(dataset: str, page: Element) -> None:
    section = page.by_id("distribution-1-numbers")
    counts = [int(row.all("td")[0].text) for row in section.all("tr")[1:]]
    assert sum(counts) == N_ROWS
    (rate,) = page.by_id("kinds-1").all("tbody")[0].all("tr")
    assert rate.all("th")[0].text == "16 kHz" and rate.all("td")[1].text == f"{N_ROWS}"


def test_a_thousand_rows_are_less_than_five_megabytes(html: str) -> None:
    # Without sound, which the examples of this set lack: 0.1 MB each.
    assert len(html.encode()) < 1e6


def test_nothing_is_loaded_from_anywhere(page: Element) -> None:
    for element in page.walk():
        for name, value in element.attributes.items():
            if name in ("src", "href", "srcset", "action", "data", "poster"):
                assert value.startswith(("data:", "#")), (element.tag, name, value[:80])
    for style in page.all("style"):
        assert "url(" not in style.text and "@import" not in style.text


def test_the_policy_allows_this_style_and_this_script_alone(page: Element) -> None:
    (policy,) = [
        one.attributes["content"]
        for one in page.all("meta")
        if one.attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["connect-src"] == "'none'"
    for rule, (element,) in (
        ("script-src", page.all("script")),
        ("style-src", page.all("style")),
    ):
        digest = base64.b64encode(hashlib.sha256(element.text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert not [e for e in page.walk() for name in e.attributes if name == "style"]
    assert not [e for e in page.walk() for name in e.attributes if name.startswith("on")]


def test_every_figure_says_what_it_shows_and_has_its_numbers(page: Element) -> None:
    plots = page.all("figure", class_="plot")
    assert len(plots) >= 6
    for plot in plots:
        (frame,) = [one for one in plot.all("div") if one.attributes.get("role") == "img"]
        assert len(frame.attributes["aria-label"]) > 30
        assert plot.all("table")
    ids = [one.attributes["id"] for one in page.walk() if "id" in one.attributes]
    assert len(ids) == len(set(ids))


def test_examples_without_their_source_say_so(page: Element) -> None:
    examples = page.all("article")
    assert len(examples) == 4 and not page.all("audio")
    assert all("No player: " in example.text for example in examples)
    assert all("Modulation spectrum" in example.text for example in examples)


def test_more_rows_than_wanted_are_some_at_even_distances(dataset: str) -> None:
    options = Options(rows=40, examples=0)
    page = parsed(report_html(dataset, options=options, storage_options={}))
    rows = table_rows(page)
    assert len(rows) == 40 and rows[-1][0] == "broken.wav no"
    places = [int(re.findall(r"clip_(\d+)", row[0])[0]) for row in rows[:-1]]
    assert places[0] == 0 and places[-1] == N_ROWS - 1
    assert set(np.diff(places).tolist()) <= {26, 27}
    said = page.by_id("rows").all("p", class_="lead")[0].text
    assert said.startswith("40 of 1,000 rows: 39 of 999 good rows at even distances")


@pytest.fixture
def hostile(tmp_path: Path) -> str:
    """Rows, a reason, columns and a job of such names, and one of 10 kB."""
    layout = Layout.open(tmp_path / "out")
    names = [HOSTILE, "x" * 10_000]
    bad = replace(outputs.make_bad(HOSTILE + "2", HOSTILE), message=HOSTILE, stage=HOSTILE)
    outputs.write_plan(layout, {"00000": [*names, bad.row_id]})
    open_dataset(layout, outputs.dataset_file(name=HOSTILE))
    rows = [outputs.make_row(name, extra={HOSTILE: HOSTILE}) for name in names]
    assert outputs.publish(layout, rows=rows, bad=[bad], plan_rows=[*names, bad.row_id])
    return str(tmp_path / "out")


def test_hostile_texts_are_shown_and_nothing_else(hostile: str) -> None:
    text = report_html(hostile, options=Options(), storage_options={})
    page = parsed(text)
    assert len(page.all("script")) == 1 and "alert(1)" not in page.all("script")[0].text
    assert SHOWN in page.all("h1")[0].text and "\\u202egpj." in page.all("h1")[0].text
    rows = table_rows(page)
    assert rows[0][0].startswith(SHOWN) and rows[0][0].endswith("\\x07.wav")
    assert rows[0][5].startswith(SHOWN) and rows[2][1].startswith(SHOWN[:20])
    assert rows[1][0].endswith("(10,000 characters)") and len(rows[1][0]) < 200
    assert not re.findall("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
    assert "49" not in page.all("h1")[0].text


def test_a_dataset_that_is_still_written_says_so(hostile: str) -> None:
    page = parsed(report_html(hostile, options=Options(examples=0), storage_options={}))
    assert "not closed: shards committed by" in page.all("p", class_="tags")[0].text


def test_a_dataset_without_a_good_row_is_shown(tmp_path: Path) -> None:
    layout = Layout.open(tmp_path / "out")
    outputs.write_plan(layout, {"00000": ["bad.wav"]})
    open_dataset(layout, outputs.dataset_file())
    assert outputs.publish(layout, bad=[outputs.make_bad("bad.wav")], plan_rows=["bad.wav"])
    page = parsed(report_html(str(tmp_path / "out"), options=Options(), storage_options={}))
    assert figures(page)["rows"] == "0" and figures(page)["quarantined"] == "1"
    assert [row[0] for row in table_rows(page)] == ["bad.wav expected audio"]


def test_damage_is_one_line(
    dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(shutil.copytree(dataset, tmp_path / "out"))
    (out / "commits" / "00002.json").unlink()
    assert run(["report", str(out), "--out", str(tmp_path / "report.html")]) == 1
    assert "the commit of shard 00002 is gone" in capsys.readouterr().err


def test_the_call_writes_the_page_of_the_command(dataset: str, tmp_path: Path) -> None:
    told: list[str] = []
    out = tmp_path / "page.html"
    third = earmill.open_features(dataset)[2].row_id
    assert earmill.report(dataset, out, rows=7, row_ids=[third], on_begin=told.append) == out
    assert told == ["reading index and commits", "drawing 1 row"]
    page = parsed(out.read_text("utf-8"))
    assert len(table_rows(page)) == 7 and figures(page)["rows"] == f"{N_ROWS}"
    with pytest.raises(earmill.OutputError, match="choose another --out"):
        earmill.report(dataset, tmp_path)
    assert earmill.report(dataset, out, rows=np.int64(7), seconds=np.float32(2)) == out


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": -1},
        {"rows": 2.5},
        {"rows": True},
        {"examples": 51},
        {"seconds": 0},
        {"seconds": float("nan")},
        {"seconds": "10"},
        {"row_ids": "00003"},
    ],
    ids=str,
)
def test_arguments_that_mean_nothing_are_named(
    wrong: dict[str, object], dataset: str, tmp_path: Path
) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name}: expected"):
        earmill.report(dataset, tmp_path / "page.html", **wrong)
    assert not list(tmp_path.iterdir())


def test_an_example_whose_features_are_damaged_says_so(dataset: str, tmp_path: Path) -> None:
    out = Path(shutil.copytree(dataset, tmp_path / "out"))
    for path in (out / "data").glob("00000*.parquet"):
        path.write_bytes(path.read_bytes()[:-100])
    row_id = earmill.open_features(dataset).table.column("row_id")[0].as_py()
    options = Options(rows=5, row_ids=(row_id,))
    page = parsed(report_html(str(out), options=options, storage_options={}))
    (example,) = page.all("article")
    assert "Its features cannot be shown: " in example.text and row_id in example.text


def test_no_dataset_and_no_such_row_are_one_line(
    dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "report.html")
    assert run(["report", str(tmp_path), "--out", out]) == 2
    assert run(["report", dataset, "--out", out, "--row", "nobody"]) == 2
    (tmp_path / "file").write_text("")
    taken = str(tmp_path / "file" / "report.html")
    assert run(["report", dataset, "--examples", "0", "--out", taken]) == 2
    errors = [one for one in capsys.readouterr().err.splitlines() if one.startswith("earmill: ")]
    assert len(errors) == 3 and "no row 'nobody'" in errors[1] and "cannot write" in errors[2]
    assert not Path(out).exists()


# Figures of single streams.


def row_of(**features: object) -> Row:
    return Row(0, "a", 1.0, {}, features, dict.fromkeys(features, 0))


def decoded(uri: str) -> np.ndarray:
    """Brightness of a picture, row 0 at the bottom."""
    image = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
    return np.asarray(image.convert("L"), np.int64)[::-1]


def test_a_spectrogram_has_time_to_the_right_and_frequency_upwards() -> None:
    info = replace(outputs.stream("mel", (1, 1, 1)), mfc_hz=())
    values = np.zeros((100, 3))
    values[80:, 2] = 1.0  # late, and in the highest channel
    (plot,) = panels(row_of(mel=values), {"mel": info}, 1.0)
    shown = decoded(plot.picture)
    assert shown.shape == (3, 100)
    assert np.array_equal(shown > 128, values.T > 0.5)
    assert "highest at 300 Hz" in plot.alt


def test_long_rows_are_pooled_and_keep_their_mean() -> None:
    info = replace(outputs.stream("mel", (1, 1)), mfc_hz=())
    values = np.tile([[0.0], [1.0]], (5000, 2))
    values[:, 1] = 1.0
    (plot,) = panels(row_of(mel=values), {"mel": info}, 100.0)
    shown = decoded(plot.picture)
    assert shown.shape[1] == 600
    assert shown[0].max() < shown[1].min()


def test_a_modulation_spectrum_is_the_rms_over_time() -> None:
    info = replace(outputs.stream("modulation", (1, 2)), mfc_hz=(0.0, 0.0, 10.0))
    values = np.array([[3.0, 0.0, 4.0], [-3.0, 0.0, -4.0]])
    slow, plot = panels(row_of(modulation=values), {"modulation": info}, 0.02)
    assert plot.table is not None
    rows = {row[0]: row[1:] for row in plot.table.rows}
    assert rows["200 Hz"][1] == "0.0"  # dB re maximum
    assert rows["100 Hz"] == ("\N{MINUS SIGN}2.5", "")  # 3 / 4, and a filter that it lacks
    assert "no stream holds the envelope" in slow.note


def test_spikes_are_counted_in_their_channel_and_time() -> None:
    counts = np.zeros((100, 2), int)
    counts[10, 0], counts[90, 1] = 1, 2
    info = replace(
        outputs.stream("spikes", (1, 1)), layout="events", mfc_hz=(), frame_rate_hz=100.0
    )
    (plot,) = panels(row_of(spikes=SpikeEvents.from_dense(counts)), {"spikes": info}, 1.0)
    shown = decoded(plot.picture)
    assert np.argwhere(shown > shown.min()).tolist() == [[0, 10], [1, 90]]
    assert plot.table is not None
    assert [row[1] for row in plot.table.rows] == ["1.00", "2.00"]


def test_traces_of_one_unit_share_a_figure_and_values_of_clips_a_table() -> None:
    one = replace(outputs.stream("short_term", (1,)), unit="sone", mfc_hz=())
    clip = replace(one, name="summary", frame_rate_hz=0.0, columns=("n5", "n10"), width=2)
    streams = {"short_term": one, "long_term": replace(one, name="long_term"), "summary": clip}
    row = row_of(
        short_term=np.array([[0.0], [2.0]]),
        long_term=np.array([[1.0], [1.0]]),
        summary=np.array([[5.0, 4.0]]),
    )
    (plot,) = panels(row, streams, 0.02)
    assert [line.points for line in plot.lines] == [
        "250.0,1000.0 750.0,0.0",
        "250.0,500.0 750.0,500.0",
    ]
    values = clip_values(row, streams)
    assert values is not None and values.rows == (("n5", "5", "sone"), ("n10", "4", "sone"))


def test_axes_have_round_numbers() -> None:
    assert nice_steps(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert nice_steps(3, 3) == [3]
    assert nice_ratios(1, 100) == [1, 3, 10, 30, 100]
    assert nice_ratios(0.5, 4) == [0.5, 1, 2]
    assert [number_text(v) for v in (0, 0.00123, 12.345, 1234.6, -2)] == [
        "0",
        "0.00123",
        "12.3",
        "1,235",
        "\N{MINUS SIGN}2",
    ]
    assert [short_text(v) for v in (0, 500, 20_000, 3e6)] == ["0", "500", "20k", "3M"]
    assert [hours_text(v) for v in (60, 7199, 9_449_533)] == ["60 s", "120 min", "2,625 h"]


@pytest.mark.parametrize(
    "values", [[1.0], [0.5, 0.5], [0.01, 100.0], [0.0, 1.0], [-3.0, -1.0], [np.nan, 1.0, 2.0]]
)
def test_histograms_lose_no_value(values: list[float]) -> None:
    plot = histogram(np.array(values), "t", "x")
    assert plot is not None and plot.table is not None
    finite = int(np.isfinite(values).sum())
    assert sum(int(row[1]) for row in plot.table.rows) == finite
    assert all(0 <= tick.at <= 100 for tick in (*plot.x_ticks, *plot.y_ticks))
