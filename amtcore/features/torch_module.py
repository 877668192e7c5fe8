"""Any importable `nn.Module` as a feature model: the job names its class and says what comes out.

    extract:
      - model: torch_module
        fs_hz: 16000
        params: {module: "mypackage.nets:Encoder", kwargs: {width: 64}}
        streams:
          encoded: {width: 64, hop_length: 320, window_length: 400}

The module gets one clip at a time, (1, sample) float32, and runs under `torch.compile`. Lengths are
padded with zeros to a few (buckets), so that it is compiled a few times in all; that padding leaves
the frames alone is tried when the model is built. Only names of installed classes of `nn.Module`
are taken: neither paths nor URLs, and never a name that a dataset tells (`names_code`).
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from amtcore.errors import ParameterError, ShapeError
from amtcore.features import FeatureModel, FrameDesign, FrameGrid, Parameter, StreamKind
from amtcore.features.feature_model import Params, StreamOptions, check_options
from amtcore.features.frame_model import FrameExtractor, Signal, check_float32
from amtcore.features.parameters import built, checked_params, parameters_of
from amtcore.features.torch_compile import Compiled

NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
#: Shortest bucket; each further one is twice as long.
BUCKET_S = 1.0
#: How far padding may move a frame, relative to the largest value: rounding in another order.
PADDED_RTOL = 1e-4
#: Lengths in s of the noise by which padding is tried; between buckets.
TRIED_S = (0.7, 1.3)


@dataclass(frozen=True)
class ModuleParams:
    """What a job may set.

    Args:
        module: The class, "package.module:Class": importable where the workers run.
        kwargs: Arguments of its constructor.
        channel_axis: Whether it takes (1, 1, sample) instead of (1, sample).
        seed: Of torch's generator while it is constructed, so that random weights are the same in
            every worker.
        compile: Run it under torch.compile; without, the values differ by rounding.
        buckets: Pad clips with zeros to a few lengths; off, it is compiled for all lengths at once.
    """

    module: str
    kwargs: Mapping[str, Any] | None = None
    channel_axis: bool = False
    seed: int = 0
    compile: bool = True
    buckets: bool = True


@dataclass(frozen=True)
class ModuleStream:
    """What a job says of a stream.

    Args:
        width: Columns of a frame.
        hop_length: Samples from one frame to the next.
        frame_rate_hz: The same as a rate; exactly one of the two.
        window_length: Samples that the first frame needs; the hop when null.
        output: Which of its outputs: an index where it returns a tuple, a key where it returns a
            mapping; the stream's name, or the only output, when null.
        frames_axis: Axis of the frames in the output, 1 or 2; the columns are the other.
        unit: Unit of the values.
    """

    width: int
    hop_length: int | None = None
    frame_rate_hz: float | None = None
    window_length: int | None = None
    output: int | str | None = None
    frames_axis: Literal[1, 2] = 1
    unit: str = "model units"

    def __post_init__(self) -> None:
        if (self.hop_length is None) == (self.frame_rate_hz is None):
            raise ParameterError("expected exactly one of hop_length and frame_rate_hz")
        if self.frame_rate_hz is not None and not 0 < self.frame_rate_hz < math.inf:
            raise ParameterError(f"frame_rate_hz must be above 0, got {self.frame_rate_hz}")

    def grid(self, fs_hz: float) -> FrameGrid:
        """Where the frames lie."""
        hop: int | Fraction
        if self.hop_length is not None:
            hop = self.hop_length
        else:
            hop = Fraction(fs_hz) / Fraction(str(self.frame_rate_hz))
        return FrameGrid(self.width, hop, self.window_length, unit=self.unit)

    def frames(self, name: str, returned: Any) -> np.ndarray:
        """(frame, column) of what the module returned for one clip."""
        found = returned
        if isinstance(returned, Mapping):
            found = returned.get(name if self.output is None else self.output)
        elif isinstance(returned, tuple | list):
            index = 0 if self.output is None else self.output
            whole = isinstance(index, int) and index < len(returned)
            found = returned[index] if whole else None  # type: ignore[index]
        if not isinstance(found, Tensor) or found.ndim != 3 or found.shape[0] != 1:
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ShapeError(
                f"stream {name!r}: expected the module to return a tensor of shape (1, frame, "
                f"column), or frames_axis and output to say where it is, got {got}"
            )
        frames: np.ndarray = found[0].movedim(self.frames_axis - 1, 0).float().numpy()
        return frames


class TorchModule(FeatureModel):
    """A module of the job's author; its streams have the names that the job gives them."""

    name, summary, default_fs_hz = "torch_module", "Any importable torch.nn.Module", 16000.0
    streams = {  # noqa: RUF012
        "features": StreamKind(
            "model units",
            ("time", "channel"),
            "any name: its width and hop_length or frame_rate_hz are options of the stream",
        )
    }
    names_code = True

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """The fields of `ModuleParams`."""
        return parameters_of(ModuleParams)

    def kind(self, stream: str) -> StreamKind:
        """Every name is that of a stream."""
        if not stream.isidentifier():
            raise ParameterError(f"stream {stream!r}: expected a name of letters, digits and _")
        return self.streams["features"]

    def build(
        self,
        fs_hz: float,
        params: Params,
        streams: Mapping[str, StreamOptions],
        dtype: str = "float32",
    ) -> FrameExtractor:
        """As the base class says; stream options are those of `ModuleStream`."""
        check_float32(self.name, dtype)
        given = checked_params(self.name, self.parameters, params)
        asked = built(ModuleParams, self.name, given)
        declared = {name: _declared(name, options) for name, options in streams.items()}
        grids = {name: stream.grid(fs_hz) for name, stream in declared.items()}
        infos = [grids[name].info(name, self.name, self.kind(name), fs_hz) for name in declared]
        module = load_module(asked)
        runner = _Runner(module, asked, fs_hz)

        def compute(signal: Signal) -> dict[str, np.ndarray]:
            returned = runner(signal)
            found = {name: each.frames(name, returned) for name, each in declared.items()}
            # The padding has frames of its own, which are no part of the clip.
            return {name: each[: grids[name].n_frames(len(signal))] for name, each in found.items()}

        _try(runner, declared, grids, fs_hz)
        all_params = {name: getattr(asked, name) for name in self.parameters}
        outputs = {name: str(stream) for name, stream in declared.items()}
        return FrameExtractor(
            self.name,
            fs_hz,
            self.input_unit,
            infos,
            FrameDesign(grids, compute, dict(module.state_dict())),
            params,
            all_params | {"streams": outputs},
        )


