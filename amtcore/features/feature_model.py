"""The contract of a model that a job can run: what it says of itself, and how it is built.

A model is one object of a subclass of `FeatureModel`. Other distributions register theirs by an
entry point of the group `amtcore.models`, whose name is the model's (see `registry`); one that
makes frames of whole clips is written in a few lines on `frame_model.FrameModel`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from amtcore.errors import ParameterError, nearest_hint
from amtcore.features.base import Extractor, Params, StreamKind, StreamOptions
from amtcore.features.parameters import Parameter


class FeatureModel(ABC):
    """A model and the streams it offers.

    Attributes:
        name: What jobs call it.
        summary: One line of what it is.
        default_fs_hz: Sampling rate where a job names none.
        input_unit: Unit of the samples it wants, see `units.Calibration`.
        streams: Its streams by name.
        names_code: Whether its parameters name code that is imported; then a job is run only from
            its author's own file, never as a dataset tells it.
    """

    name: str
    summary: str
    default_fs_hz: float
    input_unit: str = "rms1=100dB"
    streams: Mapping[str, StreamKind]
    names_code: bool = False

    @property
    @abstractmethod
    def parameters(self) -> Mapping[str, Parameter]:
        """What `params` of a job may hold."""

    @property
    def default_streams(self) -> tuple[str, ...]:
        """What a job gets that names no stream."""
        return tuple(self.streams)[:1]

    @abstractmethod
    def build(
        self,
        fs_hz: float,
        params: Params,
        streams: Mapping[str, StreamOptions],
        dtype: str = "float32",
    ) -> Extractor:
        """The warm model with these streams; everything wrong with the request is raised here.

        Args:
            fs_hz: Sampling rate of the clips.
            params: By name; what is left out takes its default.
            streams: Name of each stream wanted to its options.
            dtype: Working type, float32 or float64.
        Raises:
            ParameterError: A parameter, stream or option that does not exist or does not fit.
        """

    def kind(self, stream: str) -> StreamKind:
        """What a stream is; raises for a name that the model does not have."""
        if stream not in self.streams:
            hint = nearest_hint(stream, self.streams)
            raise ParameterError(f"model {self.name!r} has no stream {stream!r}{hint}")
        return self.streams[stream]

    def __repr__(self) -> str:
        """One line."""
        return f"<model {getattr(self, 'name', '?')}: {', '.join(getattr(self, 'streams', ()))}>"


def check_options(stream: str, options: StreamOptions, known: tuple[str, ...]) -> None:
    """Raises where a stream is given an option that it does not have."""
    for name in options:
        if name not in known:
            hint = nearest_hint(str(name), known) if known else ": it has none"
            raise ParameterError(f"stream {stream!r} has no option {name!r}{hint}")
