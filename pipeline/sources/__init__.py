"""Sources of audio: files, manifests, Hugging Face datasets. `open_source` picks by kind.

They may import `spec`, `audio`, `storage` and `common`.
"""

from __future__ import annotations

from earmill.pipeline.sources.base import Item, Source
from earmill.pipeline.spec.source import FilesSpec, HfSpec, ManifestSpec

__all__ = ["Item", "Source", "open_source"]


def open_source(spec: FilesSpec | ManifestSpec | HfSpec) -> Source:
    """The source a job names; SourceError when it is missing or cannot be read.

    Cheap enough for every worker: rows are listed by `items()`, which is also where an empty source
    shows.
    """
    # Each kind is imported on use: `datasets` alone takes two seconds.
    if isinstance(spec, FilesSpec):
        from earmill.pipeline.sources.files import FilesSource

        return FilesSource(spec)
    if isinstance(spec, ManifestSpec):
        from earmill.pipeline.sources.manifest import ManifestSource

        return ManifestSource(spec)
    from earmill.pipeline.sources.hf import HfSource

    return HfSource(spec)