class _Runner:
    """The module on one signal, padded to its bucket."""

    def __init__(self, module: nn.Module, params: ModuleParams, fs_hz: float) -> None:
        self._axes = (1, 1) if params.channel_axis else (1,)
        self._shortest = round(BUCKET_S * fs_hz) if params.buckets else 0
        self.name, self.plain = params.module, module
        self._call = Compiled(
            params.module, module, enabled=params.compile, dynamic=not params.buckets
        )

    def bucket(self, n_samples: int) -> int:
        """Samples of the bucket that so many fall into: the shortest times a power of two."""
        if self._shortest == 0:
            return n_samples
        return self._shortest * 2 ** max(0, math.ceil(math.log2(n_samples / self._shortest)))

    def tensor(self, signal: Signal, n_samples: int) -> Tensor:
        """What the module gets: the signal, and zeros up to so many samples."""
        x = torch.zeros(*self._axes, n_samples)
        x[..., : len(signal)] = torch.from_numpy(signal)
        return x

    def __call__(self, signal: Signal) -> Any:
        return self._call(self.tensor(signal, self.bucket(len(signal))))


def _called(runner: _Runner, signal: Signal, n_samples: int) -> Any:
    """The module's answer while it is built; its own errors are those of the request."""
    x = runner.tensor(signal, n_samples)
    try:
        return runner.plain(x)
    except Exception as error:  # whatever the module raises for an input that it does not take
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ParameterError(
            f"module {runner.name!r} does not take {tuple(x.shape)}: {reason}; see channel_axis"
        ) from error


def load_module(params: ModuleParams) -> nn.Module:
    """The module that a job names, ready for inference.

    Raises:
        ParameterError: No name, none that can be imported, or not a class of `nn.Module`.
    """
    if not NAME.fullmatch(params.module):
        raise ParameterError(
            f"module must be a name 'package.module:Class', got {params.module!r}; paths and URLs "
            "are not taken"
        )
    where, _, what = params.module.partition(":")
    try:
        found: Any = importlib.import_module(where)
        for part in what.split("."):
            found = getattr(found, part)
    except Exception as error:  # a module may raise anything while it is imported
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ParameterError(f"module {params.module!r} cannot be imported: {reason}") from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ParameterError(
            f"module {params.module!r}: expected a class of torch.nn.Module, got {found!r:.80}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(params.seed)
        try:
            made = found(**(params.kwargs or {}))
        except Exception as error:  # of the module's author, about the arguments
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ParameterError(f"module {params.module!r}: {reason}") from error
    return made.eval().requires_grad_(False)


def _declared(name: str, options: StreamOptions) -> ModuleStream:
    known = parameters_of(ModuleStream)
    check_options(name, options, tuple(known))
    if "width" not in options:
        raise ParameterError(f"stream {name!r}: expected its width and its rate, got no width")
    try:
        return ModuleStream(**{key: known[key].checked(value) for key, value in options.items()})
    except ParameterError as error:
        raise ParameterError(f"stream {name!r}: {error}") from error


def _try(
    runner: _Runner,
    declared: Mapping[str, ModuleStream],
    grids: Mapping[str, FrameGrid],
    fs_hz: float,
) -> None:
    """Raises where the frames of noise are not as declared, or zeros after it change them, as they
    do where a module looks at all of a signal."""
    rng = np.random.default_rng(0)
    for seconds in TRIED_S:
        signal = (0.05 * rng.standard_normal(round(seconds * fs_hz))).astype(np.float32)
        n = len(signal)
        with torch.no_grad():
            alone = _called(runner, signal, n)
            padded = _called(runner, signal, runner.bucket(n)) if runner.bucket(n) > n else alone
        for name, stream in declared.items():
            frames = grids[name].n_frames(n)
            wanted, got = (stream.frames(name, made)[:frames] for made in (alone, padded))
            if wanted.shape != (frames, stream.width):
                raise ParameterError(
                    f"stream {name!r}: expected {frames} frames of {stream.width} columns for {n} "
                    f"samples as declared, got (frame, column) {wanted.shape}; correct width, "
                    "hop_length, window_length or frames_axis"
                )
            limit = PADDED_RTOL * np.abs(wanted).max(initial=0.0)
            if not np.abs(wanted - got).max(initial=0.0) <= limit:
                raise ParameterError(
                    f"stream {name!r}: zeros after a clip change its frames; set buckets to false, "
                    "which compiles the module for all lengths at once"
                )
