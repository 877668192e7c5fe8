"""The `source` sections of the kinds of source that are built in.

Sections say where rows are and nothing about how they are processed. What they hold is published
with the features, except `storage_options`, which is the one place for credentials.
"""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from earmill.pipeline.spec.section import Options, plain_uri, plain_uris
from earmill.pipeline.spec.source_kinds import SourceSection

# The default of releases that read fewer formats. Stored jobs and hashes name it for the default of
# any release, so that a job begun before goes on.
FIRST_EXTENSIONS = (
    *("aac", "aif", "aifc", "aiff", "au", "caf", "flac", "m4a", "mka", "mp3", "mp4", "nist", "oga"),
    *("ogg", "opus", "rf64", "snd", "sph", "w64", "wav", "wave", "webm", "wma"),
)
# Names of the files that libsndfile and ffmpeg read; films are left out.
AUDIO_EXTENSIONS = tuple(
    sorted(
        (
            *FIRST_EXTENSIONS,
            *("3ga", "3gp", "ac3", "amr", "awb", "bw64", "bwf", "eac3", "ec3", "m4b", "m4r"),
            *("mp2", "mpga", "spx", "tta", "weba", "wv"),
        )
    )
)


def normal_extensions(value: tuple[str, ...]) -> tuple[str, ...]:
    """File name endings in one spelling and order; `FIRST_EXTENSIONS` are the default."""
    if not value:
        raise ValueError("expected at least one extension, e.g. [wav, flac]")
    words = tuple(sorted({word.lower().lstrip(".") for word in value}))
    return AUDIO_EXTENSIONS if words == FIRST_EXTENSIONS else words


def stored_extensions(value: tuple[str, ...]) -> tuple[str, ...]:
    """Return the endings as stored jobs name them; see `FIRST_EXTENSIONS`."""
    return FIRST_EXTENSIONS if value == AUDIO_EXTENSIONS else value


class FilesSpec(SourceSection):
    """A folder, bucket prefix or glob of audio files.

    Args:
        kind: files.
        uri: Folder, single file, or glob; a local path or any fsspec URI.
        glob: Which paths below the folder, relative to it; `**` crosses folders.
        extensions: File name endings that count as audio, without the dot.
        storage_options: Passed to fsspec; never stored.
    """

    kind: Literal["files"]
    uri: str
    glob: str = "**/*"
    extensions: tuple[str, ...] = AUDIO_EXTENSIONS
    storage_options: Options

    check_uri = field_validator("uri")(plain_uri)

    check_extensions = field_validator("extensions")(normal_extensions)


ManifestRole = Literal["uri", "id", "start", "end", "duration"]


class ManifestSpec(SourceSection):
    """A csv, tsv, jsonl or parquet table with columns uri, and optionally id, start, end (seconds).

    Text may be compressed (`.csv.gz`, `.jsonl.zst`). A blank row is counted and no row; the index
    that pandas writes is not carried through.

    Spans of WAV, FLAC and other files above 64 MiB that can be sought in read only what they need.

    Args:
        kind: manifest.
        uri: The table. Relative uris in it resolve against its folder. A .json file holds JSON
            lines, as NeMo writes them, or one list of objects.
        columns: What the table calls uri, id, start, end and duration, where it has other names;
            for NeMo {uri: audio_filepath, start: offset, duration: duration}. A duration ends the
            span that a start begins; without a start it spares the plan from opening the file.
        prefix: Folder in front of relative uris, itself relative to the table's folder or an
            absolute path or URI; for Common Voice clips, for ESC-50 ../audio. Cells of the table
            cannot leave it.
        allow: Prefixes of uris it may name besides those below its folder, in its bucket or on its
            host: /data/corpus, s3://bucket, https://host/path, or https:// for every public host.
        storage_options: Passed to fsspec for the table's own bucket or host; for a local table, for
            the first one that `allow` names. Never stored.
    """

    kind: Literal["manifest"]
    uri: str
    columns: dict[ManifestRole, str] | None = None
    prefix: str | None = None
    allow: tuple[str, ...] = ()
    storage_options: Options

    check_uri = field_validator("uri")(plain_uri)
    check_allow = field_validator("allow")(plain_uris)

    @field_validator("prefix")
    @classmethod
    def _plain_prefix(cls, value: str | None) -> str | None:
        return None if value is None else plain_uri(value)

    @field_validator("columns")
    @classmethod
    def _one_role_each(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        if value is not None and len(set(value.values())) < len(value):
            raise ValueError("expected each column of the table in one role, got one in two")
        return value


class HfSpec(SourceSection):
    """A Hugging Face dataset with an audio column.

    Args:
        kind: hf.
        uri: Hub id, a `save_to_disk` or `audiofolder` folder, or a local or remote parquet file,
            folder or glob.
        config: Configuration name of a hub dataset.
        split: Split name; needed when the dataset has several.
        revision: Branch, tag or commit of a hub dataset; a commit makes the job repeatable.
        audio_column: Column holding the audio: bytes of files, paths, or arrays of samples (lists
            of float, int8, int16 or int32, or such a list for each channel) with a `sampling_rate`
            beside them or `audio.array_rate_hz`. Full scale is 1.0 of floats and 32768 of int16.
        id_column: Column with unique row ids; the row number otherwise.
        duration_column: Column with seconds; spares the plan from opening every row's header, or
            from estimating durations by bytes.
        streaming: Read rows where they are instead of building the local Arrow cache. Parquet is
            planned from its footers and fetched by row groups; anything else is read once to plan.
        allow: Prefixes of paths that audio cells without bytes may name besides those of the
            dataset itself; as for a manifest.
        storage_options: Passed to fsspec for the dataset's own store; never stored.
    """

    kind: Literal["hf"]
    uri: str
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    audio_column: str = "audio"
    id_column: str | None = None
    duration_column: str | None = None
    streaming: bool = False
    allow: tuple[str, ...] = ()
    storage_options: Options

    check_uri = field_validator("uri")(plain_uri)
    check_allow = field_validator("allow")(plain_uris)
