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
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from amtcore.errors import NonFiniteError, ShapeError, check_known
from amtcore.features.parameters import Parameter, built, checked_params, parameters_of
from amtcore.features.spike_events import SpikeEvents
from amtcore.features.stream_info import StreamInfo, StreamKind
from amtcore.kernels.backend import Backend
from amtcore.kernels.devices import get_backend
from amtcore.kernels.vector.threads import get_num_threads

if TYPE_CHECKING:  # a model that another distribution brings need not load ours
    from amtcore.models.frame_module import FrameModule
    from amtcore.models.loudness import LoudnessModel
    from amtcore.models.time_domain import TimeDomainModel

Frames = NDArray[np.floating[Any]]
#: Values of one stream for a stretch of signal: (frame, column), or spikes.
StreamValues = Frames | SpikeEvents
#: Values by name of the stream.
ClipFeatures = dict[str, StreamValues]
Params = Mapping[str, object]
StreamOptions = Mapping[str, object]
#: Options by name of the stream.
OptionsByStream = Mapping[str, StreamOptions]

DEFAULT_FRAME_RATE_HZ = 100.0
DEFAULT_POOL = "mean"


class ExtractStream(ABC):
    """Features of one long signal, chunk by chunk, in memory that does not grow.

    Invariants:
        Frames of all pushes and of `finish`, concatenated, equal the frames of the whole signal.
    """

    @abstractmethod
    def push(self, chunk: Frames) -> ClipFeatures:
        """Return the frames that the next samples (in the model's input unit) complete."""

    @abstractmethod
    def finish(self) -> ClipFeatures:
        """End the signal; return the frames that a model which looks ahead held back."""


