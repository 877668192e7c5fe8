"""What the source tests share: opening, reading everything, and a small awkward corpus."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from earmill.pipeline.common.errors import RowError
from earmill.pipeline.sources import Item, open_source
from earmill.pipeline.spec.source import FilesSpec, ManifestSpec
from tests.pipeline.audio_factory import clip

SPEECH = Path(__file__).parents[1] / "data" / "speech"
SPEECH_IDS = [
    "alpha/flac_16k.flac",
    "alpha/vorbis_44k.ogg",
    "alpha/wav_22k.wav",
    "beta/flac_48k_stereo.flac",
    "beta/mp3_44k.mp3",
    "beta/opus_48k.opus",
]
# Python may have left a folder of its own beside them.
SPEECH_FILES = [SPEECH / name for name in SPEECH_IDS]


def files(uri: Path | str, **options: Any) -> Any:
    return open_source(FilesSpec(kind="files", uri=str(uri), **options))


def manifest(uri: Path | str, **options: Any) -> Any:
    return open_source(ManifestSpec(kind="manifest", uri=str(uri), **options))


def ids(source: Any) -> list[str]:
    return [item.row_id for item in source.items()]


def contents(source: Any, items: Sequence[Item]) -> list[bytes | RowError]:
    """Everything a source hands out, in order."""
    found: list[bytes | RowError] = []
    for item, (fetched, stream) in zip(items, source.fetch(items), strict=True):
        assert fetched is item
        if isinstance(stream, RowError):
            found.append(stream)
            continue
        with stream:
            assert stream.seekable()
            data = stream.read()
            assert stream.digest() == hashlib.sha256(data).hexdigest()
            found.append(data)
    return found


def write_corpus(root: Path) -> Path:
    """A small tree with audio, names that look like globs, and files that are no audio."""
    names = ["b.wav", "a.flac", "deep/er/c.ogg", "deep/d.MP3", "notes.txt", "deep/cover.jpg"]
    for name in [*names, "odd [1]*.wav", "ünï.opus"]:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = path.suffix.lower().lstrip(".")
        path.write_bytes(clip(kind, 0.2) if kind in ("wav", "flac", "ogg", "mp3", "opus") else b"x")
    return root


CORPUS_IDS = ["a.flac", "b.wav", "deep/d.MP3", "deep/er/c.ogg", "odd [1]*.wav", "ünï.opus"]
