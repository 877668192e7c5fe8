"""Renamed streams of an extractor, so that a job can run a model for several listeners."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from amtcore.features.feature_model import ClipFeatures, Extractor, ExtractStream, Frames
from amtcore.features.stream_info import StreamInfo
from amtcore.kernels.backend import Backend


class RenamedStreams(Extractor):
    """The given extractor with a suffix on the names of its streams."""

    def __init__(self, inner: Extractor, suffix: str) -> None:
        vars(self).update(vars(inner))
        self.takes_several_callers = inner.takes_several_callers
        self.streaming_advice = inner.streaming_advice
        self._inner, self._suffix = inner, suffix
        self._kept = {info.name + suffix: info for info in inner.streams}
        self.streams = [replace(info, name=name) for name, info in self._kept.items()]

    def renamed(self, by_stream: dict[str, Any]) -> dict[str, Any]:
        """Return values of streams under the new names."""
        return {name + self._suffix: value for name, value in by_stream.items()}

    def place(self, backend: Backend) -> None:
        """Compute with this backend from now on."""
        self._inner.place(backend)
        self.backend = self._inner.backend

    def n_frames(self, n_samples: int) -> dict[str, int]:
        return self.renamed(self._inner.n_frames(n_samples))

    def extract(self, clips: Sequence[Frames]) -> list[ClipFeatures]:
        return [self.renamed(made) for made in self._inner.extract(clips)]

    def open_stream(self) -> ExtractStream:
        return _RenamedStream(self, self._inner.open_stream())

    def constants(self) -> Iterable[tuple[str, Tensor]]:
        return self._inner.constants()

    def settings(self) -> str:
        """Return the settings of the inner extractor."""
        return self._inner.settings()

    def describe_stream(self, info: StreamInfo) -> dict[str, Any]:
        """Return the provenance record of a stream, under its new name."""
        return self._inner.describe_stream(self._kept[info.name]) | {"name": info.name}


class _RenamedStream(ExtractStream):
    """Features of one long signal, chunk by chunk, under the new names."""

    def __init__(self, extractor: RenamedStreams, inner: ExtractStream) -> None:
        self._extractor, self._inner = extractor, inner

    def push(self, chunk: Frames) -> ClipFeatures:
        return self._extractor.renamed(self._inner.push(chunk))

    def finish(self) -> ClipFeatures:
        return self._extractor.renamed(self._inner.finish())
