"""The job spec: one YAML file <-> one validated, frozen object <-> one canonical hash.

The hash covers everything that decides the features, and nothing else: no name of the job, no `run`
section, no licences, no credentials, no address of the output. Numbers have one form (44100 and
44100.0 are equal), and the order of keys does not matter. A format is imported as soon as a job
names it, so that a broken format ends the job before any work.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from amtcore.listener import LEAST_DB, MOST_DB, checked_audiogram
from earmill.pipeline.audio.resample import DEFAULT_QUALITY, RESAMPLERS
from earmill.pipeline.common.errors import ExtensionError, SpecError
from earmill.pipeline.common.extension_points import FORMATS
from earmill.pipeline.common.text import one_line
from earmill.pipeline.common.untrusted import MAX_YAML_BYTES
from earmill.pipeline.spec import Options, PlainUri, PositiveFloat, SpecModel
from earmill.pipeline.spec.licenses import LicensesSpec
from earmill.pipeline.spec.messages import explain
from earmill.pipeline.spec.source import SourceSpec, reference_column, stored_extensions
from earmill.pipeline.spec.spans import SpansSpec
from earmill.pipeline.spec.variants import VariantsSpec
from earmill.pipeline.spec.yaml_overrides import apply_overrides, load_yaml
from earmill.pipeline.storage.fsspec_store import filesystem_of
from earmill.pipeline.storage.retrying import is_store_error, store_line

if TYPE_CHECKING:
    from earmill.pipeline.audio.decode import Limits


def _usable(name: str) -> str:
    try:
        FORMATS.load(name)
    except ExtensionError as error:
        raise ValueError(str(error)) from error
    return name


def _name_installed(schema: dict[str, Any]) -> None:
    schema["enum"] = [*FORMATS.names()]


FormatName = Annotated[str, AfterValidator(_usable), Field(json_schema_extra=_name_installed)]

GPUS_PER_WORKER = 1.0  # One worker keeps two launches in flight, which fills a GPU.
GRACE_S = 25.0  # Kubernetes and spot machines give 30 s between SIGTERM and SIGKILL.
SLURM_ARRAY = "slurm-array"
# HOST:PORT, or a path that ends in .prom.
METRICS = r"^([^/:\s]+|\[[0-9A-Fa-f:]+\]):[0-9]{1,5}$|.\.prom$"


class RunSpec(SpecModel):
    """How the job runs; nothing here changes the output.

    Args:
        executor: Kind of workers: local, processes of this machine; ray, actors of a Ray cluster,
            or of a Ray that is started for the run; slurm-array, local processes in each task of an
            array of batch jobs. The tasks share the shards, and a task ends when no shard is left.
            auto is ray where ray_address or RAY_ADDRESS names a cluster, and in a job that came by
            `ray job submit`; else local.
        ray_address: Ray cluster to join, as host:port, or auto for one of this machine. RAY_ADDRESS
            when null.
        array: Number of this task of an array, and number of all tasks: 3/100. Taken from the batch
            system's environment when null. It only decides with which shards the task begins.
        grace_s: Seconds that shards in flight may go on after a request to stop (SIGTERM, SIGINT,
            or SIGUSR1 before a time limit).
        workers: Number of worker processes; chosen from the machines when null.
        threads_per_worker: Compute threads of a worker; chosen when null. Decoding, checks and
            writing have threads of their own on idle cores. The process uses only the cores that
            taskset, a batch system or a container leaves to it.
        device: Device of the models: auto takes the GPUs of nodes that have some and the CPUs of
            the other nodes, cuda needs a GPU, cpu takes no GPU.
        gpus_per_worker: Share of a GPU for each worker on a GPU, above 0 and up to 1, such as 0.5
            for two workers on a GPU; 1 when null, 0 is the same as device cpu.
        max_bad_fraction: Quarantined rows above this fraction fail the job (exit code 3).
        max_attempts: Attempts at a shard before its rows are searched for the cause.
        shard_deadline_s: Seconds that a shard may take before it is tried a second time; learned
            from earlier shards when null.
        row_deadline_s: Seconds that a row may take alone. The deadline of a shard is this time for
            each of its rows, if that is shorter than its deadline without this key. Then its rows
            are searched, and a row that takes longer alone, twice, is quarantined.
        decode_in_child: Decode in child processes without credentials, with limits on memory and
            time. Bytes that crash or hang a decoder are then a row in quarantine (decoder_crash,
            decoder_limit), and cannot reach the worker.
        metrics: Address of the driver's metrics for Prometheus: HOST:PORT to listen at, port 0 for
            any port; or the path of a text file for node_exporter that ends in .prom, in which
            {pid} and {host} are replaced. No metrics when null.
        log_format: Form of the command's output about a run: text, for people, or json, one
            structured line for each event.
        retry_s: Seconds for which a request to a store is made again while the store is away or
            answers "not now"; then its shard waits. 75 for the output and 45 for the source when
            null.
    """

    executor: Literal["auto", "local", "ray", "slurm-array"] = "auto"
    ray_address: str | None = None
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
    retry_s: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _keys_fit_together(self) -> RunSpec:
        if self.ray_address is not None and self.executor not in ("auto", "ray"):
            raise ValueError(
                f"expected executor auto or ray with ray_address, got {self.executor}; leave out "
                "ray_address or set executor to ray"
            )
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
        if self.device == "cpu":
            return 0.0
        return GPUS_PER_WORKER if self.gpus_per_worker is None else self.gpus_per_worker


CHANNEL_WORDS = ("mean", "left", "right", "each", "binaural")


class CalibrationSpec(SpecModel):
    """Level of the samples in dB SPL; exactly one of the two keys.

    Args:
        rms1_db_spl: Level of a signal with an RMS of 1.0.
        level_db_spl: Level to which every clip is scaled.
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
        """Return the argument of `amtcore.units.Calibration.from_dict`."""
        return {name: value for name, value in self if value is not None}


