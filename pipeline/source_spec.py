"""The `source` section of a job: one section per kind of source, picked by its `kind` key.

Sections say where rows are and nothing about how they are processed. What they hold is published
with the features, except `storage_options`, which is the one place for credentials.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

AUDIO_EXTENSIONS = ("flac", "mp3", "ogg", "opus", "wav")

Options = Annotated[dict[str, Any], Field(default_factory=dict, repr=False)]


class SpecModel(BaseModel):
    """Base of every section: frozen, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def plain_uri(value: str) -> str:
    if not value.strip():
        raise ValueError("expected a path or URI, got an empty string")
    if "://" in value and "@" in urlsplit(value).netloc and ":" in urlsplit(value).netloc:
        # The uri is written into plan, provenance and card; storage_options never is.
        raise ValueError("credentials inside a URI would be published; use storage_options")
    return value


class FilesSpec(SpecModel):
    """A folder, bucket prefix or glob of audio files.

    Args:
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

    @field_validator("extensions")
    @classmethod
    def _normal_extensions(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("expected at least one extension, e.g. [wav, flac]")
        return tuple(sorted({word.lower().lstrip(".") for word in value}))


class ManifestSpec(SpecModel):
    """A csv, jsonl or parquet table with columns uri, and optionally id, start, end (seconds).

    Args:
        uri: The table. Relative uris in it resolve against its folder.
        storage_options: Passed to fsspec for the table and for uris of its protocol; never stored.
    """

    kind: Literal["manifest"]
    uri: str
    storage_options: Options

    check_uri = field_validator("uri")(plain_uri)


class HfSpec(SpecModel):
    """A Hugging Face dataset with an audio column.

    Args:
        uri: Hub id, a `save_to_disk` folder, or a local or remote parquet file, folder or glob.
        config: Configuration name of a hub dataset.
        split: Split name; needed when the dataset has several.
        revision: Branch, tag or commit of a hub dataset; a commit makes the job repeatable.
        audio_column: Column holding the audio.
        id_column: Column with unique row ids; the row number otherwise.
        duration_column: Column with seconds; spares the plan from opening every row's header.
        streaming: Read rows as a stream instead of building the local Arrow cache.
        storage_options: Passed to fsspec; never stored.
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
    storage_options: Options

    check_uri = field_validator("uri")(plain_uri)


SourceSpec = Annotated[FilesSpec | ManifestSpec | HfSpec, Field(discriminator="kind")]
