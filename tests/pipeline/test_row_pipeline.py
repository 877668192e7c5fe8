"""The row pipeline with real files, real decoding and a real model, without Ray.

The second route is the plain one: soundfile reads, the resampler resamples whole, the model gets
one clip alone, numpy casts. Rows must equal it bit for bit, whatever runs beside them.
"""

from __future__ import annotations

import io
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from amtcore.features.feature_model import Extractor
from amtcore.features.filterbank_model import FilterbankExtractor
from amtcore.units import Calibration
from earmill.pipeline.audio.resample import resample
from earmill.pipeline.common.errors import DtypeRangeError, NonFiniteFeatureError
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.formats.values import FLOAT16_SCALES, Caster
from earmill.pipeline.sources import Item, open_source
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.worker import extraction
from earmill.pipeline.worker import row_pipeline as process_rows
from earmill.pipeline.worker.models import build_extractors
from earmill.pipeline.worker.prepare import Clip, LongClip
from earmill.pipeline.worker.row_pipeline import RowProcessor, ShardRows
from tests.compare import Tolerance, assert_close
from tests.pipeline import audio_factory
from tests.waiting import DEADLINE_S

#: Chunked filtering sums in another order; then float16 rounds, sometimes to the neighbour.
STREAMED = Tolerance(5e-4, "chunked filters, then rounding to float16", 1e-3)
FS_HZ = 16000


def make_spec(folder: Path, **changes: Any) -> JobSpec:
    """A job on the files of a folder; `a__b=c` changes one value."""
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in changes.items()]
    job = {
        "source": {"kind": "files", "uri": str(folder)},
        "extract": [{"model": "dau1997", "fs_hz": FS_HZ}],
        "output": {"uri": str(folder / "out")},
    }
    return JobSpec.load(job, overrides=overrides)


class WatchedTicket:
    """A ticket for the models that notes its calls."""

    def __init__(self, calls: list[str | float]) -> None:
        self._calls = calls

    def wait(self) -> None:
        self._calls.append("wait")

    def give_back(self) -> None:
        self._calls.append("give back")