class AudioSpec(SpecModel):
    """How samples are read.

    Args:
        channels: Signal of a row: the mean of all channels, left (0), right (1), or a channel
            index from 0; each makes every channel a row of its own, binaural gives two channels to
            models of two ears and their mean to other models.
        calibration: Digital full scale in dB SPL; exactly one of its two keys.
        resampler: soxr_vhq adds no more than the rounding of float32 (-150 dB); soxr_hq reaches
            -130 dB and saves about a quarter of the time; torchaudio_kaiser_best reaches -104 dB,
            and runs on the GPU if the job does. Used if a file's rate is not fs_hz.
        min_rate_hz: Files below this sample rate are quarantined.
        max_rate_hz: Files above this sample rate are quarantined.
        max_seconds: Rows above this duration are quarantined; a day when null.
        array_rate_hz: Sample rate of Hugging Face columns that hold arrays of samples without one.
            Full scale is 1.0 of floats and 32768 of int16, as in WAV.
        spans: Cut long recordings into spans that workers compute side by side; null computes each
            in order.
        variants: Rows beside each row, with noise, a room, another level or another speed; none
            when null.
        unterminated: Ogg files (Vorbis, Opus) without an end mark, such as voice notes of Telegram:
            quarantine refuses them, because files that were cut look the same; accept reads them.
            quarantine when null.
        span_tolerance_s: Seconds by which a row of a manifest may end behind its file. The row gets
            the samples that are there, and `span_short_s` says how many seconds are missing. 0.01
            when null, because manifests are rounded to hundredths.
    """

    channels: Literal["mean", "left", "right", "each", "binaural"] | int = "mean"
    calibration: CalibrationSpec = CalibrationSpec(rms1_db_spl=100.0)
    resampler: str = DEFAULT_QUALITY
    min_rate_hz: PositiveFloat = 1000.0
    max_rate_hz: PositiveFloat = 768000.0
    max_seconds: PositiveFloat | None = None
    array_rate_hz: int | None = Field(default=None, ge=1)
    spans: SpansSpec | None = None
    variants: VariantsSpec | None = None
    unterminated: Annotated[
        Literal["accept", "quarantine"] | None,
        AfterValidator(lambda value: None if value == "quarantine" else value),  # the hash of null
    ] = None
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

    def limits(self) -> Limits:
        from earmill.pipeline.audio.decode import Limits

        names = ("min_rate_hz", "max_rate_hz", "max_seconds", "span_tolerance_s")
        values = {name: value for name, value in self if name in names and value is not None}
        return Limits(**values, unterminated=self.unterminated == "accept")

    @model_validator(mode="after")
    def _keys_fit_together(self) -> AudioSpec:
        if self.min_rate_hz > self.max_rate_hz:
            raise ValueError(
                f"min_rate_hz {self.min_rate_hz:g} is above max_rate_hz {self.max_rate_hz:g}"
            )
        if self.spans is not None and self.calibration.level_db_spl is not None:
            raise ValueError(
                "expected calibration.rms1_db_spl with spans, got level_db_spl, which needs the "
                "level of the whole recording; set rms1_db_spl, or leave spans out"
            )
        if self.variants is not None and self.spans is not None:
            raise ValueError(
                "expected spans or variants, got both; a variant needs the whole clip: leave one "
                "out, or cut long recordings into clips with a manifest"
            )
        variants = () if self.variants is None else self.variants.of
        gains = [each.name for each in variants if each.gain_db is not None]
        if gains and self.calibration.level_db_spl is not None:
            raise ValueError(
                f"expected calibration.rms1_db_spl with gain_db of variant {gains[0]!r}, got "
                "level_db_spl, which would undo the gain; set rms1_db_spl, or leave gain_db out"
            )
        return self


