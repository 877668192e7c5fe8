"""The kinds of source that come with earmill; entry points in pyproject.toml name them.

A kind is imported when it is opened, because importing `datasets` takes two seconds.
"""

from __future__ import annotations

from earmill.pipeline.sources.base import Source
from earmill.pipeline.spec.source import FilesSpec, HfSpec, ManifestSpec, SourceKind


def _files(spec: FilesSpec) -> Source:
    from earmill.pipeline.sources.files import FilesSource

    return FilesSource(spec)


def _manifest(spec: ManifestSpec) -> Source:
    from earmill.pipeline.sources.manifest import ManifestSource

    return ManifestSource(spec)


def _hf(spec: HfSpec, array_rate_hz: int | None) -> Source:
    from earmill.pipeline.sources.hf import HfSource

    return HfSource(spec, array_rate_hz)


FILES = SourceKind(FilesSpec, _files)
MANIFEST = SourceKind(ManifestSpec, _manifest)
HF = SourceKind(HfSpec, _hf, has_arrays=True)
