"""The job spec: what it accepts, what its hash covers, and what it says when something is wrong."""

from __future__ import annotations

import copy
import doctest
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import earmill.pipeline.spec.job as spec_module
from earmill.pipeline.audio.decode import Limits
from earmill.pipeline.common.errors import SpecError
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import Description, built_models, validate_models
from earmill.pipeline.spec.source import (
    AUDIO_EXTENSIONS,
    FIRST_EXTENSIONS,
    FilesSpec,
    HfSpec,
    ManifestSpec,
)
from earmill.pipeline.spec.yaml_overrides import apply_overrides, load_yaml

JOB: dict[str, Any] = {
    "source": {"kind": "files", "uri": "data/speech"},
    "extract": [{"model": "dau1997", "streams": {"modulation": {"frame_rate_hz": 100}}}],
    "output": {"uri": "out/features"},
}

JOB_YAML = """
name: speech-dau1997
source:
  kind: files
  uri: s3://corpus/speech
  storage_options: {key: AKIA, secret: hush}
audio:
  channels: left
  calibration: {level_db_spl: 65}
extract:
  - model: dau1997
    fs_hz: 44100
    params: {depth: 1e-3}
output:
  uri: out
  formats: [zarr]
  dtype: float32
run: {workers: 2, max_bad_fraction: 0}
"""


def job(**sections: Any) -> dict[str, Any]:
    """JOB with some sections replaced."""
    return copy.deepcopy(JOB) | sections


