"""Variants of rows by whole jobs: their samples, bytes, provenance, and every command after a job.

A model that hands the samples through shows what the models hear.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
import scipy.signal
import soundfile
import soxr
from torch import Tensor, nn

import earmill
from earmill.pipeline.audio.variants import generated, generator
from earmill.pipeline.dataset.commit_record import committed_shards
from earmill.pipeline.operations.deep_verify import verify_deep
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.planning.spans import planned_source
from earmill.pipeline.sources.base import Item, fetch
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.worker.prepare import Preparer, Target
from earmill.pipeline.worker.row_pipeline import RowProcessor
from tests.chaos.jobs import assert_equal_datasets, assert_whole, committed_files
from tests.pipeline.again_jobs import Killed, module_without_ray, run_here  # noqa: F401
from tests.pipeline.hf_data import private_cache, table, write_parquet  # noqa: F401
from tests.pipeline.workers_here import workers_here

pytestmark = pytest.mark.usefixtures("no_ray")
FS, HOP = 16000, 160
OF: list[dict[str, Any]] = [
    {"name": "noisy", "noise": {"uri": "noises", "snr_db": 10}},
    {"name": "white", "noise": {"kind": "white", "snr_db": 0}},
    {"name": "pink5", "noise": {"kind": "pink", "snr_db": 5}},
    {"name": "hall", "impulse_response": "rooms/hall.wav"},
    {"name": "quiet", "gain_db": -20},
    {"name": "fast", "speed": 1.1},
    {
        "name": "all",
        "speed": 0.8,
        "impulse_response": "rooms/hall.wav",
        "noise": {"uri": "noises", "snr_db": 3},
        "gain_db": 6,
    },
]
NAMES = ["", *(f"@{variant['name']}" for variant in OF)]
CLIPS = ["a.wav", "b.wav"]


class Samples(nn.Module):
    """The samples of a clip, HOP a frame."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : x.shape[-1] // HOP * HOP].unflatten(-1, (-1, HOP))


def write(path: Path, samples: np.ndarray, rate_hz: int = FS) -> None:
    path.parent.mkdir(exist_ok=True)
    soundfile.write(path, samples, rate_hz, subtype="FLOAT")


