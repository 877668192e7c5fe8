"""Cuts or recordings of lhotse, in JSON lines; lhotse itself is not needed.

The rows become the rows of a manifest, which checks places, missing files and spans. Some cuts are
no span of a file: mixed, padded or perturbed cuts, commands, one channel of several. They end the
job before any work. Shar needs no source of its own: `kind: webdataset` reads its tars.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from earmill.pipeline.common.errors import SourceError
from earmill.pipeline.sources.manifest import ManifestSource
from earmill.pipeline.sources.tables import Cells
from earmill.pipeline.spec import Options, PlainUri
from earmill.pipeline.spec.source import ManifestRole, ManifestSpec, SourceKind, SourceSection

# Keys of a line that are read as they are.
KEYS = (
    *("id", "type", "start", "duration", "channel", "recording", "supervisions"),
    *("sources", "transforms"),
)
OF_SUPERVISION = ("speaker", "text", "language")


class LhotseSection(SourceSection):
    """Cuts or recordings of lhotse: JSON lines of `CutSet.to_file` or `RecordingSet.to_file`.

    The columns are speaker, text and language of cuts with one supervision.

    Args:
        kind: Kind of the source.
        uri: The manifest, .jsonl or .jsonl.gz; a local path or any fsspec URI.
        prefix: Folder in front of relative paths of recordings, itself relative to the manifest's
            folder or an absolute path or URI.
        allow: Prefixes of further places that the manifest may name, as for kind manifest.
        storage_options: Passed to fsspec for the manifest's own bucket or host; never stored.
    """

    kind: Literal["lhotse"]
    uri: PlainUri
    prefix: PlainUri | None = None
    allow: tuple[PlainUri, ...] = ()
    storage_options: Options


class LhotseSource(ManifestSource):
    """The cuts of a manifest, or its recordings."""

    kind = "lhotse"

    def __init__(self, section: LhotseSection) -> None:
        named = section.model_dump(exclude={"kind"})
        # Planning takes the durations, and opens no file.
        columns: dict[ManifestRole, str] = {"duration": "duration"}
        super().__init__(ManifestSpec(kind="manifest", columns=columns, **named))

    def _columns(self) -> dict[str, Cells]:
        table, _ = self._table(KEYS)
        names = [name for name in KEYS if name in table]
        lines = zip(*(table[name] for name in names), strict=True)
        rows = [
            self._row(number, dict(zip(names, line, strict=True)))
            for number, line in enumerate(lines, start=1)
        ]
        columns = ("id", "uri", "start", "end", "duration", *OF_SUPERVISION)
        return {name: [row[name] for row in rows] for name in columns}

    def _row(self, number: int, cut: Mapping[str, Any]) -> dict[str, Any]:
        """Return the cells of a row of a manifest for a line, a cut or a recording."""
        kind, recording = cut.get("type"), cut.get("recording") or cut
        sources, channel = recording.get("sources") or [], cut.get("channel")
        channels = sources[0].get("channels") or [] if sources else []
        problem = ""
        if kind not in (None, "MonoCut", "MultiCut"):
            problem = f"a {kind}"
        elif len(sources) != 1 or sources[0].get("type") not in ("file", "url"):
            problem = f"sources of type {[each.get('type') for each in sources]}"
        elif recording.get("transforms"):
            problem = "a recording with transforms"
        elif channel not in (None, channels, *(channels[:1] if len(channels) == 1 else [])):
            problem = f"channel {channel} of the channels {channels}"
        if problem:
            raise SourceError(
                f"source {self._spec.uri}: line {number}, id {cut.get('id')!r}: expected a cut or "
                f"a recording of one file with all of its channels, got {problem}; write "
                "their sound with cuts.save_audios(folder), and take the CutSet that it returns"
            )
        start, duration = float(cut.get("start") or 0), float(cut["duration"])
        is_whole = start == 0 and duration == float(recording["duration"])
        spoken = cut.get("supervisions") or []
        spoken = spoken[0] if len(spoken) == 1 else {}
        return {
            "id": cut["id"],
            "uri": sources[0]["source"],
            "start": None if is_whole else start,
            "end": None if is_whole else start + duration,
            "duration": duration,
            **{name: spoken.get(name) for name in OF_SUPERVISION},
        }


LHOTSE = SourceKind(LhotseSection, LhotseSource)