class Job:
    """A spec with its source, models and row pipeline."""

    def __init__(self, spec: JobSpec, cls: type[RowProcessor] = RowProcessor, **options: Any):
        self.spec = spec
        self.source = open_source(spec.source)
        self.items = list(self.source.items())
        self.models = build_extractors(spec, None)
        options.setdefault("decode_threads", 2)
        self.rows = cls(spec, self.source, self.models, **options)

    def __call__(self, **options: Any) -> ShardRows:
        return self.rows.process(self.items, **options)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips of many lengths, rates and containers, two of them stereo."""
    folder = tmp_path_factory.mktemp("corpus")
    kinds = ["wav", "wav-float", "flac", "ogg", "opus", "mp3", "wav", "flac", "wav", "ogg"]
    for index, kind in enumerate(kinds):
        seconds = (0.31, 1.7, 0.9, 2.6, 0.05, 1.2, 0.5, 3.1, 0.75, 1.1)[index]
        data = audio_factory.clip(kind, seconds, channels=1 + index % 3 // 2, seed=index)
        (folder / f"{index:02d}_{kind}.{kind.split('-')[0]}").write_bytes(data)
    return folder


def plain_features(
    model: Extractor, data: bytes, calibration: Calibration, channel: int | None = None
) -> dict[str, np.ndarray]:
    """Features of one file by the plain route."""
    # Read in the blocks that the decoder uses: libsndfile's MP3 decoder is not block invariant.
    samples, rate_hz = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    if channel is None:
        mono = samples.astype(np.float64).sum(axis=1) / samples.shape[1]
    else:
        mono = samples[:, channel]
    mono = mono.astype(np.float32)
    gain = calibration.gain(mono, model.input_unit)
    signal = resample(mono, rate_hz, model.fs_hz)
    if gain != 1.0:
        signal = signal * np.float32(gain)
    return model.extract([signal])[0]


def assert_same_rows(left: Sequence[FeatureRow], right: Sequence[FeatureRow]) -> None:
    assert [row.row_id for row in left] == [row.row_id for row in right]
    for one, other in zip(left, right, strict=True):
        assert one.facts == other.facts and one.seconds == other.seconds
        assert one.streams.keys() == other.streams.keys()
        for name, values in one.streams.items():
            assert values.dtype == other.streams[name].dtype
            np.testing.assert_array_equal(values, other.streams[name], err_msg=one.row_id)


@pytest.mark.parametrize("calibration", [{"rms1_db_spl": 100.0}, {"level_db_spl": 65.0}])
def test_every_row_equals_the_plain_route(corpus: Path, calibration: dict[str, float]) -> None:
    job = Job(make_spec(corpus, audio__calibration=calibration))
    rows = job()
    assert rows.bad == []
    assert [row.row_id for row in rows.good] == [item.row_id for item in job.items]
    for row in rows.good:
        data = (corpus / row.row_id).read_bytes()
        plain = plain_features(job.models[0], data, Calibration.from_dict(calibration))
        assert row.streams.keys() == plain.keys()
        for name, values in row.streams.items():
            np.testing.assert_array_equal(values, plain[name].astype(np.float16), row.row_id)


def test_facts_say_what_was_done(corpus: Path) -> None:
    job = Job(make_spec(corpus, audio__calibration={"level_db_spl": 65}))
    row = next(row for row in job().good if row.row_id == "00_wav.wav")
    samples, rate_hz = soundfile.read(corpus / row.row_id, dtype="float32")
    level_db_spl = 100 + 20 * math.log10(float(np.sqrt(np.mean(samples.astype(float) ** 2))))
    assert row.facts["gain_db"] == pytest.approx(65 - level_db_spl, abs=1e-6)
    assert row.facts["rate_hz"] == row.facts["resampled_from_hz"] == rate_hz == 22050
    assert row.facts["resampler"] == "soxr_vhq"
    assert row.facts["frames"] == len(samples) and row.seconds == len(samples) / rate_hz
    assert row.facts["size"] == (corpus / row.row_id).stat().st_size
    same_rate = next(row for row in job().good if row.row_id == "01_wav-float.wav")
    assert same_rate.facts["resampled_from_hz"] is None and same_rate.facts["resampler"] is None


def test_rows_do_not_depend_on_threads_windows_or_neighbours(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(corpus)
    job = Job(spec)
    usual = job().good
    monkeypatch.setattr(process_rows, "WINDOW_BYTES", 1)
    monkeypatch.setattr(process_rows, "PREFETCH_BYTES", 1)
    monkeypatch.setattr(extraction, "BATCH_S", 0.1)
    narrow = Job(spec, decode_threads=1)
    assert_same_rows(usual, narrow().good)
    alone = [row for item in job.items for row in job.rows.process([item]).good]
    assert_same_rows(usual, alone)


@pytest.mark.parametrize("calibration", [{"rms1_db_spl": 94.0}, {"level_db_spl": 65.0}])
def test_a_streamed_clip_equals_the_same_clip_held_whole(
    corpus: Path, calibration: dict[str, float]
) -> None:
    spec = make_spec(corpus, audio__calibration=calibration)
    whole, streamed = Job(spec)().good, Job(spec, long_s=0.5)().good
    assert [row.row_id for row in whole] == [row.row_id for row in streamed]
    for one, other in zip(whole, streamed, strict=True):
        gain_db = one.facts["gain_db"], other.facts["gain_db"]
        assert gain_db[0] == pytest.approx(gain_db[1], abs=1e-9)
        rest = [{k: v for k, v in row.facts.items() if k != "gain_db"} for row in (one, other)]
        assert rest[0] == rest[1]
        for name in one.streams:
            assert_close(other.streams[name], one.streams[name], STREAMED, one.row_id)


def test_spikes_of_a_streamed_clip_are_those_of_the_clip_held_whole(corpus: Path) -> None:
    spikes = [{"model": "dau1997", "fs_hz": FS_HZ, "streams": {"spikes": {"gain": 4.0}}}]
    spec = make_spec(corpus, extract=spikes)
    whole, streamed = Job(spec)().good, Job(spec, long_s=0.5)().good
    for one, other in zip(whole, streamed, strict=True):
        assert one.steps == other.steps == {"spikes": math.floor(1000 * one.seconds + 1e-6)}
        # A frame that differs in its last bit may move a spike by a step.
        ours, theirs = (np.asarray(row.streams["spikes"])[:, 2].sum() for row in (one, other))
        assert abs(int(ours) - int(theirs)) <= 2 and ours > 50 * one.seconds


def test_a_streamed_clip_is_the_same_every_time(corpus: Path) -> None:
    spec = make_spec(corpus)
    first = Job(spec, long_s=0.5, decode_threads=1)().good
    assert_same_rows(first, Job(spec, long_s=0.5, decode_threads=3)().good)


def test_each_channel_is_a_row_with_its_own_features(corpus: Path) -> None:
    job = Job(make_spec(corpus, audio__channels="each"))
    rows = [row for row in job().good if row.plan_row_id == "02_flac.flac"]
    assert [(row.row_id, row.channel) for row in rows] == [
        ("02_flac.flac#ch0", 0),
        ("02_flac.flac#ch1", 1),
    ]
    data = (corpus / "02_flac.flac").read_bytes()
    for row in rows:
        plain = plain_features(job.models[0], data, Calibration(100.0), row.channel)
        expected = plain["modulation"].astype(np.float16)
        np.testing.assert_array_equal(row.streams["modulation"], expected)


def test_a_missing_channel_costs_only_its_rows(corpus: Path) -> None:
    rows = Job(make_spec(corpus, audio__channels="right"))()
    stereo = {"02_flac.flac", "05_mp3.mp3", "08_wav.wav"}
    assert {row.row_id for row in rows.good} == stereo
    assert {(row.stage, row.error_class) for row in rows.bad} == {("channels", "channel_index")}
    assert len(rows.bad) == 7


def test_two_models_share_one_decoding(corpus: Path) -> None:
    models = [
        {"model": "dau1997", "fs_hz": 16000},
        {"model": "dau1997", "fs_hz": 44100, "streams": {"envelope": {}}},
    ]
    job = Job(make_spec(corpus, extract=models))
    row = next(row for row in job().good if row.row_id == "00_wav.wav")
    data = (corpus / row.row_id).read_bytes()
    plain = [plain_features(model, data, Calibration(100.0)) for model in job.models]
    assert set(row.streams) == {"modulation", "envelope"}
    for name, values in (plain[0] | plain[1]).items():
        scale = FLOAT16_SCALES["input unit"] if name == "envelope" else 1.0
        np.testing.assert_array_equal(row.streams[name], (values / scale).astype(np.float16))


def test_bad_files_are_quarantined_with_their_reason_and_good_rows_stay(tmp_path: Path) -> None:
    (tmp_path / "aa_good.wav").write_bytes(audio_factory.clip("wav"))
    (tmp_path / "zz_good.flac").write_bytes(audio_factory.clip("flac"))
    damaged = audio_factory.damaged_corpus()
    for case in damaged:
        (tmp_path / case.name).write_bytes(case.data)
    blip = audio_factory.clip("wav", 0.004)
    (tmp_path / "blip.wav").write_bytes(blip)
    job = Job(make_spec(tmp_path, output__dtype="float32"))
    rows = job(attempts=3)
    assert [row.row_id for row in rows.good] == ["aa_good.wav", "zz_good.flac"]
    expected = {case.name: case.error_class for case in damaged} | {"blip.wav": "too_short"}
    assert {row.row_id: row.error_class for row in rows.bad} == expected
    order = [item.row_id for item in job.items]
    assert [row.row_id for row in rows.bad] == [name for name in order if name in expected]
    for row in rows.bad:
        assert row.attempts == 3 and "\n" not in row.message
        assert row.uri.endswith(row.row_id) and row.uri in row.message


def test_damage_late_in_a_streamed_clip_leaves_no_half_row(tmp_path: Path) -> None:
    whole = audio_factory.clip("flac", 6.0)
    (tmp_path / "cut.flac").write_bytes(whole[: len(whole) * 9 // 10])
    (tmp_path / "good.flac").write_bytes(whole)
    rows = Job(make_spec(tmp_path), long_s=0.5)()
    assert [row.row_id for row in rows.good] == ["good.flac"]
    assert [(row.row_id, row.error_class) for row in rows.bad] == [("cut.flac", "truncated")]


def test_values_beyond_float16_are_quarantined_with_advice(tmp_path: Path) -> None:
    (tmp_path / "loud.wav").write_bytes(audio_factory.clip("wav"))
    streams = "[{model: dau1997, fs_hz: 16000, streams: {envelope: {}}}]"
    loud = {"extract": streams, "audio__calibration": "{rms1_db_spl: 260}"}
    (bad,) = Job(make_spec(tmp_path, **loud))().bad
    assert (bad.stage, bad.error_class) == ("extract", "dtype_range")
    assert "float32" in bad.message
    wide = Job(make_spec(tmp_path, output__dtype="float32", **loud))()
    assert wide.bad == [] and wide.good[0].streams["envelope"].max() > 65504


def test_casting_checks_every_value() -> None:
    good = np.array([[65504.0, -65504.0]], np.float32)
    np.testing.assert_array_equal(Caster("float16")("s", good)[0], good)
    with pytest.raises(DtypeRangeError, match="-70000"):
        Caster("float16")("s", np.array([[1.0, -70000.0]], np.float32))
    for value in (np.nan, np.inf, -np.inf):
        frames = np.ones((5, 3), np.float32)
        frames[3, 1] = value
        for dtype in ("float16", "float32"):
            with pytest.raises(NonFiniteFeatureError):
                Caster(dtype)("s", frames)


@pytest.mark.parametrize(
    ("params", "advice"),
    [
        ({}, "manifest, or set phase_insens to none and leave subfs out"),
        ({"phase_insens": "none"}, ""),
    ],
)
def test_a_long_clip_of_a_model_of_whole_clips_is_refused_with_the_model_s_own_advice(
    corpus: Path, params: dict[str, str], advice: str
) -> None:
    spec = make_spec(corpus, extract=[{"model": "king2019", "fs_hz": FS_HZ, "params": params}])
    job = Job(spec, long_s=0.5)
    rows = job.rows.process([item for item in job.items if item.row_id == "07_flac.flac"])
    if not advice:
        assert rows.bad == []
        return
    (bad,) = rows.bad
    assert bad.error_class == "too_long" and bad.message.endswith(advice)
    assert "for king2019, whose streams need whole clips" in bad.message


class Faulty(RowProcessor):
    """A row pipeline with a bug that one row brings out."""

    def prepare(self, item: Item, stream: Any) -> list[Clip] | LongClip:
        if item.row_id.startswith("03"):
            raise ZeroDivisionError("a bug, not a bad row")
        return super().prepare(item, stream)


def test_a_fault_of_the_program_is_not_blamed_on_the_row(corpus: Path) -> None:
    job = Job(make_spec(corpus), Faulty)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        job()
    assert len(job.rows.process(job.items[:3]).good) == 3


def watch_ticket(job: Job, monkeypatch: pytest.MonkeyPatch) -> list[str | float]:
    """Return the list of what becomes of a job's tickets from now on."""
    calls: list[str | float] = []
    ticket = WatchedTicket(calls)
    monkeypatch.setattr(job.rows.extraction, "shard", lambda: nullcontext(ticket))
    return calls


