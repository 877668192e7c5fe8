"""The kinds of source that come with earmill; entry points in pyproject.toml name them. A kind is
imported when it is opened, because importing `datasets` takes two seconds."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from earmill.pipeline.spec.source import FilesSpec, HfSpec, ManifestSpec, SourceKind


def _open(module: str, name: str, *arguments: Any) -> Any:
    return getattr(import_module(f"earmill.pipeline.sources.{module}"), name)(*arguments)


FILES = SourceKind(FilesSpec, partial(_open, "files", "FilesSource"))
MANIFEST = SourceKind(ManifestSpec, partial(_open, "manifest", "ManifestSource"))
HF = SourceKind(HfSpec, partial(_open, "hf", "HfSource"), has_arrays=True)