# `modulation:` with nothing behind it is null in YAML.
StreamOptions = Annotated[
    dict[str, Any],
    BeforeValidator(
        lambda value: {} if value is None else value, json_schema_input_type=dict[str, Any] | None
    ),
]


Loss = Annotated[float, Field(ge=LEAST_DB, le=MOST_DB)]


class ListenerSpec(SpecModel):
    """The listener of a model, with a hearing loss.

    Args:
        name: Name of the listener; streams of the entry are called `<stream>_<name>`. Streams keep
            their names when null. Several listeners of a model are several entries with names.
        column: Column of the source with the audiogram of each row, as a mapping or its JSON text;
            exactly one of column and audiogram.
        audiogram: Hearing loss in dB HL by frequency in Hz, between -20 and 130 dB: linear in dB
            over log frequency, constant beyond the ends.
        ohc_share: Share of outer hair cells in the loss in dB; two thirds when null.
    """

    name: str | None = Field(default=None, pattern=r"^[a-z0-9_]+$")
    column: str | None = None
    audiogram: Annotated[
        dict[str, Loss] | None, BeforeValidator(partial(checked_audiogram, "the audiogram"))
    ] = Field(default=None, validate_default=True)
    ohc_share: float | None = Field(default=None, ge=0, le=1)

    @field_validator("audiogram")
    @classmethod
    def _or_column(
        cls, value: dict[str, float] | None, info: ValidationInfo
    ) -> dict[str, float] | None:
        if value is None and info.data.get("column") is None:
            raise ValueError("missing; expected an audiogram here, or its column in column")
        if value is not None and info.data.get("column") is not None:
            raise ValueError("expected an audiogram or a column, got both; leave one out")
        return value


