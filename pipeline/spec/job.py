"""The job spec: one YAML file <-> one validated, frozen object <-> one canonical hash.

The hash covers everything that decides the features and nothing else: not the job's name, not the
`run` section, not licences, not credentials, not where the output goes. Numbers are canonical
(44100 and 44100.0 are one value), key order is not significant. Models and their parameters are
checked by building them, in `spec.models`, so that reading a spec stays cheap.

Names of output formats in a job: those of the entry points of `earmill.formats`.

A format is imported as soon as a job names it, so that one that is broken ends the job before any
work. The built-in ones import what they need when they are used.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    field_validator,
    model_validator,
)

from earmill.pipeline.audio.resample import DEFAULT_QUALITY, RESAMPLERS
from earmill.pipeline.common.errors import ExtensionError, SpecError
from earmill.pipeline.common.extension_points import FORMATS
from earmill.pipeline.common.text import one_line
from earmill.pipeline.common.untrusted import MAX_YAML_BYTES
from earmill.pipeline.spec.licenses import LicensesSpec
from earmill.pipeline.spec.messages import explain
from earmill.pipeline.spec.section import Options, PositiveFloat, SpecModel, plain_uri
from earmill.pipeline.spec.source import SourceSpec, stored_extensions
from earmill.pipeline.spec.spans import SpansSpec
from earmill.pipeline.spec.yaml_overrides import apply_overrides, load_yaml
from earmill.pipeline.storage.filesystems import filesystem_of
from earmill.pipeline.storage.store_errors import is_store_error, store_line

if TYPE_CHECKING:
    from earmill.pipeline.audio.decode import Limits


def _usable(name: str) -> str:
    try:
        FORMATS.load(name)
    except ExtensionError as error:
        raise ValueError(str(error)) from error
    return name


class _Installed:
    """The names as a JSON schema, at the time it is asked for."""

    @staticmethod
    def __get_pydantic_json_schema__(core_schema: Any, handler: GetJsonSchemaHandler) -> Any:
        return {"type": "string", "enum": [*FORMATS.names()]}


FormatName = Annotated[str, AfterValidator(_usable), _Installed]


# One worker fills a GPU: it keeps two launches in flight.
GPUS_PER_WORKER = 1.0
# Kubernetes and spot machines give 30 s between SIGTERM and SIGKILL.
GRACE_S = 25.0
SLURM_ARRAY = "slurm-array"
# HOST:PORT, or a text file.
METRICS = r"^([^/:\s]+|\[[0-9A-Fa-f:]+\]):[0-9]{1,5}$|.\.prom$"


class RunSpec(SpecModel):
    """How the job runs; nothing here changes the output.

    Args:
        executor: What carries the workers: ray, actors on this machine or on a cluster; local,
            plain processes of this machine, which start faster; slurm-array, the same in each task
            of an array of batch jobs, which share the shards out and leave when none is left.
        array: Which task of an array this is, and of how many: 3/100. Taken from the batch system's
            environment when null; it only says where to begin.
        grace_s: Seconds that shards in flight may go on after a request to stop (SIGTERM, SIGINT,
            or SIGUSR1 before a time limit).
        workers: Worker processes; chosen from the machines when null.
        threads_per_worker: Compute threads of a worker; chosen when null. What decodes, checks and
            writes has threads beside them and takes what is idle of the cores that the process may
            use: those that taskset, a batch system or a container leaves it, and no others.
        device: Where the models run: auto takes the GPUs that the nodes offer and works on the CPUs
            of the others, cuda needs a GPU, cpu takes none.
        gpus_per_worker: Share of a GPU for each worker on one, above 0 and up to 1, such as 0.5 for
            two workers on a GPU; 1 when null, 0 is the same as device cpu.
        max_bad_fraction: Quarantined rows above this fraction fail the job (exit code 3).
        max_attempts: Tries of a shard before its rows are searched for the culprit.
        shard_deadline_s: Seconds a shard may take before it is tried a second time; learned from
            the shards before it when null.
        row_deadline_s: Seconds a row may take alone. A shard has as much for each of its rows, if
            that is less than what it would have without; then its rows are searched, and one that
            takes longer alone, twice, is quarantined.
        decode_in_child: Decode in child processes without credentials, with bounds on memory and
            time: bytes that crash or hang a decoder are a row in quarantine (decoder_crash,
            decoder_limit), and reach nothing of the worker.
        metrics: Where the driver shows its metrics to Prometheus: HOST:PORT to listen at, port 0
            for any; or the path of a text file for node_exporter that ends in .prom, in which {pid}
            and {host} are put in. Nowhere when null.
        log_format: What the command prints of a run: text, for people, or json, one structured line
            an event.
    """

    executor: Literal["ray", "local", "slurm-array"] = "ray"
    array: str | None = Field(default=None, pattern=r"^[0-9]+/[1-9][0-9]*$")
    grace_s: float = Field(default=GRACE_S, ge=0, allow_inf_nan=False)
    workers: int | None = Field(default=None, ge=1)
    threads_per_worker: int | None = Field(default=None, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus_per_worker: float | None = Field(default=None, ge=0, le=1)
    max_bad_fraction: float = Field(default=0.05, ge=0, le=1)
    max_attempts: int = Field(default=3, ge=1)
    shard_deadline_s: PositiveFloat | None = None
    row_deadline_s: PositiveFloat | None = None
    decode_in_child: bool = False
    metrics: str | None = Field(default=None, pattern=METRICS)
    log_format: Literal["text", "json"] = "text"

    @model_validator(mode="after")
    def _gpus_for_the_device(self) -> RunSpec:
        if self.device == "cpu" and self.gpus_per_worker:
            raise ValueError(
                f"expected no gpus_per_worker with device cpu, got {self.gpus_per_worker:g}; leave "
                "it out, or set device to auto or cuda"
            )
        if self.device == "cuda" and self.gpus_per_worker == 0:
            raise ValueError(
                "expected gpus_per_worker above 0 with device cuda, got 0; leave it out for one "
                "GPU each, or set device to cpu"
            )
        return self

    @property
    def gpus_wanted(self) -> float:
        """Share of a GPU for a worker that computes on one; 0 where none may."""
        if self.device == "cpu":
            return 0.0
        return GPUS_PER_WORKER if self.gpus_per_worker is None else self.gpus_per_worker


CHANNEL_WORDS = ("mean", "left", "right", "each", "binaural")


class CalibrationSpec(SpecModel):
    """What the sample values mean in dB SPL; exactly one of the two.

    Args:
        rms1_db_spl: Level of a signal with an RMS of 1.0.
        level_db_spl: Level every clip is scaled to, whatever it was.
    """

    rms1_db_spl: float | None = Field(default=None, allow_inf_nan=False)
    level_db_spl: float | None = Field(default=None, allow_inf_nan=False)

    @model_validator(mode="after")
    def _exactly_one(self) -> CalibrationSpec:
        if (self.rms1_db_spl is None) == (self.level_db_spl is None):
            raise ValueError(
                "expected exactly one of rms1_db_spl and level_db_spl; set the other to null"
            )
        return self

    def to_dict(self) -> dict[str, float]:
        """The form `amtcore.units.Calibration.from_dict` takes."""
        return {name: value for name, value in self if value is not None}


class AudioSpec(SpecModel):
    """How samples are read.

    Args:
        channels: Which signal a row is: the mean of all channels, left (0), right (1), or a channel
            index from 0; each makes every channel a row of its own, binaural gives two channels to
            models of two ears and their mean to the others.
        calibration: Digital full scale in dB SPL; exactly one of its two keys.
        resampler: soxr_vhq adds no more than the rounding of float32 (-150 dB); soxr_hq reaches
            -130 dB and saves about a quarter of the time; torchaudio_kaiser_best reaches -104 dB,
            and runs on the GPU where the job does. Used where a file's rate is not fs_hz.
        min_rate_hz: Files below this sample rate are quarantined.
        max_rate_hz: Files above this sample rate are quarantined.
        max_seconds: Rows above this duration are quarantined; a day when null.
        array_rate_hz: Sample rate of Hugging Face columns that hold arrays of samples without one.
            Full scale is 1.0 of floats and 32768 of int16, as in WAV.
        spans: Cut long recordings into spans that workers compute side by side; null computes each
            in order.
        unterminated: Ogg files (Vorbis, Opus) without an end mark, as voice notes of Telegram are:
            quarantine refuses them, as files that were cut look the same; accept reads them.
            quarantine when null.
        span_tolerance_s: A row of a manifest may end so many seconds behind its file; it gets the
            samples that are there, and the fact `span_short_s` says how much is missing. 0.01 when
            null, which is what manifests are rounded to.
    """

    channels: Literal["mean", "left", "right", "each", "binaural"] | int = "mean"
    calibration: CalibrationSpec = CalibrationSpec(rms1_db_spl=100.0)
    resampler: str = DEFAULT_QUALITY
    min_rate_hz: PositiveFloat = 1000.0
    max_rate_hz: PositiveFloat = 768000.0
    max_seconds: PositiveFloat | None = None
    array_rate_hz: int | None = Field(default=None, ge=1)
    spans: SpansSpec | None = None
    unterminated: Literal["accept", "quarantine"] | None = None
    span_tolerance_s: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    @field_validator("channels", mode="before")
    @classmethod
    def _known_channels(cls, value: Any) -> Any:
        index = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not index and value not in CHANNEL_WORDS:
            raise ValueError(
                f"expected {', '.join(CHANNEL_WORDS)} or a channel index from 0, got {value!r}"
            )
        return value

    @field_validator("resampler")
    @classmethod
    def _known_resampler(cls, value: str) -> str:
        if value not in RESAMPLERS:
            raise ValueError(f"expected one of {', '.join(RESAMPLERS)}, got {value!r}")
        return value

    @field_validator("unterminated")
    @classmethod
    def _accept_or_nothing(cls, value: str | None) -> str | None:
        return value if value == "accept" else None  # quarantine is what null is, and has its hash

    def limits(self) -> Limits:
        """The limits for the decoder."""
        from earmill.pipeline.audio.decode import Limits

        names = ("min_rate_hz", "max_rate_hz", "max_seconds", "span_tolerance_s")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return Limits(**given, unterminated=self.unterminated == "accept")

    @model_validator(mode="after")
    def _ordered_rates(self) -> AudioSpec:
        if self.min_rate_hz > self.max_rate_hz:
            raise ValueError(
                f"min_rate_hz {self.min_rate_hz:g} is above max_rate_hz {self.max_rate_hz:g}"
            )
        return self

    @model_validator(mode="after")
    def _gain_of_a_span(self) -> AudioSpec:
        if self.spans is not None and self.calibration.level_db_spl is not None:
            raise ValueError(
                "expected calibration.rms1_db_spl with spans, got level_db_spl, which needs the "
                "level of the whole recording; set rms1_db_spl, or leave spans out"
            )
        return self


def _no_options(value: Any) -> Any:
    return {} if value is None else value


# `modulation:` with nothing behind it is null in YAML.
StreamOptions = Annotated[
    dict[str, Any], BeforeValidator(_no_options, json_schema_input_type=dict[str, Any] | None)
]


class ExtractSpec(SpecModel):
    """One model to run.

    Args:
        model: Registered model name; `earmill models` lists them.
        fs_hz: Rate the audio is resampled to; the model's own default when null.
        params: Parameters of the model; `earmill models NAME` lists them with types and defaults.
        streams: Feature streams and their options, each a mapping or null for its defaults; the
            model's first stream with its defaults when null. Names must be unique over all entries.
    """

    model: str
    fs_hz: PositiveFloat | None = None
    params: dict[str, Any] = Field(default_factory=dict)
    streams: dict[str, StreamOptions] | None = None

    @field_validator("streams")
    @classmethod
    def _some_streams(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and not value:
            raise ValueError("expected at least one stream; leave the key out for the defaults")
        return value


class OutputSpec(SpecModel):
    """What is written where.

    Args:
        uri: Root folder of the features; a local path or any fsspec URI.
        formats: One or several of the installed formats.
        dtype: Stored feature type; events are int32 whatever it is. Streams of small values, which
            float16 cannot hold, have a scale in Zarr and are float32 in Parquet and tars. int8 has
            a scale for each column of 64 frames, half the size, and an error of up to 1/252 of the
            largest value there: see docs/training.md.
        shard_seconds: Target amount of audio in a shard, in seconds.
        shard_rows: Most rows in a shard.
        row_group_profile: Parquet row groups for random access (1-4 MB) or scans (32-128 MB).
        parquet_form: What a cell of a stream is in Parquet files: its bytes, which decode at the
            speed of memory (`numpy.frombuffer`), or nested lists of numbers, twenty times slower.
            binary when null, and as it was begun where an output of an earlier release goes on.
        equal_files_once: Compute files with the same bytes once and copy the features: each is a
            row with its own id and columns, after all rows that are computed. Planning then reads
            what is needed to tell: pieces of files of equal size, and whole those that are alike.
            For sources of kind files and manifest, whole files.
        storage_options: Passed to fsspec; never stored.
    """

    uri: str
    formats: tuple[FormatName, ...] = ("parquet", "zarr")
    dtype: Literal["float16", "float32", "int8"] = "float16"
    shard_seconds: PositiveFloat = 600.0
    shard_rows: int = Field(default=2000, ge=1)
    row_group_profile: Literal["random", "scan"] = "random"
    parquet_form: Literal["binary", "nested"] | None = None
    equal_files_once: bool | None = None
    storage_options: Options

    check_uri = field_validator("uri")(plain_uri)

    @field_validator("formats")
    @classmethod
    def _sorted_formats(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or len(set(value)) != len(value):
            raise ValueError(f"expected one format or several, each once, got {list(value)}")
        return tuple(sorted(value))

    @field_validator("equal_files_once")
    @classmethod
    def _once_or_nothing(cls, value: bool | None) -> bool | None:
        return value or None  # false is what null is, and has its hash

    @model_validator(mode="after")
    def _int8_as_bytes(self) -> OutputSpec:
        if self.dtype == "int8" and self.parquet_form == "nested":
            raise ValueError(
                "expected parquet_form binary with dtype int8, got nested, which would show "
                "numbers without their scales; leave it out, or take float16"
            )
        return self


class JobSpec(SpecModel):
    """A whole job.

    Args:
        name: Name of the job, in progress and cards; letters, digits and . _ - only.
        source: Where the rows are; one section for each `kind`.
        audio: How samples are read.
        extract: The models to run, in one pass over the audio.
        output: What is written where.
        licenses: Of the audio and of the features, for the cards.
        run: How the job runs; nothing here changes the output.

    Example:
        >>> spec = JobSpec.load({
        ...     "source": {"kind": "files", "uri": "speech"},
        ...     "extract": [{"model": "dau1997"}],
        ...     "output": {"uri": "features"},
        ... }, overrides=["extract.0.fs_hz=16000"])
        >>> spec.extract[0].fs_hz
        16000.0
    """

    name: str = Field(default="job", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    source: SourceSpec
    audio: AudioSpec = AudioSpec()
    extract: tuple[ExtractSpec, ...] = Field(min_length=1)
    output: OutputSpec
    licenses: LicensesSpec = LicensesSpec()
    run: RunSpec = RunSpec()

    @model_validator(mode="after")
    def _unique_streams(self) -> JobSpec:
        named = [(entry.model, name) for entry in self.extract for name in entry.streams or ()]
        check_unique_streams(named)
        return self

    @classmethod
    def load(
        cls, source: str | Path | Mapping[str, Any] | JobSpec, overrides: Iterable[str] = ()
    ) -> JobSpec:
        """Read, override, validate. SpecError says what is wrong in one line.

        Args:
            source: A YAML file (path or fsspec URI), a mapping of the same shape, or a spec.
            overrides: `a.b=c` strings; values are YAML.
        """
        if isinstance(source, JobSpec):
            source = source.model_dump(mode="json")
        name, data = ("job", source) if isinstance(source, Mapping) else read_mapping(str(source))
        if not isinstance(data, Mapping):
            raise SpecError(f"{name}: expected a mapping with source, extract and output")
        merged = apply_overrides(data, overrides)
        try:
            spec = cls.model_validate(merged)
            spec.canonical()  # values without a canonical form are found now, not at the first hash
        except ValidationError as error:
            raise SpecError(f"{name}: {explain(error, cls, merged)}") from None
        except SpecError as error:
            raise SpecError(f"{name}: {error}") from None
        return spec

    def canonical(self) -> dict[str, Any]:
        """All that decides the output, as plain JSON values; equal jobs give equal mappings."""
        source = _section(self.source, "source", drop={"allow", "storage_options"})
        if (endings := source.get("extensions")) is not None:
            source["extensions"] = list(stored_extensions(tuple(endings)))
        return {
            "source": source,
            "audio": _section(self.audio, "audio"),
            "extract": _canonical(self.extract, "extract"),
            "output": _section(self.output, "output", drop={"uri", "storage_options"}),
        }

    def canonical_json(self) -> str:
        return json.dumps(
            self.canonical(),
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=False,
            allow_nan=False,
        )

    def sha256(self) -> str:
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()


def check_unique_streams(named: Sequence[tuple[str, str]]) -> None:
    """ValueError where a stream, out of pairs of model and stream, comes from two models."""
    owners: dict[str, str] = {}
    for model, stream in named:
        if stream in owners:
            raise ValueError(
                f"stream {stream!r} comes from both {owners[stream]} and {model}; "
                "stream names must be unique over the extract list"
            )
        owners[stream] = model


_INSTEAD = "; `earmill init` writes one out of a few answers"


def read_mapping(uri: str) -> tuple[str, Any]:
    """Return the name of a job file for messages, and what it holds; SpecError if unreadable."""
    try:
        fs, path = filesystem_of(uri)
        with fs.open(path, "rb") as stream:
            raw = stream.read(MAX_YAML_BYTES + 1)
    except FileNotFoundError as error:
        raise SpecError(f"{uri}: there is no such job file{_INSTEAD}") from error
    except IsADirectoryError as error:
        raise SpecError(f"{uri}: expected a job file in YAML, got a folder{_INSTEAD}") from error
    except Exception as error:
        if not (is_store_error(error) or isinstance(error, ValueError | ImportError)):
            raise
        told = store_line(error) if is_store_error(error) else one_line(error)
        raise SpecError(f"{uri}: cannot read the job file: {told}") from error
    try:
        return uri, load_yaml(raw.decode("utf-8"), name=uri)
    except UnicodeDecodeError as error:
        raise SpecError(f"{uri}: not a UTF-8 text file; expected a job file in YAML") from error


def _section(model: BaseModel, path: str, *, drop: Collection[str] = ()) -> dict[str, Any]:
    """Fields that are set. A null field is left out, so that a later optional field keeps hashes.

    Nulls inside `params` and `streams` stay: there null is a value the model sees.
    """
    fields = {name: value for name, value in model if name not in drop and value is not None}
    return {name: _canonical(value, f"{path}.{name}") for name, value in fields.items()}


def _canonical(value: Any, path: str) -> Any:
    """JSON value with one spelling per number: 44100.0 becomes 44100; NaN is refused."""
    if isinstance(value, BaseModel):
        return _section(value, path)
    if isinstance(value, Mapping):
        return {str(key): _canonical(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item, f"{path}.{index}") for index, item in enumerate(value)]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise SpecError(f"{path}: expected a finite number, got {value}")
        return int(value) if value.is_integer() else value
    if value is None or isinstance(value, str | int):
        return value
    raise SpecError(f"{path}: expected a number, text, list or mapping, got {value!r}")
