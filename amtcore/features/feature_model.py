"""The contract of a model that a job can run: streams, extractor, parameters.

A model is one object of a subclass of `FeatureModel`; `build` returns an `Extractor`, which turns
clips or chunks into frames. Other distributions register a model by an entry point of the group
`amtcore.models`, whose name is the model's (see `registry`). The class `FrameModel` is the short
way to a model that makes frames of whole clips; `ModuleModel` is for the models of this package.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from amtcore.errors import NonFiniteError, ParameterError, ShapeError, nearest_hint
from amtcore.features.parameters import Parameter, built, checked_params, parameters_of
from amtcore.features.spike_events import SpikeEvents
from amtcore.features.stream_info import StreamInfo, StreamKind
from amtcore.kernels.backend import Backend
from amtcore.kernels.devices import get_backend
from amtcore.kernels.vector.threads import get_num_threads

if TYPE_CHECKING:  # a model that another distribution brings need not load ours
    from amtcore.models.loudness import LoudnessModel
    from amtcore.models.time_domain import TimeDomainModel

Frames = NDArray[np.floating[Any]]
#: Values of one stream for a stretch of signal: (frame, column), or spikes.
StreamValues = Frames | SpikeEvents
#: Values by name of the stream.
ClipFeatures = dict[str, StreamValues]
Params = Mapping[str, object]
StreamOptions = Mapping[str, object]

DEFAULT_FRAME_RATE_HZ = 100.0
DEFAULT_POOL = "mean"


class ExtractStream(ABC):
    """Features of one long signal, chunk by chunk, in memory that does not grow.

    Invariants:
        Frames of all pushes and of `finish`, concatenated, equal the frames of the whole signal.
    """

    @abstractmethod
    def push(self, chunk: Frames) -> ClipFeatures:
        """Feed the next samples (in the model's input unit); returns the frames they complete."""

    @abstractmethod
    def finish(self) -> ClipFeatures:
        """End the signal; returns the frames that were waiting for what follows its last sample.

        A model that looks ahead holds some back; others have none left.
        """


class Extractor(ABC):
    """One warm model and its streams; for several callers at once only where it says so.

    Build it with `build_extractor`.

    Args:
        model: Registered name of the model.
        fs_hz: Sampling rate of the clips.
        input_unit: Unit of their samples, see `units.Calibration`.
        streams: What it makes.
        params: What the model was asked for, as provenance records it.
        dtype: Working type.
        can_stream: Whether `open_stream` works: no stream needs whole clips.
        input_channels: How many signals, such as ears, a clip may have; one is a clip of (time,).
        memory_s: Time constant in s with which frames forget what was: what differed t before a
            frame changes it by about exp(-t / memory_s) of the stream's largest value or less. None
            where nobody has said so, or where it does not hold.
        hops: Samples after which the model's grids begin anew: from one frame of a stream to the
            next, and of what it decimates by. Needed where `memory_s` is given.
    Attributes:
        takes_several_callers: Threads may call `extract` and use streams at the same time.
    """

    takes_several_callers = False
    #: Advice on parameters with which `open_stream` works, for messages; empty for none.
    streaming_advice = ""

    def __init__(
        self,
        model: str,
        *,
        fs_hz: float,
        input_unit: str,
        streams: Sequence[StreamInfo],
        params: Params,
        dtype: np.dtype[Any],
        can_stream: bool,
        input_channels: tuple[int, ...] = (1,),
        memory_s: float | None = None,
        hops: Sequence[int | Fraction] = (),
    ) -> None:
        self.model, self.params = model, dict(params)
        self.fs_hz: float = fs_hz
        self.input_unit: str = input_unit
        self.streams = tuple(streams)
        self.dtype = dtype
        self.can_stream = can_stream
        self.input_channels = input_channels
        self.memory_s = memory_s
        #: Whole seconds after which all of the model's grids begin anew.
        self.grid_s = math.lcm(*((hop / Fraction(str(fs_hz))).numerator for hop in hops))
        #: Name and version of the distribution the model comes from; None for models of amtcore.
        self.distribution: str | None = None
        #: Device of the computation, see `place`.
        self.backend: Backend = get_backend("cpu")

    def place(self, backend: Backend) -> None:
        """Compute with another backend from now on, where the model can: `backend` then says so.

        This one knows the processor only, and stays there.
        """
        del backend

    @abstractmethod
    def n_frames(self, n_samples: int) -> dict[str, int]:
        """Return the number of whole frames of each stream in `n_samples` samples."""

    @abstractmethod
    def extract(self, clips: Sequence[Frames]) -> list[ClipFeatures]:
        """Features of several clips.

        Args:
            clips: 1-D signals in the model's input unit at `fs_hz`, of any lengths; or
                (channel, time) where `input_channels` has more than one. No calibration is applied
                here: see `units.Calibration`.
        Raises:
            NonFiniteError: NaN or infinity in a clip, in the models of this package. Tensors on a
                GPU are not looked at, since that would wait for the device.
        Returns:
            Per clip, stream name -> (frames, width), or events of the whole clip. A clip's values
            do not depend on its neighbours.
        """

    @abstractmethod
    def open_stream(self) -> ExtractStream:
        """Start on a long signal; end it with `finish`. Raises where a stream needs whole clips."""

    @abstractmethod
    def constants(self) -> Iterable[tuple[str, Tensor]]:
        """Every constant of the model and its streams by name, in the order they are hashed."""

    def settings(self) -> str:
        """Text of the settings that decide the values; "" if the constants tell them all."""
        return ""

    def buffers_sha256(self) -> str:
        """Hash of every constant of the model: two equal hashes compute the same features."""
        digest = hashlib.sha256(self.settings().encode())
        for name, tensor in self.constants():
            digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def describe_stream(self, info: StreamInfo) -> dict[str, Any]:
        """Return the provenance record of a stream."""
        return info.to_dict()

    def describe(self) -> dict[str, Any]:
        """Return the provenance record of the model; streams of events have all their options."""
        origin = {} if self.distribution is None else {"distribution": self.distribution}
        return {
            "model": self.model,
            **origin,
            "fs_hz": self.fs_hz,
            "params": self.params,
            "input_unit": self.input_unit,
            "dtype": str(self.dtype),
            "backend": self.backend.name,
            "threads": get_num_threads(),
            "buffers_sha256": self.buffers_sha256(),
            "streams": [self.describe_stream(info) for info in self.streams],
        }


def module_constants(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The state of a module and its filters' taps, sorted by name."""
    # Taps follow from constants and settings, but also from the transforms of a library.
    made = dict(module.named_buffers())
    taps = {key: made[key] for key in made if key.rpartition(".")[2] in ("taps", "phases")}
    return sorted({**module.state_dict(), **taps}.items())


def check_finite(signal: NDArray[np.floating[Any]] | Tensor, dtype: str) -> None:
    """Raise where a signal holds NaN, infinity, or a number too large for the working type.

    A tensor on a GPU is not looked at: the look would wait for the device.
    """
    if not isinstance(signal, Tensor):
        with np.errstate(over="ignore"):
            fine = np.isfinite(signal.astype(dtype, copy=False))
    elif signal.device.type == "cpu":
        fine = signal.to(getattr(torch, dtype)).isfinite().numpy()
    else:
        return
    if not fine.all():
        at = tuple(int(i) for i in np.argwhere(~fine)[0])
        raise NonFiniteError(
            f"expected samples that are finite in {dtype}, got {signal[at]} at sample {at[-1]}; "
            "mend the clip or leave it out (a job quarantines such rows)"
        )


def as_clip(clip: NDArray[np.floating[Any]] | Tensor, dtype: np.dtype[Any]) -> Any:
    """A finite 1-D signal in the working type, a tensor as it is; raises for anything else."""
    if isinstance(clip, Tensor):
        if clip.ndim != 1 or str(clip.dtype) != f"torch.{dtype}":
            raise ShapeError(
                f"expected a 1-D tensor of {dtype}, got {clip.dtype} of shape {tuple(clip.shape)}"
            )
        check_finite(clip, dtype.name)
        return clip
    array = np.asarray(clip)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.floating):
        raise ShapeError(
            f"expected a 1-D floating-point signal, got {array.dtype} of shape {array.shape}"
        )
    check_finite(array, dtype.name)
    return np.ascontiguousarray(array, dtype)


class FeatureModel(ABC):
    """A model and the streams it offers.

    Attributes:
        name: Name in a job.
        summary: Description in one line.
        default_fs_hz: Sampling rate where a job names none.
        input_unit: Unit of the samples it wants, see `units.Calibration`.
        streams: Its streams by name.
        names_code: True if its parameters name code that is imported. Such a job runs only from
            its author's own file, never from a file in a dataset.
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
        """Parameters that a job may set."""

    @property
    def default_streams(self) -> tuple[str, ...]:
        """Streams of a job that names none."""
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
        """Return the kind of a stream; raises for a name that the model does not have."""
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


DTYPES = {"float32": torch.float32, "float64": torch.float64}
#: Constructor arguments that a job does not set.
INTERNAL = ("fs", "learnable", "return_stages", "dtype")

Module = TypeVar("Module", bound="TimeDomainModel | LoudnessModel")


class ModuleModel(FeatureModel, Generic[Module]):
    """A model of this package as a job runs it.

    Args:
        name: Name in a job.
        constructor: The model's class.
        summary: Description in one line.
        default_fs_hz: Sampling rate where a job names none.
        streams: Its streams by name.
    """

    def __init__(
        self,
        name: str,
        constructor: type[Module],
        summary: str,
        default_fs_hz: float,
        streams: Mapping[str, StreamKind],
    ) -> None:
        self.name, self.summary, self.default_fs_hz = name, summary, default_fs_hz
        self.constructor, self.streams = constructor, streams
        self.input_unit = constructor.input_unit

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """Constructor arguments a job may set."""
        return parameters_of(self.constructor, leave_out=INTERNAL)

    def module(self, fs_hz: float, params: Params, dtype: str = "float32") -> Module:
        """The model itself."""
        checked_params(self.name, self.parameters, params)
        return built(self.constructor, self.name, {"fs": fs_hz, "dtype": DTYPES[dtype], **params})
