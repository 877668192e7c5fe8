"""A data folder of Kaldi. Its utterances become the rows of a manifest, which checks places, lost
files and spans. Times are in seconds, and an end of -1 is the end of the recording. Commands in
`wav.scp` are never run: a command ends the job before any work.

    wav.scp    recording path
    segments   utterance recording start end
    utt2spk    utterance speaker
    text       utterance words
"""

from __future__ import annotations

import posixpath
import re
from typing import Literal

from earmill.pipeline.common.errors import SourceError
from earmill.pipeline.sources import base
from earmill.pipeline.sources.manifest import ManifestSource
from earmill.pipeline.sources.tables import Cells
from earmill.pipeline.spec import Options, PlainUri
from earmill.pipeline.spec.source import ManifestSpec, SourceKind, SourceSection

RECORDINGS, SEGMENTS = "wav.scp", "segments"
COLUMNS = {"utt2spk": "speaker", "text": "text"}  # Files with a value for each utterance.
TO_THE_END = ("-1", "-1.0")
COMMAND = re.compile(r"\||\.ark:[0-9]+$")  # Also an offset into an archive.


class KaldiSection(SourceSection):
    """A data folder of Kaldi: `wav.scp`, and `segments`, `utt2spk` and `text` if they are there.

    The id of an utterance is the id of its row; the columns are speaker and text.

    Args:
        kind: Kind of the source.
        uri: The data folder; a local path or any fsspec URI.
        prefix: Folder in front of relative paths in `wav.scp`, itself relative to the data folder
            or an absolute path or URI; Kaldi's recipes often write ../.. here.
        allow: Prefixes of further places that `wav.scp` may name, as for a manifest.
        storage_options: Passed to fsspec for the folder's own bucket or host; never stored.
    """

    kind: Literal["kaldi"]
    uri: PlainUri
    prefix: PlainUri | None = None
    allow: tuple[PlainUri, ...] = ()
    storage_options: Options


class KaldiSource(ManifestSource):
    """The utterances of a data folder, or its recordings if it has no `segments`."""

    kind = "kaldi"

    def __init__(self, section: KaldiSection) -> None:
        named = section.model_dump(include={"prefix", "allow", "storage_options"})
        uri = f"{section.uri.rstrip('/')}/{RECORDINGS}"
        super().__init__(ManifestSpec(kind="manifest", uri=uri, **named))

    def _columns(self) -> dict[str, Cells]:
        paths = {recording: path for recording, (path,) in self._lines(RECORDINGS, 2, 2).items()}
        for recording, path in paths.items():
            if COMMAND.search(path):
                raise SourceError(
                    f"source {self._spec.uri}: recording {recording!r}: expected the path of a "
                    f"file, got a command or an archive, {path!r}; commands are not run: write its "
                    "audio to a file and put the path here"
                )
        rows = self._lines(SEGMENTS, 4, 4) or {name: [name, "", ""] for name in paths}
        for utterance, (recording, *_) in rows.items():
            if recording not in paths:
                raise SourceError(
                    f"source {self._spec.uri}: utterance {utterance!r} of segments: expected a "
                    f"recording of {RECORDINGS}, got {recording!r}; add its line, or remove the "
                    "utterance (utils/fix_data_dir.sh)"
                )
        recordings, starts, ends = zip(*rows.values(), strict=True) if rows else ((), (), ())
        columns: dict[str, Cells] = {"id": [*rows], "start": starts}
        columns["uri"] = [paths[recording] for recording in recordings]
        columns["end"] = ["" if end in TO_THE_END else end for end in ends]
        for name, column in COLUMNS.items():
            if cells := self._lines(name, 2, 1):
                columns[column] = [" ".join(cells.get(key, [])) or None for key in rows]
        return columns

    def _lines(self, name: str, fields: int, least: int) -> dict[str, list[str]]:
        """Return by the first field of each line its other fields; {} without a file. The last of
        `fields` takes the rest of the line."""
        path = posixpath.join(posixpath.dirname(self._path), name)
        try:
            raw = base.retry_listing(lambda: self._fs.cat_file(path))
            lines = raw.decode("utf-8").split("\n")
        except FileNotFoundError:
            return {}
        except UnicodeDecodeError as error:
            raise SourceError(f"source {path}: expected text in UTF-8: {error.reason}") from error
        found: dict[str, list[str]] = {}
        for number, line in enumerate(map(str.strip, lines), start=1):
            key, *rest = line.split(maxsplit=fields - 1) or [""]
            if key in found or (key and len(rest) < least - 1):
                raise SourceError(
                    f"source {path}: line {number}: expected {least} fields or more, the first "
                    f"of them once in the file, got {line!r}"
                )
            if key:
                found[key] = rest
        if name == SEGMENTS and not found:
            raise SourceError(
                f"source {path}: expected utterances, got none; write it again, or remove it to "
                "take whole recordings"
            )
        return found


KALDI = SourceKind(KaldiSection, KaldiSource)