@dataclass(eq=False, repr=False)
class Extractor(ABC):
    """One warm model and its streams; for several callers at once only where it says so.

    Build it with `build_extractor`.

    Args:
        model: Registered name of the model.
        fs_hz: Sampling rate of the clips.
        input_unit: Unit of their samples, see `units.Calibration`.
        streams: Its streams.
        params: Parameters of the request, as provenance records them.
        dtype: Working type.
        can_stream: Whether `open_stream` works: no stream needs whole clips.
        input_channels: Numbers of signals, such as ears, that a clip may have; 1 is (time,).
        memory_s: Time constant in s with which frames forget: sound t before a frame changes it by
            at most about exp(-t / memory_s) of the stream's largest value. None if unknown.
        hops: Samples after which the model's grids begin anew: the hop of each stream, and factors
            of decimation. Needed with `memory_s`.
    Attributes:
        takes_several_callers: Threads may call `extract` and use streams at the same time.
    """

    model: str
    _: KW_ONLY
    fs_hz: float
    input_unit: str
    streams: Sequence[StreamInfo]
    params: Params
    dtype: np.dtype[Any]
    can_stream: bool
    input_channels: tuple[int, ...] = (1,)
    memory_s: float | None = None
    hops: Sequence[int | Fraction] = ()

    takes_several_callers = False
    #: A job refuses a GPU whose frames differ more from the CPU's, as a part of the largest value.
    #: The difference of two float32 transforms is a hundredth of this.
    gpu_tolerance = 1e-5
    #: Advice on parameters with which `open_stream` works, for messages; empty for none.
    streaming_advice = ""

    def __post_init__(self) -> None:
        self.params, self.streams = dict(self.params), tuple(self.streams)
        #: Name and version of the distribution the model comes from; None for models of amtcore.
        self.distribution: str | None = None
        rate = Fraction(str(self.fs_hz))
        #: Whole seconds after which all of the model's grids begin anew.
        self.grid_s = math.lcm(*((hop / rate).numerator for hop in self.hops))
        #: Device of the computation, see `place`.
        self.backend: Backend = get_backend("cpu")

    def place(self, backend: Backend) -> None:
        """Compute with another backend from now on, if the model can, and set `backend`.

        The base class stays on the CPU.
        """
        del backend

    @abstractmethod
    def n_frames(self, n_samples: int) -> dict[str, int]:
        """Return the number of whole frames of each stream in `n_samples` samples."""

    @abstractmethod
    def extract(self, clips: Sequence[Frames]) -> list[ClipFeatures]:
        """Return the features of several clips.

        Args:
            clips: 1-D signals in the model's input unit at `fs_hz`, of any lengths; or
                (channel, time) if `input_channels` allows it. No calibration is applied, see
                `units.Calibration`.
        Raises:
            NonFiniteError: NaN or infinity in a clip, in the models of this package. Tensors on a
                GPU are not checked, since a check would wait for the device.
        Returns:
            Per clip, stream name -> (frames, width), or events of the whole clip. A clip's values
            do not depend on other clips.
        """

    @abstractmethod
    def open_stream(self) -> ExtractStream:
        """Start on a long signal; end it with `finish`. Raise if a stream needs whole clips."""

    @abstractmethod
    def constants(self) -> Iterable[tuple[str, Tensor]]:
        """Return every constant of the model and its streams by name, in the order of the hash."""

    def settings(self) -> str:
        """Return the settings that decide the values, as text; "" if the constants suffice."""
        return ""

    def buffers_sha256(self) -> str:
        """Return a hash of all constants: equal hashes compute equal features."""
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
        return {
            "model": self.model,
            **({} if self.distribution is None else {"distribution": self.distribution}),
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
    """Return the state of a module and its filters' taps, sorted by name."""
    # Taps also depend on the rounding of FFT libraries.
    made = dict(module.named_buffers())
    taps = {key: made[key] for key in made if key.rpartition(".")[2] in ("taps", "phases")}
    return sorted({**module.state_dict(), **taps}.items())


def check_finite(signal: NDArray[np.floating[Any]] | Tensor, dtype: str) -> None:
    """Raise if a signal holds NaN, infinity, or a number too large for the working type.

    A tensor on a GPU is not checked, since the check would wait for the device.
    """
    if not isinstance(signal, Tensor) and signal.dtype == dtype:
        fine = np.isfinite(signal)
    elif not isinstance(signal, Tensor):
        with np.errstate(over="ignore"):
            fine = np.isfinite(signal.astype(dtype))
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
    """Return a finite 1-D signal in the working type; raise for anything else."""
    given: Any = clip if isinstance(clip, Tensor) else np.asarray(clip)
    if isinstance(given, Tensor):
        wanted, fits = f"tensor of {dtype}", str(given.dtype) == f"torch.{dtype}"
    else:
        wanted, fits = "floating-point signal", given.dtype.kind == "f"
    if given.ndim != 1 or not fits:
        raise ShapeError(
            f"expected a 1-D {wanted}, got {given.dtype} of shape {tuple(given.shape)}"
        )
    check_finite(given, dtype.name)
    return given if isinstance(given, Tensor) else np.ascontiguousarray(given, dtype)


class FeatureModel(ABC):
    """A model and the streams it offers.

    Attributes:
        name: Name in a job.
        summary: Description in one line.
        default_fs_hz: Sampling rate where a job names none.
        input_unit: Unit of the samples it wants, see `units.Calibration`.
        streams: Its streams by name.
        names_code: True if parameters name code that is imported. A job with this model runs only
            from its author's own file, never from a file in a dataset.
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
        self, fs_hz: float, params: Params, streams: OptionsByStream, dtype: str = "float32"
    ) -> Extractor:
        """Return the warm model with these streams; raise every error of the request.

        Args:
            fs_hz: Sampling rate of the clips.
            params: Parameters by name; the others take their defaults.
            streams: Options by name of the stream.
            dtype: Working type, float32 or float64.
        Raises:
            ParameterError: A parameter, stream or option that does not exist or does not fit.
        """

    def kind(self, stream: str) -> StreamKind:
        """Return the kind of a stream; raises for a name that the model does not have."""
        check_known(f"model {self.name!r} has no stream", [stream], self.streams)
        return self.streams[stream]


def check_options(stream: str, options: StreamOptions, known: tuple[str, ...]) -> None:
    """Raise if a stream does not have one of the options."""
    check_known(f"stream {stream!r} has no option", options, known)


DTYPES = {"float32": torch.float32, "float64": torch.float64}
#: Constructor arguments that a job does not set.
INTERNAL = ("fs", "learnable", "return_stages", "dtype")

Module = TypeVar("Module", bound="TimeDomainModel | LoudnessModel | FrameModule")


@dataclass(eq=False, repr=False)
class ModuleModel(FeatureModel, Generic[Module]):
    """A model of this package as a job runs it; `constructor` is the class of the model."""

    name: str
    constructor: type[Module]
    summary: str
    default_fs_hz: float
    streams: Mapping[str, StreamKind]

    def __post_init__(self) -> None:
        self.input_unit = self.constructor.input_unit

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        return parameters_of(self.constructor, leave_out=INTERNAL)

    def module(self, fs_hz: float, params: Params, dtype: str = "float32") -> Module:
        """Return the model."""
        checked_params(self.name, self.parameters, params)
        return built(self.constructor, self.name, {"fs": fs_hz, "dtype": DTYPES[dtype], **params})