def job(folder: Path, of: Any = OF, out: str = "out", **changes: Any) -> dict[str, Any]:
    """A job of the corpus in a folder; places of recordings are below the folder."""
    of = json.loads(json.dumps(of))
    for variant in of:
        if "://" not in variant.get("impulse_response", "://"):
            variant["impulse_response"] = str(folder / variant["impulse_response"])
        if "uri" in variant.get("noise", ()):
            variant["noise"]["uri"] = str(folder / variant["noise"]["uri"])
    streams = {"samples": {"width": HOP, "hop_length": HOP, "window_length": HOP}}
    entry = {
        "model": "torch_module",
        "fs_hz": FS,
        "params": {"module": f"{__name__}:Samples"},
        "streams": streams,
    }
    made: dict[str, Any] = {
        "source": {"kind": "files", "uri": str(folder / "in")},
        "audio": {"variants": {"seed": 7, "of": of}},
        "extract": [entry],
        "output": {
            "uri": str(folder / out),
            "formats": ["parquet"],
            "dtype": "float32",
            "shard_rows": 1,
        },
        "run": {"max_bad_fraction": 1, "threads_per_worker": 1},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        made[section][name] = value
    return made


def corpus(folder: Path) -> Path:
    rng = np.random.default_rng(5)
    for index, name in enumerate(CLIPS):
        write(folder / "in" / name, 0.1 * rng.standard_normal(FS + HOP * index))
    # Shorter than a clip at another rate, and longer.
    write(folder / "noises" / "short.wav", 0.2 * rng.standard_normal(2000), 8000)
    write(folder / "noises" / "stereo.wav", 0.2 * rng.standard_normal((4 * FS, 2)))
    tail = rng.standard_normal(4000) * np.exp(-np.arange(4000) / 500)
    write(folder / "rooms" / "hall.wav", np.concatenate([[1.0], np.zeros(99), 0.1 * tail]))
    return folder


@pytest.fixture(name="made", scope="module")
def corpus_and_output(tmp_path_factory: pytest.TempPathFactory, no_ray: None) -> Path:
    folder = corpus(tmp_path_factory.mktemp("variants"))
    end = earmill.extract(job(folder))
    assert (end.rows_ok, end.rows_bad, end.shards) == (len(CLIPS) * len(NAMES), 0, len(CLIPS))
    return folder


@pytest.fixture(name="copy")
def copy_of_corpus(made: Path, tmp_path: Path) -> Path:
    for name in ("in", "noises", "rooms"):
        shutil.copytree(made / name, tmp_path / name)
    return tmp_path


@pytest.fixture(name="computed")
def rows_that_are_computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    process = RowProcessor.process

    def spied(rows: RowProcessor, items: list[Item], **options: Any) -> Any:
        found.extend(item.row_id for item in items)
        return process(rows, items, **options)

    monkeypatch.setattr(RowProcessor, "process", spied)
    return found


def heard(out: Path, row_id: str) -> np.ndarray:
    """The samples of a row in float64."""
    samples = earmill.open_features(out).by_id(row_id).features["samples"]
    return np.asarray(samples, np.float64).ravel()


def settings(out: Path, row_id: str) -> dict[str, Any]:
    ds = earmill.open_features(out)
    found: dict[str, Any] = json.loads(ds.provenance(ds.index_of(row_id))["variant_settings"])
    return found


def level_db(samples: np.ndarray) -> float:
    return float(10 * np.log10(np.mean(samples**2)))


# -- samples ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "snr_db"), [("noisy", 10), ("white", 0), ("pink5", 5)])
@pytest.mark.parametrize("clip", CLIPS)
def test_noise_has_the_snr_over_the_whole_clip(
    made: Path, clip: str, name: str, snr_db: float
) -> None:
    clean = heard(made / "out", clip)
    noise = heard(made / "out", f"{clip}@{name}") - clean
    assert level_db(clean) - level_db(noise) == pytest.approx(snr_db, abs=1e-4)


def test_noise_is_the_drawn_stretch_of_the_file_or_repeats_it(made: Path) -> None:
    drawn = set()
    for clip in CLIPS:
        for name in ("noisy", "all"):
            drawn.add(Path(settings(made / "out", f"{clip}@{name}")["noise"]["uri"]).name)
        found = settings(made / "out", f"{clip}@noisy")["noise"]
        clean = heard(made / "out", clip)
        noise = heard(made / "out", f"{clip}@noisy") - clean
        samples, rate_hz = soundfile.read(found["uri"], always_2d=True)
        whole = soxr.resample(samples.mean(axis=1), rate_hz, FS, "VHQ")
        first = round(found["start_s"] * FS)
        wanted = np.take(whole, np.arange(first, first + len(noise)), mode="wrap")
        assert np.corrcoef(noise, wanted)[0, 1] > 1 - 1e-6
        assert found["gain_db"] == pytest.approx(level_db(noise) - level_db(wanted), abs=1e-3)
    assert drawn == {"short.wav", "stereo.wav"}


def test_a_room_convolves_and_keeps_the_length(made: Path) -> None:
    response, _ = soundfile.read(made / "rooms" / "hall.wav")
    for clip in CLIPS:
        clean, wet = heard(made / "out", clip), heard(made / "out", f"{clip}@hall")
        wanted = scipy.signal.convolve(clean, response, method="direct")[: len(clean)]
        assert np.abs(wet - wanted).max() < 1e-6 * np.abs(wanted).max()


def test_gain_and_speed(made: Path) -> None:
    ds = earmill.open_features(made / "out")
    clean = heard(made / "out", "a.wav")
    quiet, fast = heard(made / "out", "a.wav@quiet"), heard(made / "out", "a.wav@fast")
    assert level_db(clean) - level_db(quiet) == pytest.approx(20, abs=1e-6)
    wanted = soxr.resample(clean, FS * 1.1, FS, "VHQ")
    assert ds.by_id("a.wav@fast").seconds == len(wanted) / FS == 14545 / FS
    assert np.abs(fast - wanted[: len(fast)]).max() < 1e-5 * np.abs(wanted).max()


def test_steps_are_in_their_order(made: Path) -> None:
    """Speed, room, noise, gain: the SNR is over the slow clip in the room."""
    response, _ = soundfile.read(made / "rooms" / "hall.wav")
    slow = soxr.resample(heard(made / "out", "a.wav"), FS * 0.8, FS, "VHQ")
    wet = scipy.signal.convolve(slow, response, method="direct")[: len(slow)]
    noise = heard(made / "out", "a.wav@all") / 10 ** (6 / 20) - wet
    assert level_db(wet) - level_db(noise) == pytest.approx(3, abs=1e-3)


def test_a_response_of_another_rate_keeps_its_gain(tmp_path: Path) -> None:
    tone = np.sin(2 * np.pi * 500 * np.arange(2 * FS) / FS)
    write(tmp_path / "in" / "a.wav", tone)
    write(tmp_path / "rooms" / "a.wav", np.eye(1, 4000)[0], 48000)
    earmill.extract(job(tmp_path, [{"name": "x", "impulse_response": "rooms/a.wav"}]))
    clean, wet = heard(tmp_path / "out", "a.wav"), heard(tmp_path / "out", "a.wav@x")
    inner = slice(FS // 2, -FS // 2)
    assert level_db(wet[inner]) == pytest.approx(level_db(clean[inner]), abs=1e-3)


@pytest.mark.parametrize("rate_hz", [8000, 16000, 44100])
def test_pink_noise_loses_3_db_an_octave(rate_hz: int) -> None:
    noise = generated("pink", generator(1, "a", "pink"), 60 * rate_hz, rate_hz)
    hz, power = scipy.signal.welch(noise, rate_hz, nperseg=rate_hz)
    tops = 30 * 2.0 ** np.arange(np.log2(rate_hz / 2 / 30))
    bands = [power[(hz >= low) & (hz < 2 * low) & (hz < rate_hz / 2)] for low in tops]
    own = [hz[(hz >= low) & (hz < 2 * low) & (hz < rate_hz / 2)] for low in tops]
    ratios = [10 * np.log10((one * at).mean()) for one, at in zip(bands, own, strict=True)]
    assert np.ptp(ratios) < 1.5


# -- rows ---------------------------------------------------------------------------------------


def test_clean_rows_are_the_rows_of_the_job_without_variants(made: Path) -> None:
    plain = job(made, out="plain")
    del plain["audio"]["variants"]
    earmill.extract(plain)
    one, other = (earmill.open_features(made / name) for name in ("plain", "out"))
    assert [row.row_id for row in one] == CLIPS
    for row in one:
        same = other.by_id(row.row_id).features["samples"]
        assert row.features["samples"].tobytes() == same.tobytes()
    assert not {"variant", "variant_of"} & {*one.table.column_names, *one.provenance(0)}
    assert "variants" not in JobSpec.load(plain).canonical()["audio"]


def test_variants_are_beside_their_row_with_their_provenance(made: Path) -> None:
    ds = earmill.open_features(made / "out")
    assert ds.table["row_id"].to_pylist() == [clip + name for clip in CLIPS for name in NAMES]
    # A row and its variants share a shard, whatever output.shard_rows says.
    shards = [f"{number:05d}" for number in range(len(CLIPS)) for _ in NAMES]
    assert ds.table["shard"].to_pylist() == shards
    some = ds.filter(pc.field("variant") == "hall")
    assert [row.row_id for row in some] == ["a.wav@hall", "b.wav@hall"]
    assert some.table["variant_of"].to_pylist() == CLIPS
    clean = ds.filter(pc.field("variant").is_null())
    assert [row.row_id for row in clean] == CLIPS
    assert clean.provenance(0)["variant_settings"] is None
    found = settings(made / "out", "b.wav@all")
    room, noise = found["impulse_response"], found["noise"]
    assert (found["seed"], found["speed"], found["gain_db"]) == (7, 0.8, 6)
    assert room["uri"] == str(made / "rooms" / "hall.wav") and noise["snr_db"] == 3
    for one in (room, noise):
        assert one["sha256"] == sha256_of(Path(one["uri"]))
    assert settings(made / "out", "a.wav@pink5")["noise"]["kind"] == "pink"


def sha256_of(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_run_with_other_workers_has_equal_bytes(made: Path) -> None:
    with workers_here():
        end = earmill.extract(job(made, out="again", run__workers=2, run__threads_per_worker=2))
    assert end.status == "done"
    assert_equal_datasets(made / "again", made / "out")


def test_killed_and_resumed_it_has_equal_bytes(made: Path, go: Any) -> None:
    spec = JobSpec.load(job(made, out="killed"))
    with pytest.raises(Killed):
        go(spec, kill_after=1)
    assert len(committed_shards(Layout.open(str(made / "killed")))) == 1
    end, _ = go(spec)
    assert (end.status, end.rows_ok) == ("done", len(CLIPS) * len(NAMES))
    assert committed_files(made / "killed") == committed_files(made / "out")
    assert_whole(made / "killed")


def test_the_seed_decides_and_order_does_not(made: Path) -> None:
    plans = [
        make_plan(planned_source(spec), spec)
        for spec in (
            JobSpec.load(job(made)),
            JobSpec.load(job(made), ["audio.variants.seed=8"]),
            JobSpec.load(job(made, OF[::-1])),
        )
    ]
    one, _, turned = ({i.row_id: i.variant for i in plan.items()} for plan in plans)
    assert one == turned
    assert len({plan.plan_id for plan in plans}) == len({plan.spec_sha256 for plan in plans}) == 3
    first, again, other = (generator(seed, "a", "x").random(3).tolist() for seed in (7, 7, 8))
    assert first == again != other
    # The numbers themselves, which every machine must draw.
    assert first == pytest.approx(KNOWN, abs=0)


KNOWN = [0.4459456309672374, 0.23152624715380254, 0.7632913435986501]


@pytest.mark.parametrize("in_child", [False, True])
def test_deep_verification_computes_variants_again(made: Path, in_child: bool) -> None:
    spec = JobSpec.load(job(made, run__decode_in_child=in_child))
    report = verify_deep(Layout.open(str(made / "out")), spec, 100)
    assert (report.equal, report.problems) == (len(CLIPS) * len(NAMES), ())


def test_other_features_are_added_to_variants(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "out", tmp_path / "out")
    mel = {"model": "melspectrogram", "fs_hz": FS, "params": {"n_fft": 512}}
    earmill.add_features(tmp_path / "out", {"extract": [mel]})
    ds = earmill.open_features(tmp_path / "out", additions=True)
    levels = {name: ds.by_id(f"a.wav{name}").features["mel"].mean() for name in ("", "@quiet")}
    assert levels["@quiet"] < levels[""]
    assert len(ds) == len(CLIPS) * len(NAMES)


def test_features_added_before_noise_has_changed_are_left_out(copy: Path) -> None:
    earmill.extract(job(copy, [OF[0]]))
    mel = {"extract": [{"model": "melspectrogram", "fs_hz": FS}]}
    earmill.add_features(copy / "out", mel)
    shutil.rmtree(copy / "noises")
    write(copy / "noises" / "fan.wav", np.random.default_rng(9).standard_normal(FS))
    earmill.extract(job(copy, [OF[0]]), update=True)
    assert earmill.diff(copy / "out").changed == ("a.wav@noisy", "b.wav@noisy")
    with pytest.warns(UserWarning, match="added to earlier rows are left out: melspectrogram"):
        both = earmill.open_features(copy / "out", additions=True)
    assert list(both.streams) == ["samples"]


def test_each_channel_has_its_variants(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    write(tmp_path / "in" / "a.wav", rng.standard_normal((FS, 2)) * [0.1, 0.01])
    of = [{"name": "w", "noise": {"kind": "white", "snr_db": 0}}]
    earmill.extract(job(tmp_path, of, audio__channels="each"))
    ids = ["a.wav#ch0", "a.wav#ch1", "a.wav@w#ch0", "a.wav@w#ch1"]
    assert earmill.open_features(tmp_path / "out").table["row_id"].to_pylist() == ids
    noises = [
        heard(tmp_path / "out", f"a.wav@w#ch{k}") - heard(tmp_path / "out", ids[k]) for k in (0, 1)
    ]
    # Both channels get one noise, each at its own level.
    assert np.corrcoef(*noises)[0, 1] > 0.999
    assert level_db(noises[0]) - level_db(noises[1]) == pytest.approx(20, abs=0.2)


def test_variants_are_compared_with_the_clean_clip(made: Path, tmp_path: Path) -> None:
    """Each clip is its own reference recording; the reference has no noise."""
    lines = [f"{clip},{clip},{clip}" for clip in CLIPS]
    (tmp_path / "pairs.csv").write_text("\n".join(["id,uri,clean", *lines]) + "\n")
    shutil.copytree(made / "in", tmp_path, dirs_exist_ok=True)
    pairs = {"kind": "manifest", "uri": str(tmp_path / "pairs.csv"), "reference_column": "clean"}
    models = [{"model": "stoi", "fs_hz": FS}]
    creep = {"name": "creep", "speed": 1.01}  # 10 ms shorter, which recordings of a pair may be
    of = [OF[1], OF[4], OF[5], creep]
    earmill.extract(job(tmp_path, of) | {"source": pairs, "extract": models})
    ds = earmill.open_features(tmp_path / "out")
    scores = {row.row_id: float(row.features["stoi"][0, 0]) for row in ds}
    assert [*scores] == [f"{clip}{name}" for clip in CLIPS for name in ("", "@white", "@quiet")]
    for clip in CLIPS:
        assert scores[clip] == pytest.approx(1, abs=1e-5)
        assert scores[f"{clip}@quiet"] == pytest.approx(1, abs=1e-5)
        assert scores[f"{clip}@white"] < 0.95
    # Another speed is another length.
    refused = bad_rows(tmp_path / "out")
    assert refused.keys() == {f"{clip}@{name}" for clip in CLIPS for name in ("fast", "creep")}
    assert all("pair_length" in why for why in refused.values())


def test_two_ears_have_a_response_each(tmp_path: Path) -> None:
    """A clip with one channel gets two ears from a response of two channels."""
    write(tmp_path / "in" / "a.wav", np.eye(1, FS)[0])
    response = np.zeros((100, 2))
    response[10, 0], response[30, 1] = 1.0, 0.5
    write(tmp_path / "rooms" / "ears.wav", response)
    of = [{"name": "x", "impulse_response": "rooms/ears.wav"}]
    spec = JobSpec.load(job(tmp_path, of, audio__channels="binaural"))
    _, varied = planned_source(spec).items()
    preparer = Preparer(spec.audio, (Target(FS, "digital", 2),))
    (clip,) = preparer.open(varied, open(tmp_path / "in" / "a.wav", "rb"))  # type: ignore[misc]
    wanted = np.zeros((2, FS))
    wanted[0, 10], wanted[1, 30] = 1.0, 0.5
    assert np.abs(np.asarray(clip.signals[0]) - wanted).max() < 1e-6


# -- rows that fail, and files that change ------------------------------------------------------


def bad_rows(out: Path) -> dict[str, str]:
    rows = earmill.open_features(out).quarantine.to_pylist()
    return {row["row_id"]: f"{row['error_class']}: {row['message']}" for row in rows}


def test_silence_gets_no_noise_and_silent_noise_fails_its_row_alone(tmp_path: Path) -> None:
    write(tmp_path / "in" / "silent.wav", np.zeros(FS))
    write(tmp_path / "in" / "loud.wav", np.full(FS, 0.1))
    write(tmp_path / "noises" / "late.wav", np.concatenate([np.zeros(40 * FS), np.ones(1)]))
    of = [OF[0], OF[1]]
    end = earmill.extract(job(tmp_path, of))
    bad = bad_rows(tmp_path / "out")
    assert (end.rows_ok, list(bad)) == (4, ["loud.wav@noisy", "silent.wav@noisy"])
    assert "not_audio" in bad["loud.wav@noisy"] and "got silence from" in bad["loud.wav@noisy"]
    assert not heard(tmp_path / "out", "silent.wav@white").any()
    assert settings(tmp_path / "out", "silent.wav@white")["noise"]["gain_db"] is None


def test_a_long_row_has_no_variants(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    write(tmp_path / "in" / "long.wav", 0.1 * rng.standard_normal(121 * 2000), 2000)
    mel = {"model": "melspectrogram", "fs_hz": 4000, "params": {"n_fft": 512}}
    end = earmill.extract({**job(tmp_path, [OF[1]]), "extract": [mel]})
    (why,) = bad_rows(tmp_path / "out").values()
    assert end.rows_ok == 1 and "too_long" in why and "at most 120 s for a variant" in why
    ds = earmill.open_features(tmp_path / "out")
    assert ds.provenance(0)["variant"] is None


def test_changed_noise_is_a_bad_row_until_it_is_retried(copy: Path, go: Any) -> None:
    spec = JobSpec.load(job(copy))
    with pytest.raises(Killed):
        go(spec, kill_after=0)
    for name in ("short.wav", "stereo.wav"):
        write(copy / "noises" / name, np.full(FS, 0.5))
    end, _ = go(spec)
    noisy = [f"{clip}@{name}" for clip in CLIPS for name in ("noisy", "all")]
    assert sorted(bad_rows(copy / "out")) == sorted(noisy) and end.rows_bad == len(noisy)
    assert all("changed since it was planned" in why for why in bad_rows(copy / "out").values())
    go(spec, kill_after=None)
    assert earmill.retry(copy / "out", job=job(copy)).rows_bad == 0
    for clip in CLIPS:
        noise = heard(copy / "out", f"{clip}@noisy") - heard(copy / "out", clip)
        assert np.ptp(noise) < 1e-6
    assert_whole(copy / "out")


def test_missing_noise_stops_the_shard_and_blames_no_row(copy: Path, go: Any) -> None:
    spec = JobSpec.load(job(copy, [OF[0]]))
    with pytest.raises(Killed):
        go(spec, kill_after=0)
    shutil.rmtree(copy / "noises")
    end, _ = go(spec)
    assert end.status == "failed" and "a variant was planned with it" in end.message


def test_an_update_computes_what_has_changed(copy: Path, computed: list[str]) -> None:
    earmill.extract(job(copy))
    computed.clear()
    (copy / "in" / "b.wav").rename(copy / "in" / "c.wav")
    earmill.extract(job(copy), update=True)
    # The moved row is a copy by its bytes; random choices depend on the id.
    assert sorted(computed) == sorted(f"c.wav{name}" for name in NAMES[1:])
    computed.clear()
    shutil.rmtree(copy / "rooms")
    write(copy / "rooms" / "hall.wav", np.array([0.5]))
    earmill.extract(job(copy), update=True)
    assert sorted(computed) == sorted(
        f"{c}@{n}" for c in ("a.wav", "c.wav") for n in ("all", "hall")
    )
    assert_whole(copy / "out")
    clean, wet = heard(copy / "out", "c.wav"), heard(copy / "out", "c.wav@hall")
    assert np.abs(wet - 0.5 * clean).max() < 1e-7


def test_equal_files_are_copied_and_their_variants_computed(
    copy: Path, computed: list[str]
) -> None:
    shutil.copy(copy / "in" / "a.wav", copy / "in" / "z.wav")
    of = [OF[1], OF[4]]
    earmill.extract(job(copy, of, output__equal_files_once=True))
    names = ("", "@white", "@quiet")
    wanted = {f"{clip}{name}" for clip in (*CLIPS, "z.wav") for name in names} - {"z.wav"}
    assert sorted(computed) == sorted(wanted)
    same, other = (heard(copy / "out", f"{clip}@white") for clip in ("a.wav", "z.wav"))
    assert not np.array_equal(same, other)


# -- sources ------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
def test_rows_of_tables_are_read_for_each_variant(tmp_path: Path, streaming: bool) -> None:
    write_parquet(tmp_path / "in", table())
    spec = JobSpec.load(
        job(tmp_path, [OF[4], OF[5]])
        | {"source": {"kind": "hf", "uri": str(tmp_path / "in"), "id_column": "key"}},
        [f"source.streaming={streaming}"],
    )
    source = planned_source(spec)
    items = list(source.items())
    assert [item.row_id for item in items[:3]] == ["utt-000", "utt-000@quiet", "utt-000@fast"]
    bytes_of = []
    for item, stream in fetch(source, items):
        assert not isinstance(stream, Exception), stream
        bytes_of.append((item.clean_id, stream.read()))
    assert len({*bytes_of}) == len(items) / 3


# -- refusals -----------------------------------------------------------------------------------

NOISE = {"name": "n", "noise": {"uri": "noises", "snr_db": 3}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "odd_name": ({"name": "a b", "gain_db": 1}, "expected letters, digits and . _ - only"),
    "slash": ({"name": "a/b", "gain_db": 1}, "it becomes a part of row ids"),
    "no_name": ({"gain_db": 1}, "audio.variants.of.0.name: missing"),
    "nothing": ({"name": "a"}, "got none: it would be the clean row"),
    "key": ({"name": "a", "gain": 1}, "of.0.gain: unknown key; did you mean 'gain_db'?"),
    "noise_key": (
        {"name": "a", "noise": {"kind": "pink", "snr": 1}},
        "noise.snr: unknown key; did you mean 'snr_db'?",
    ),
    "no_snr": ({"name": "a", "noise": {"kind": "pink"}}, "noise.snr_db: missing"),
    "two": (
        {"name": "a", "noise": {"kind": "pink", "uri": "x", "snr_db": 1}},
        "expected exactly one of uri and kind",
    ),
    "kind": ({"name": "a", "noise": {"kind": "brown", "snr_db": 1}}, "white or pink"),
    "speed": ({"name": "a", "speed": 0}, "of.0.speed"),
    "secret": (
        {"name": "a", "impulse_response": "https://user:secret@host/a.wav"},
        "credentials inside a URI",
    ),
    "no_noise": ({"name": "a", "noise": {"uri": "none", "snr_db": 1}}, "there is none"),
    "no_room": ({"name": "a", "impulse_response": "none.wav"}, "impulse_response of 'a'"),
    "no_audio": ({"name": "a", "noise": {"uri": "texts", "snr_db": 1}}, "no audio files"),
    "bad_noise": ({"name": "a", "noise": {"uri": "broken", "snr_db": 1}}, "broken/x.wav"),
    "silent": ({"name": "a", "impulse_response": "silent/a.wav"}, "expected sound, got silence"),
    "two_ears": ({"name": "a", "impulse_response": "noises/stereo.wav"}, "expected one channel"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_before_work(copy: Path, name: str) -> None:
    variant, message = REFUSED[name]
    for folder, data in (("texts", "a.txt"), ("broken", "x.wav")):
        (copy / folder).mkdir()
        (copy / folder / data).write_text("no audio")
    write(copy / "silent" / "a.wav", np.zeros(100))
    with pytest.raises((earmill.SpecError, earmill.SourceError)) as caught:
        run_job(JobSpec.load(job(copy, [variant])))
    assert message in str(caught.value)
    assert not (copy / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"audio__spans": {"seconds": 10}}, "expected spans or variants, got both"),
        ({"audio__calibration": {"level_db_spl": 65}}, "which would undo the gain"),
    ],
)
def test_keys_that_exclude_variants(made: Path, changes: Any, message: str) -> None:
    with pytest.raises(earmill.SpecError, match=message):
        JobSpec.load(job(made, **changes))


def test_names_and_ids_are_unique(copy: Path) -> None:
    with pytest.raises(earmill.SpecError, match="got 'n' more than once"):
        JobSpec.load(job(copy, [NOISE, NOISE]))
    shutil.copy(copy / "in" / "a.wav", copy / "in" / "a.wav@n")
    (copy / "in" / "a.wav@n").rename(copy / "in" / "a.wav@n.wav")
    with pytest.raises(earmill.SourceError, match=r"'a\.wav@n\.wav'"):
        run_job(JobSpec.load(job(copy, [{"name": "n.wav", "gain_db": 1}])))


def test_a_batch_extractor_refuses_variants(made: Path) -> None:
    with pytest.raises(earmill.SpecError, match="a batch has one result"):
        earmill.BatchExtractor(job(made))