def error_of(data: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(SpecError) as caught:
        JobSpec.load(data, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


class TestLoading:
    def test_a_yaml_file(self, tmp_path: Path) -> None:
        path = tmp_path / "job.yaml"
        path.write_text(JOB_YAML, encoding="utf-8")
        spec = JobSpec.load(path)
        assert spec.name == "speech-dau1997"
        assert isinstance(spec.source, FilesSpec)
        assert spec.source.storage_options == {"key": "AKIA", "secret": "hush"}
        assert spec.audio.channels == "left"
        assert spec.audio.calibration.to_dict() == {"level_db_spl": 65.0}
        assert spec.extract[0].params == {"depth": 0.001}  # a number, not the text "1e-3"
        assert spec.output.formats == ("zarr",)
        assert spec.run.workers == 2

    def test_the_same_from_a_uri(self, tmp_path: Path) -> None:
        path = tmp_path / "job.yaml"
        path.write_text(JOB_YAML, encoding="utf-8")
        assert JobSpec.load(f"file://{path}") == JobSpec.load(path)

    def test_defaults(self) -> None:
        spec = JobSpec.load(JOB)
        assert spec.audio.channels == "mean"
        assert spec.audio.calibration.to_dict() == {"rms1_db_spl": 100.0}
        assert spec.audio.resampler == "soxr_vhq"
        assert (spec.audio.min_rate_hz, spec.audio.max_rate_hz) == (1000.0, 768000.0)
        assert spec.output.formats == ("parquet", "zarr")
        assert (spec.output.dtype, spec.output.shard_seconds) == ("float16", 600.0)
        assert (spec.run.max_attempts, spec.run.max_bad_fraction) == (3, 0.05)

    def test_limits_of_what_is_taken(self) -> None:
        """A job that says nothing takes what it took before."""
        assert JobSpec.load(JOB).audio.limits() == Limits()
        audio = {"unterminated": "accept", "span_tolerance_s": 0.5, "max_seconds": 60}
        assert JobSpec.load(job(audio=audio)).audio.limits() == Limits(
            max_seconds=60.0, span_tolerance_s=0.5, unterminated=True
        )

    @pytest.mark.parametrize("value", ["-0.1", ".nan", ".inf", "much"])
    def test_a_tolerance_is_a_time(self, value: str) -> None:
        with pytest.raises(SpecError, match=r"audio\.span_tolerance_s: .*got"):
            JobSpec.load(JOB, [f"audio.span_tolerance_s={value}"])

    def test_every_kind_of_source(self) -> None:
        manifest = JobSpec.load(job(source={"kind": "manifest", "uri": "clips.csv"}))
        assert isinstance(manifest.source, ManifestSpec)
        hub = {"kind": "hf", "uri": "org/corpus", "split": "test", "streaming": True}
        spec = JobSpec.load(job(source=hub))
        assert isinstance(spec.source, HfSpec)
        assert (spec.source.audio_column, spec.source.id_column) == ("audio", None)

    def test_it_is_frozen(self) -> None:
        with pytest.raises(ValidationError, match="frozen"):
            JobSpec.load(JOB).name = "other"

    def test_extensions_are_normalised(self) -> None:
        source = {"kind": "files", "uri": "x", "extensions": [".WAV", "flac", "wav"]}
        spec = JobSpec.load(job(source=source))
        assert isinstance(spec.source, FilesSpec)
        assert spec.source.extensions == ("flac", "wav")

    @pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"a: [1"], ids=["binary", "syntax"])
    def test_a_file_that_is_no_yaml(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "job.yaml"
        path.write_bytes(content)
        with pytest.raises(SpecError, match=r"job\.yaml: not (a UTF-8 text file|valid YAML)"):
            JobSpec.load(path)

    def test_a_file_that_is_not_there(self) -> None:
        with pytest.raises(SpecError, match="there is no such job file; `earmill init` writes one"):
            JobSpec.load("no/such/job.yaml")

    def test_a_folder_in_the_place_of_a_file(self, tmp_path: Path) -> None:
        with pytest.raises(SpecError, match="expected a job file in YAML, got a folder; `earmill"):
            JobSpec.load(tmp_path)

    @pytest.mark.parametrize(
        ("flat", "told"),
        [
            ({"source": "recordings"}, "; e.g. source: {kind: files, uri: recordings}"),
            ({"extract": "dau1997"}, "; e.g. extract: [{model: dau1997}]"),
            ({"output": "out"}, "; e.g. output: {uri: features}"),
        ],
    )
    def test_a_section_written_as_one_word_shows_its_form(
        self, flat: dict[str, str], told: str
    ) -> None:
        sections = {
            "source": {"kind": "files", "uri": "x"},
            "extract": [{"model": "mfcc"}],
            "output": {"uri": "y"},
        }
        with pytest.raises(SpecError) as caught:
            JobSpec.load({**sections, **flat})
        assert str(caught.value).endswith(told)

    def test_a_yaml_that_is_no_mapping(self, tmp_path: Path) -> None:
        path = tmp_path / "job.yaml"
        path.write_text("- a\n")
        with pytest.raises(SpecError, match="expected a mapping with source, extract and output"):
            JobSpec.load(path)

    def test_a_key_given_twice(self) -> None:
        with pytest.raises(SpecError, match="line 3: key 'uri' is given twice"):
            load_yaml("source:\n  uri: a\n  uri: b\n", name="job")


class TestHash:
    def test_the_canonical_form_and_its_hash_are_pinned(self) -> None:
        """Resume compares this hash: if it changes for an old job, old outputs are orphaned."""
        spec = JobSpec.load(job(audio={"calibration": {"level_db_spl": 65}}))
        assert spec.canonical_json() == (
            '{"audio":{"calibration":{"level_db_spl":65},"channels":"mean","max_rate_hz":768000,'
            '"min_rate_hz":1000,"resampler":"soxr_vhq"},"extract":[{"model":"dau1997",'
            '"params":{},"streams":{"modulation":{"frame_rate_hz":100}}}],"output":{"dtype":'
            '"float16","formats":["parquet","zarr"],"row_group_profile":"random","shard_rows":2000,'
            '"shard_seconds":600},"source":{"extensions":["aac","aif","aifc","aiff","au","caf",'
            '"flac","m4a","mka","mp3","mp4","nist","oga","ogg","opus","rf64","snd","sph","w64",'
            '"wav","wave","webm","wma"],"glob":"**/*","kind":"files","uri":"data/speech"}}'
        )
        digest = "c34dcca46ec59b6dd2edcfdc9470d62cc177b1e03042a07c6f31d715f52ae35a"
        assert spec.sha256() == digest

    @pytest.mark.parametrize(
        "override",
        [
            "name=other",
            "run.workers=7",
            "run.max_bad_fraction=0.5",
            "output.uri=s3://elsewhere/x",
            "output.storage_options={key: a}",
            "source.storage_options={key: a}",
            "output.formats=[zarr, parquet]",
            "output.shard_seconds=600.0",
            "extract.0.streams.modulation.frame_rate_hz=100.0",
            f"source.extensions=[{', '.join(reversed(AUDIO_EXTENSIONS))}]",
            "audio.channels=mean",
        ],
    )
    def test_what_does_not_decide_the_output_is_outside(self, override: str) -> None:
        assert JobSpec.load(JOB, [override]).sha256() == JobSpec.load(JOB).sha256()

    @pytest.mark.parametrize(
        "override",
        [
            "source.uri=data/other",
            "source.glob='*.wav'",
            "audio.channels=0",
            "audio.calibration.rms1_db_spl=94",
            "audio.resampler=soxr_hq",
            "audio.resampler=torchaudio_kaiser_best",
            "extract.0.fs_hz=16000",
            "extract.0.params.flow=null",
            "extract.0.streams.modulation.pool=rms",
            "output.dtype=float32",
            "output.formats=[zarr]",
            "output.shard_rows=10",
            "output.row_group_profile=scan",
        ],
    )
    def test_what_decides_the_output_is_inside(self, override: str) -> None:
        assert JobSpec.load(JOB, [override]).sha256() != JobSpec.load(JOB).sha256()

    @pytest.mark.parametrize(
        "override",
        [
            "audio.unterminated=quarantine",
            "audio.unterminated=null",
            "audio.span_tolerance_s=null",
            f"source.extensions=[{', '.join(FIRST_EXTENSIONS)}]",
        ],
    )
    def test_what_jobs_of_before_did_is_what_they_say(self, override: str) -> None:
        """A stored job names the endings of its time; listing takes all that are read now."""
        spec = JobSpec.load(JOB, [override])
        assert spec.sha256() == JobSpec.load(JOB).sha256()
        assert isinstance(spec.source, FilesSpec)
        assert spec.source.extensions == AUDIO_EXTENSIONS
        assert spec.canonical()["source"]["extensions"] == list(FIRST_EXTENSIONS)

    @pytest.mark.parametrize(
        "override",
        ["audio.unterminated=accept", "audio.span_tolerance_s=0.5", "source.extensions=[m4b]"],
    )
    def test_what_jobs_of_before_did_not_say_is_inside(self, override: str) -> None:
        assert JobSpec.load(JOB, [override]).sha256() != JobSpec.load(JOB).sha256()

    def test_key_order_does_not_matter(self) -> None:
        backwards = {key: JOB[key] for key in reversed(JOB)}
        assert JobSpec.load(backwards).sha256() == JobSpec.load(JOB).sha256()

    def test_the_canonical_form_is_a_job_again(self) -> None:
        spec = JobSpec.load(job(audio={"channels": 2}), ["extract.0.params.flow=null"])
        again = json.loads(spec.canonical_json())
        again["output"]["uri"] = "elsewhere"
        assert JobSpec.load(again).sha256() == spec.sha256()

    def test_credentials_never_show(self) -> None:
        options = {
            "source.storage_options": "{secret: hush}",
            "output.storage_options": "{k: hush}",
        }
        spec = JobSpec.load(JOB, [f"{key}={value}" for key, value in options.items()])
        assert "hush" not in spec.canonical_json()
        assert "hush" not in repr(spec)


class TestMessages:
    """Key path, what is wrong, what to write; one line."""

    @pytest.mark.parametrize(
        ("override", "expected"),
        [
            ("audio.chanels=left", "audio.chanels: unknown key; did you mean 'channels'?"),
            ("extract.0.modell=x", "extract.0.modell: unknown key; did you mean 'model'?"),
            ("sorce=1", "sorce: unknown key; did you mean 'source'?"),
            ("source.ur=x", "source.ur: unknown key; did you mean 'uri'?"),
            ("source.zzz=x", "source.zzz: unknown key (valid keys: kind, limit, uri, glob, "),
            (
                "source.kind=file",
                "source.kind: expected files, hf, kaldi, lhotse, manifest or webdataset, got",
            ),
            (
                "source={uri: x}",
                "source.kind: missing; expected files, hf, kaldi, lhotse, manifest or webdataset",
            ),
            ("source={kind: files}", "source.uri: missing, and it has no default"),
            ("source=5", "source: expected a mapping, got 5"),
            ("audio.channels=lft", "audio.channels: expected mean, left, right, each, binaural or"),
            ("audio.channels=true", "a channel index from 0, got True"),
            ("audio.channels=-1", "a channel index from 0, got -1"),
            (
                "audio.resampler=sox",
                "audio.resampler: expected one of soxr_vhq, soxr_hq, torchaudio_kaiser_best, "
                "got 'sox'",
            ),
            ("audio.max_rate_hz=5", "audio: min_rate_hz 1000 is above max_rate_hz 5"),
            ("audio.calibration={}", "audio.calibration: expected exactly one of rms1_db_spl"),
            ("audio.calibration.level_db_spl=.nan", "level_db_spl: input should be a finite"),
            ("extract=[]", "extract: expected at least one entry, got a list of 0"),
            ("extract.0=dau1997", "extract.0: expected a mapping, got 'dau1997'"),
            ("extract.0.fs_hz=-1", "extract.0.fs_hz: input should be greater than 0, got -1"),
            ("extract.0.fs_hz=fast", "extract.0.fs_hz: expected a number, got 'fast'"),
            ("extract.0.streams={}", "extract.0.streams: expected at least one stream"),
            ("extract.0.params.q=.inf", "extract.0.params.q: expected a finite number, got inf"),
            (
                "output.dtype=float8",
                "output.dtype: expected float16, float32 or int8, got 'float8'; did",
            ),
            (
                "output.formats=[zar]",
                "output.formats.0: expected parquet, webdataset or zarr, got",
            ),
            ("output.formats=[zarr, zarr]", "output.formats: expected one format or several"),
            ("output.shard_rows=0", "output.shard_rows: input should be greater than or equal to"),
            ("run.workers=two", "run.workers: expected a whole number, got 'two'"),
            ("run.device=cdua", "run.device: expected auto, cpu or cuda, got 'cdua'; did you mean"),
            ("run.gpus_per_worker=-1", "run.gpus_per_worker: input should be greater than or"),
            ("run.gpus_per_worker=2", "run.gpus_per_worker: input should be less than or equal"),
            ("run={device: cpu, gpus_per_worker: 0.5}", "run: expected no gpus_per_worker with de"),
            ("run={device: cuda, gpus_per_worker: 0}", "run: expected gpus_per_worker above 0 wit"),
            ("run.max_bad_fraction=5", "run.max_bad_fraction: input should be less than or equal"),
            ("source.extensions=wav", "source.extensions: expected a list, got 'wav'"),
            ("source.uri=", "source.uri: expected text, got None"),
            ("source.uri=' '", "source.uri: expected a path or URI, got an empty string"),
            ("name=a b", "name: string should match pattern"),
            ("run.workers=true", "run.workers: expected a number, got true"),
            ("output.shard_seconds=yes", "output.shard_seconds: expected a number, got true"),
            ("run.max_bad_fraction=false", "run.max_bad_fraction: expected a number, got false"),
        ],
    )
    def test_a_wrong_value(self, override: str, expected: str) -> None:
        message = error_of(JOB, override)
        assert message.startswith("job: ")
        assert expected in message

    def test_more_than_one_error(self) -> None:
        message = error_of(JOB, "run.workers=0", "output.shard_rows=0", "audio.x=1")
        assert message.startswith("job: audio.x: unknown key")
        assert message.endswith("(and 2 more)")

    def test_a_list_of_one_bad_entry_is_one_error(self) -> None:
        variants = {"of": [{"name": "loud", "gain_db": 1000}]}
        message = error_of(job(audio={"variants": variants}))
        assert message.startswith("job: audio.variants.of.0.gain_db: ")
        assert message.endswith("got 1000")

    def test_a_stream_from_two_models(self) -> None:
        entry = JOB["extract"][0]
        message = error_of(job(extract=[entry, entry | {"model": "king2019"}]))
        assert "stream 'modulation' comes from both dau1997 and king2019" in message

    def test_credentials_in_a_uri(self) -> None:
        message = error_of(JOB, "source.uri=s3://key:secret@bucket/x")
        assert "use storage_options" in message
        assert "secret" not in message

    @pytest.mark.parametrize(
        "override",
        ["source.storage_options=hush", "source.storage_options={a: hush", "source=[{k: hush}]"],
    )
    def test_storage_options_are_not_repeated(self, override: str) -> None:
        assert "hush" not in error_of(JOB, override)


class TestOverrides:
    def test_values_are_yaml(self) -> None:
        spec = JobSpec.load(
            JOB,
            [
                "audio.channels=1",
                "extract.0.fs_hz=16000",
                "extract.0.params={a: [1, 2], b: true}",
                "output.formats=[zarr]",
                "run.workers=null",
            ],
        )
        assert spec.audio.channels == 1
        assert spec.extract[0].fs_hz == 16000.0
        assert spec.extract[0].params == {"a": [1, 2], "b": True}
        assert spec.output.formats == ("zarr",)
        assert spec.run.workers is None

    def test_later_ones_win_and_the_input_is_not_touched(self) -> None:
        data = job()
        result = apply_overrides(data, ["output.uri=a", "output.uri=b=c"])
        assert result["output"]["uri"] == "b=c"
        assert data == JOB

    def test_missing_sections_appear(self) -> None:
        assert apply_overrides({"run": None}, ["run.workers=2", "a.b.c=1"]) == {
            "run": {"workers": 2},
            "a": {"b": {"c": 1}},
        }

    @pytest.mark.parametrize(
        ("override", "expected"),
        [
            ("output.uri", "expected KEY.PATH=VALUE"),
            ("=1", "expected KEY.PATH=VALUE"),
            ("a..b=1", "expected KEY.PATH=VALUE"),
            ("extract.1.model=x", "extract is a list of 1; expected an index 0 to 0, got '1'"),
            ("extract.first.model=x", "expected an index 0 to 0, got 'first'"),
            ("source.uri.x=1", "source.uri is a single value, it has no key 'x'"),
            ("output.uri=[1", r"--set output.uri: not valid YAML"),
        ],
    )
    def test_wrong_ones(self, override: str, expected: str) -> None:
        message = error_of(JOB, override)
        assert message.startswith("--set ")
        assert expected in message


class TestModels:
    def test_a_good_job_gives_its_extractors(self) -> None:
        extractors = validate_models(JobSpec.load(JOB, ["extract.0.fs_hz=16000"]))
        assert [extractor.fs_hz for extractor in extractors] == [16000.0]
        assert [stream.name for stream in extractors[0].streams] == ["modulation"]

    @pytest.mark.parametrize(
        ("override", "expected"),
        [
            ("extract.0.model=dau1979", r"extract\.0: .*dau19"),
            ("extract.0.params={no_such_parameter: 1}", r"extract\.0: .*no_such_parameter"),
            ("extract.0.streams={no_such_stream: {}}", r"extract\.0: .*no_such_stream"),
        ],
    )
    def test_what_cannot_be_built_is_named(self, override: str, expected: str) -> None:
        with pytest.raises(SpecError, match=expected):
            validate_models(JobSpec.load(JOB, [override]))

    def test_another_process_describes_them_alike(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Also where the module of a model prints something."""
        monkeypatch.syspath_prepend(str(tmp_path))
        layer = "import torch\nclass Same(torch.nn.Identity): ...\n"
        (tmp_path / "loud_module.py").write_text(f"print('hello')\n{layer}")
        params = {"module": "loud_module:Same", "channel_axis": True, "compile": False}
        same_stream = {"same": {"width": 1, "hop_length": 1, "frames_axis": 2}}
        loud = {"model": "torch_module", "params": params, "streams": same_stream}
        spec = JobSpec.load(job(extract=[{"model": "dau1997", "fs_hz": 16000}, loud]))
        (here, _), (same, _) = validate_models(spec), built_models(spec)
        monkeypatch.delitem(sys.modules, "torch")
        capfd.readouterr()
        there, made = built_models(spec)
        assert there.description == same.description == Description.of(here)
        record = json.loads(json.dumps(here.describe()))  # whose threads a test before this may set
        assert {**there.record, "threads": 0} == {**record, "threads": 0}
        assert made.record["model"] == "torch_module" and "hello" in capfd.readouterr().err

    def test_another_process_refuses_them_alike(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It imports a module in the place of torch, which takes four CPU seconds to import."""
        with pytest.raises(SpecError) as refused:
            built_models(JobSpec.load(JOB, ["extract.0.params={no_such_parameter: 1}"]))
        assert str(refused.value).startswith("extract.0: model 'dau1997' has no parameter")
        handed_over = pickle.loads(pickle.dumps(refused.value))
        assert (type(handed_over), str(handed_over)) == (SpecError, str(refused.value))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        refusal = (
            "from earmill.pipeline.common.errors import SpecError; raise SpecError('no model')"
        )
        (tmp_path / "torch.py").write_text(refusal)
        with pytest.raises(SpecError, match=r"^no model$"):
            built_models(JobSpec.load(JOB))

    def test_a_module_may_end_the_process(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Here one that the models import, whatever they are: it stands in for torch."""
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        (tmp_path / "torch.py").write_text("import os; os._exit(7)")
        spec = JobSpec.load(JOB)
        with pytest.raises(SpecError, match=r"extract: .* builds the models ended with 7"):
            built_models(spec)

    def test_power_does_not_fit_half_precision(self) -> None:
        mel = {"model": "melspectrogram", "params": {"log": None}}
        with pytest.raises(SpecError, match="expected float32 for melspectrogram mel"):
            validate_models(JobSpec.load(job(extract=[mel]), ["output.dtype=float16"]))
        assert validate_models(JobSpec.load(job(extract=[mel]), ["output.dtype=float32"]))

    def test_default_streams_must_be_unique_too(self) -> None:
        entry = {"model": "dau1997", "fs_hz": 16000}
        with pytest.raises(SpecError, match="comes from both dau1997 and dau1997"):
            validate_models(JobSpec.load(job(extract=[entry, entry])))


def test_examples_in_the_docstrings() -> None:
    results = doctest.testmod(spec_module)
    assert results.attempted > 0
    assert results.failed == 0