class ExtractSpec(SpecModel):
    """One model to run.

    Args:
        model: Registered model name; `earmill models` lists them.
        fs_hz: Rate to which the audio is resampled; the model's own default when null.
        params: Parameters of the model; `earmill models NAME` lists them with types and defaults.
        streams: Feature streams and their options, each a mapping or null for its defaults; the
            model's first stream with its defaults when null. Names must be unique over all entries.
        listener: Hearing loss of the listener, for paulick2024 and carfac; normal hearing when
            null.
    """

    model: str
    fs_hz: PositiveFloat | None = None
    params: dict[str, Any] = Field(default_factory=dict)
    streams: dict[str, StreamOptions] | None = None
    listener: ListenerSpec | None = None

    def stream_name(self, stream: str) -> str:
        """Return the name under which the job stores a stream of the model."""
        name = None if self.listener is None else self.listener.name
        return stream if name is None else f"{stream}_{name}"

    @field_validator("streams")
    @classmethod
    def _some_streams(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and not value:
            raise ValueError("expected at least one stream; leave the key out for the defaults")
        return value


class OutputSpec(SpecModel):
    """Address and form of the features.

    Args:
        uri: Root folder of the features; a local path or any fsspec URI.
        formats: One or several of the installed formats.
        dtype: Stored type of features; events are always int32. Streams of small values, which
            float16 cannot hold, have a scale in Zarr and are float32 in Parquet and tars. int8 has
            a scale for each column of 64 frames, half the size, and an error of up to 1/252 of the
            largest value there: see docs/training.md.
        shard_seconds: Target amount of audio in a shard, in seconds.
        shard_rows: Most rows in a shard.
        row_group_profile: Parquet row groups for random access (1-4 MB) or scans (32-128 MB).
        parquet_form: Form of a stream's cells in Parquet files: binary, which decodes at the speed
            of memory (`numpy.frombuffer`), or nested lists of numbers, which is twenty times
            slower. binary when null; an output of an earlier release keeps its form.
        equal_files_once: Compute files with the same bytes once and copy the features. Each file is
            a row with its own id and columns, and copies come after all computed rows. Planning
            then reads pieces of files of equal size, and whole files if their pieces are equal.
            For sources of kind files and manifest, whole files.
        storage_options: As fsspec's client of the store has them; never stored.
    """

    uri: PlainUri
    formats: tuple[FormatName, ...] = ("parquet", "zarr")
    dtype: Literal["float16", "float32", "int8"] = "float16"
    shard_seconds: PositiveFloat = 600.0
    shard_rows: int = Field(default=2000, ge=1)
    row_group_profile: Literal["random", "scan"] = "random"
    parquet_form: Literal["binary", "nested"] | None = None
    # false has the hash of null
    equal_files_once: Annotated[bool | None, AfterValidator(lambda value: value or None)] = None
    storage_options: Options

    @field_validator("formats")
    @classmethod
    def _sorted_formats(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or len(set(value)) != len(value):
            raise ValueError(f"expected one format or several, each once, got {list(value)}")
        return tuple(sorted(value))

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
        source: Source of the rows; one section for each `kind`.
        audio: How samples are read.
        extract: The models to run, in one pass over the audio.
        output: Address and form of the features.
        licenses: Licences of the audio and of the features, for the cards.
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

    @property
    def listener_columns(self) -> tuple[str, ...]:
        """Columns of the source that hold audiograms."""
        listeners = (each.listener for each in self.extract)
        return tuple(one.column for one in listeners if one is not None and one.column is not None)

    @model_validator(mode="after")
    def _sections_fit_together(self) -> JobSpec:
        check_unique_streams(
            [(each.model, each.stream_name(s)) for each in self.extract for s in each.streams or ()]
        )
        if self.listener_columns and self.output.equal_files_once:
            raise ValueError(
                "expected no output.equal_files_once in a job with listener.column, because equal "
                "files may have different listeners; leave one of the two out"
            )
        refused = {
            "audio.spans": self.audio.spans is not None,
            "audio.channels: binaural": self.audio.channels == "binaural",
            "output.equal_files_once": bool(self.output.equal_files_once),
        }
        named = [key for key, is_set in refused.items() if is_set]
        if named and reference_column(self.source) is not None:
            raise ValueError(
                f"expected no {named[0]} in a job with source.reference_column, whose rows are "
                "pairs of whole recordings; leave one of the two out"
            )
        return self

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str] | Mapping[str, Any] | JobSpec,
        overrides: Iterable[str] = (),
    ) -> JobSpec:
        """Read a job, apply overrides, and validate it.

        Args:
            source: A YAML file (path or fsspec URI), a mapping of the same form, or a spec.
            overrides: `a.b=c` strings; values are YAML.
        Raises:
            SpecError: The job is not valid.
        """
        if isinstance(source, JobSpec):
            source = source.model_dump(mode="json")
        if not isinstance(source, str | os.PathLike | Mapping):
            raise SpecError(
                f"expected a job file, a mapping or a JobSpec, got {type(source).__name__}; "
                'earmill.extract("job.yaml")'
            )
        name, data = "job", source
        if not isinstance(source, Mapping):
            name, data = read_mapping(os.fspath(source))
        if not isinstance(data, Mapping):
            raise SpecError(f"{name}: expected a mapping with source, extract and output")
        merged = apply_overrides(data, overrides)
        try:
            spec = cls.model_validate(merged)
            spec.canonical()  # raises for values without a canonical form
        except ValidationError as error:
            raise SpecError(f"{name}: {explain(error)}") from None
        except SpecError as error:
            raise SpecError(f"{name}: {error}") from None
        return spec

    def canonical(self) -> dict[str, Any]:
        """Return everything that decides the output as JSON values, equal for equal jobs."""
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
        form: dict[str, Any] = {"sort_keys": True, "separators": (",", ":"), "ensure_ascii": False}
        return json.dumps(self.canonical(), allow_nan=False, **form)

    def sha256(self) -> str:
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()


def check_unique_streams(named: Sequence[tuple[str, str]]) -> None:
    owners: dict[str, str] = {}
    for model, stream in named:
        if stream in owners:
            raise SpecError(
                f"stream {stream!r} comes from both {owners[stream]} and {model}; "
                "stream names must be unique over the extract list"
            )
        owners[stream] = model


_INSTEAD = "; `earmill init` writes one out of a few answers"


def read_mapping(uri: str) -> tuple[str, Any]:
    """Return the name of a job file for messages, and its content; SpecError if unreadable."""
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
        reason = store_line(error) if is_store_error(error) else one_line(error)
        raise SpecError(f"{uri}: cannot read the job file: {reason}") from error
    try:
        return uri, load_yaml(raw.decode("utf-8"), name=uri)
    except UnicodeDecodeError as error:
        raise SpecError(f"{uri}: not a UTF-8 text file; expected a job file in YAML") from error


def _section(model: BaseModel, path: str, *, drop: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields that are not null, so that a later optional field keeps hashes.

    Nulls inside `params` and `streams` stay, because they are values for the model.
    """
    fields = {name: value for name, value in model if name not in drop and value is not None}
    return {name: _canonical(value, f"{path}.{name}") for name, value in fields.items()}


def _canonical(value: Any, path: str) -> Any:
    """Return a JSON value in which each number has one form: 44100.0 becomes 44100."""
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
