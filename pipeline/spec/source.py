"""The `source` section of a job, and the sections of the built-in kinds of source.

Every kind of source, built-in or not, is registered in the group `earmill.sources` as a
`SourceKind`. Only the kind that a job names is imported.

Sections say where rows are, but not how they are processed. Their keys are published with the
features, except `storage_options`, the only key for credentials.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, SerializeAsAny, field_validator, model_validator

from earmill.pipeline.common.errors import ExtensionError
from earmill.pipeline.common.extension_points import SOURCES
from earmill.pipeline.common.text import alternatives
from earmill.pipeline.spec import Options, PlainUri, SpecModel, key_errors


class SourceSection(SpecModel):
    """Base of the sections of all kinds of source.

    Args:
        kind: Registered name of the kind; every section has a `Literal` of it.
        limit: Use only the first rows, at most this number; all when null.
    """

    kind: str
    limit: int | None = Field(default=None, ge=1)


@dataclass(frozen=True)
class SourceKind:
    """A kind of source, the object of an entry point of `earmill.sources`.

    Args:
        section: Model of the job's `source` section. Its docstring describes the kind and, as
            `Args`, each key.
        open: Function that opens a section as `earmill.pipeline.sources.base.Source`.
        has_arrays: Rows may be arrays of samples; `open` also takes the job's
            `audio.array_rate_hz`, or None.
    """

    section: type[SourceSection]
    open: Callable[..., Any]
    has_arrays: bool = False


def reference_column(section: SourceSection) -> str | None:
    """Return the column of the reference recordings; None for a job without them."""
    return getattr(section, "reference_column", None)


def source_kind(name: str) -> SourceKind:
    """Return a registered kind of source; ExtensionError if there is none, or it is not valid."""
    found, origin = SOURCES.load(name), f"source kind {name!r} of {SOURCES.owner(name)}"
    if not isinstance(found, SourceKind):
        raise ExtensionError(
            f"{origin}: expected its entry point to lead to a SourceKind, got "
            f"{type(found).__name__}"
        )
    section = found.section
    if not (isinstance(section, type) and issubclass(section, SourceSection)):
        raise ExtensionError(
            f"{origin}: expected a subclass of SourceSection as its section, got {section!r}"
        )
    annotation = section.model_fields["kind"].annotation
    if get_args(annotation) != (name,):
        raise ExtensionError(
            f"{origin}: expected kind: Literal[{name!r}] in {section.__name__}, got {annotation}"
        )
    return found


def _as_section(value: Any) -> Any:
    """Turn a mapping into the section of its `kind`; validation refuses other values."""
    if not isinstance(value, Mapping):
        return value
    if "kind" not in value:
        raise key_errors({"kind": f"missing; expected {alternatives(SOURCES.names())}"})
    try:
        kind = source_kind(str(value["kind"]))
    except ExtensionError as error:
        raise key_errors({"kind": str(error)}) from error
    return kind.section.model_validate(dict(value))


SourceSpec = Annotated[SerializeAsAny[SourceSection], BeforeValidator(_as_section)]


# Default of releases that read fewer formats. Stored jobs and hashes name it for the default of
# every release, so that a job begun with an earlier release can go on.
FIRST_EXTENSIONS = tuple(
    "aac aif aifc aiff au caf flac m4a mka mp3 mp4 nist oga ogg opus rf64 snd sph w64 wav wave "
    "webm wma".split()
)
# With these, the endings of the files that libsndfile and FFmpeg read, without films.
MORE_EXTENSIONS = "3ga 3gp ac3 amr awb bw64 bwf eac3 ec3 m4b m4r mp2 mpga spx tta weba wv".split()
AUDIO_EXTENSIONS = tuple(sorted([*FIRST_EXTENSIONS, *MORE_EXTENSIONS]))


def normal_extensions(value: tuple[str, ...]) -> tuple[str, ...]:
    """Return file name endings in one spelling and order; `FIRST_EXTENSIONS` are the default."""
    if not value:
        raise ValueError("expected at least one extension, e.g. [wav, flac]")
    words = tuple(sorted({word.lower().lstrip(".") for word in value}))
    return AUDIO_EXTENSIONS if words == FIRST_EXTENSIONS else words


def stored_extensions(value: tuple[str, ...]) -> tuple[str, ...]:
    """Return the endings that stored jobs name; see `FIRST_EXTENSIONS`."""
    return FIRST_EXTENSIONS if value == AUDIO_EXTENSIONS else value


class FilesSpec(SourceSection):
    """A folder, bucket prefix or glob of audio files.

    Args:
        kind: Kind of the source.
        uri: Folder, single file, or glob; a local path or any fsspec URI.
        glob: Pattern of paths relative to the folder; `**` crosses folders.
        extensions: File name endings that count as audio, without the dot.
        storage_options: Passed to fsspec; never stored.
    """

    kind: Literal["files"]
    uri: PlainUri
    glob: str = "**/*"
    extensions: tuple[str, ...] = AUDIO_EXTENSIONS
    storage_options: Options

    check_extensions = field_validator("extensions")(normal_extensions)


ManifestRole = Literal["uri", "id", "start", "end", "duration"]


class ManifestSpec(SourceSection):
    """A csv, tsv, jsonl or parquet table with columns uri, and optionally id, start, end (seconds).

    Text may be compressed (`.csv.gz`, `.jsonl.zst`). Blank rows are counted and left out. The index
    column that pandas writes is not carried through.

    Spans of WAV, FLAC and other seekable files above 64 MiB read only the bytes that they need.

    Args:
        kind: Kind of the source.
        uri: The table. Relative uris in it resolve against its folder. A .json file holds JSON
            lines, as NeMo writes them, or one list of objects.
        columns: Names of the columns for uri, id, start, end and duration, if they differ; for
            NeMo {uri: audio_filepath, start: offset, duration: duration}. A start and a duration
            make a span; without a start the plan takes the duration and does not open the file.
        prefix: Folder in front of relative uris, itself relative to the table's folder or an
            absolute path or URI; for Common Voice clips, for ESC-50 ../audio. Cells of the table
            cannot leave it.
        reference_column: Column with the reference recording of each row, for models that compare
            two recordings: a path or URI, resolved as uri is. See docs/howto/pairs.md.
        allow: Prefixes of further uris that the table may name, besides uris below its folder, in
            its bucket or on its host: /data/corpus, s3://bucket, https://host/path, or https:// for
            every public host.
        storage_options: Passed to fsspec for the table's own bucket or host; for a local table, for
            the first one that `allow` names. Never stored.
    """

    kind: Literal["manifest"]
    uri: PlainUri
    columns: dict[ManifestRole, str] | None = None
    prefix: PlainUri | None = None
    reference_column: str | None = None
    allow: tuple[PlainUri, ...] = ()
    storage_options: Options

    @model_validator(mode="after")
    def _reference_has_no_other_role(self) -> ManifestSpec:
        column = self.reference_column
        if column in {*get_args(ManifestRole), *(self.columns or {}).values()}:
            raise ValueError(
                "expected a reference_column with the reference recordings alone, got "
                f"{column!r}, which has another role; name another column"
            )
        return self

    @field_validator("columns")
    @classmethod
    def _one_role_each(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        if value is not None and len(set(value.values())) < len(value):
            raise ValueError("expected each column of the table in one role, got one in two")
        return value


class HfSpec(SourceSection):
    """A Hugging Face dataset with an audio column.

    Args:
        kind: Kind of the source.
        uri: Hub id, a `save_to_disk` or `audiofolder` folder, or a local or remote parquet file,
            folder or glob.
        config: Configuration name of a hub dataset.
        split: Split name; needed when the dataset has several.
        revision: Branch, tag or commit of a hub dataset; a commit makes the job repeatable.
        audio_column: Column holding the audio: bytes of files, paths, or arrays of samples (lists
            of float, int8, int16 or int32, or such a list for each channel) with a `sampling_rate`
            beside them or `audio.array_rate_hz`. Full scale is 1.0 of floats and 32768 of int16.
        id_column: Column with unique row ids; the row number otherwise.
        duration_column: Column with seconds, so that the plan need not open every row's header or
            estimate durations by bytes.
        reference_column: Column with the reference recording of each row, in the forms of
            audio_column, for models that compare two recordings. See docs/howto/pairs.md.
        streaming: Read rows where they are instead of building the local Arrow cache. Parquet is
            planned from its footers and fetched by row groups; anything else is read once to plan.
        allow: Prefixes of paths that audio cells without bytes may name, besides paths of the
            dataset itself; as for a manifest.
        storage_options: Passed to fsspec for the dataset's own store; never stored.
    """

    kind: Literal["hf"]
    uri: PlainUri
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    audio_column: str = "audio"
    id_column: str | None = None
    duration_column: str | None = None
    reference_column: str | None = None
    streaming: bool = False
    allow: tuple[PlainUri, ...] = ()
    storage_options: Options