def test_models_wait_for_their_ticket_and_progress_adds_up(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(make_spec(corpus))
    calls = watch_ticket(job, monkeypatch)
    rows = job(on_audio=calls.append)
    assert calls[:2] == ["wait", "give back"]
    assert sum(calls[2:]) == pytest.approx(sum(row.seconds for row in rows.good))  # type: ignore[arg-type]


def test_an_empty_shard_gives_its_ticket_back(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(make_spec(corpus))
    calls = watch_ticket(job, monkeypatch)
    assert job.rows.process([]) == ShardRows([], []) and calls == ["give back"]


class Gate:
    """A model's `extract` that counts who is inside, and waits there for company."""

    def __init__(self, model: Extractor, wanted: int) -> None:
        self._extract, self._wanted = model.extract, wanted
        self._changed = threading.Condition()
        self._inside = self.most = 0

    def __call__(self, clips: Sequence[Any]) -> Any:
        with self._changed:
            self._inside += 1
            self.most = max(self.most, self._inside)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most >= self._wanted, timeout=DEADLINE_S)
        made = self._extract(clips)
        with self._changed:
            self._inside -= 1
        return made


@pytest.mark.parametrize(("several", "inside"), [(True, 2), (False, 1)])
def test_a_shard_s_last_clips_meet_the_first_of_the_next_where_the_model_allows_it(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, several: bool, inside: int
) -> None:
    # A shard alone gives the model one call at a time: a second one is the other shard's.
    monkeypatch.setattr(extraction, "form_batches", lambda lengths, most: [[*range(len(lengths))]])
    spec = make_spec(corpus)
    alone = Job(spec)().good
    monkeypatch.setattr(FilterbankExtractor, "takes_several_callers", several)
    job = Job(spec)
    gate = Gate(job.models[0], wanted=inside)
    monkeypatch.setattr(job.models[0], "extract", gate)

    with ThreadPoolExecutor(2) as threads:
        shards = [threads.submit(job) for _ in range(2)]
        found = [shard.result() for shard in shards]
    assert gate.most == inside
    for rows in found:
        for got, expected in zip(rows.good, alone, strict=True):
            np.testing.assert_array_equal(got.streams["modulation"], expected.streams["modulation"])


def test_clips_of_a_shard_that_failed_do_not_reach_the_models(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One clip a call, one caller: the others wait behind the one that fails.
    monkeypatch.setattr(extraction, "BATCH_S", 0.1)
    monkeypatch.setattr(extraction, "CALLERS", 1)
    job, calls = Job(make_spec(corpus)), []

    def fails(clips: Sequence[Any]) -> Any:
        calls.append(len(clips))
        time.sleep(0.3 * (len(calls) > 1))
        raise ArithmeticError("a bug")

    monkeypatch.setattr(job.models[0], "extract", fails)
    with pytest.raises(ArithmeticError, match="a bug"):
        job()
    job.rows.close()
    assert len(calls) < len(job.items)


class _Stream(io.BytesIO):
    """A stream that was or was not closed."""


def test_short_rows_are_prepared_together_and_a_long_one_alone() -> None:
    seconds = [0.2] * 20 + [1.0, 5.0, 0.2]
    tasks = list(process_rows.in_tasks(seconds, float))
    assert [value for task in tasks for value in task] == seconds, "in order, each once"
    assert [len(task) for task in tasks] == [16, 6, 1]


def test_files_of_gathered_rows_are_closed_when_the_source_fails() -> None:
    streams = [_Stream(), _Stream()]

    def rows() -> Any:
        yield from ((Item("a", "a"), stream) for stream in streams)
        raise ConnectionError("away")

    with pytest.raises(ConnectionError, match="away"):
        list(process_rows.in_tasks(rows(), lambda row: 0.2))
    assert all(stream.closed for stream in streams)


def test_files_of_a_task_that_was_handed_out_stay_open() -> None:
    streams = [_Stream() for _ in range(20)]
    tasks: Any = process_rows.in_tasks(
        ((Item("a", "a"), each) for each in streams), lambda row: 0.2
    )
    next(tasks)
    tasks.close()
    assert not any(stream.closed for stream in streams)
