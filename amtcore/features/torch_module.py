"""Any importable `nn.Module` as a feature model: the job names its class and declares its outputs.

    extract:
      - model: torch_module
        fs_hz: 16000
        params: {module: "mypackage.nets:Encoder", kwargs: {width: 64}}
        streams:
          encoded: {width: 64, hop_length: 320, window_length: 400}

Clips are grouped in buckets of length. A batch of a bucket is one zero-padded tensor (clip, sample)
that goes through the module once. All batches of a bucket have one shape, filled up with clips of
zeros, so a compiled module has few shapes. On cores an uncompiled module takes one clip at a time,
which costs less than the zeros. When a module is built, noise of three lengths goes through it,
clip by clip and together; a module whose frames differ is refused.

Only names of installed classes of `nn.Module` are accepted, no paths or URLs, and no names from a
dataset (`names_code`).
"""

from __future__ import annotations

import copy
import math
import pkgutil
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from amtcore.errors import ParameterError, ShapeError, check_known, one_line
from amtcore.features import FeatureModel, FrameDesign, FrameGrid, Parameter, StreamKind
from amtcore.features.feature_model import (
    Frames,
    OptionsByStream,
    Params,
    StreamOptions,
    check_options,
)
from amtcore.features.frame_model import FrameExtractor, Signal, asked_params
from amtcore.features.parameters import parameters_of
from amtcore.features.torch_compile import Compiled
from amtcore.kernels.backend import Backend
from amtcore.kernels.devices import get_backend
from amtcore.kernels.vector.threads import get_num_threads, parallel_for

NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
#: Length of the shortest bucket. The next bucket of a compiled module is twice as long. An
#: uncompiled module has several buckets up to twice the length, since shapes cost it nothing.
BUCKET_S, BUCKETS_UNCOMPILED = 1.0, 8
#: Most clips, and most seconds of padded audio, of a batch: 8 clips up to 4 s, 2 clips of 16 s.
#: Activations of 512 channels every 5 samples then take 0.2 GB.
BATCH_CLIPS, BATCH_S = 8, 32.0
#: Largest change of a frame by padding and other clips, relative to the largest value. Sums in
#: another order round differently.
BATCH_RTOL = 1e-4
#: Lengths in s of the noise that goes through the module when it is built.
TRIED_S = (0.7, 1.3, 1.9)


@dataclass(frozen=True)
class ModuleParams:
    """Parameters of the model.

    Args:
        module: The class, "package.module:Class": importable where the workers run.
        kwargs: Arguments of its constructor.
        channel_axis: Whether it takes (clip, 1, sample) instead of (clip, sample).
        seed: Of torch's generator while it is constructed, so that random weights are the same in
            every worker.
        compile: Run it under torch.compile, compiled for each bucket in every worker; the values
            then differ by rounding.
        buckets: Pad clips with zeros to a few lengths; off, clips run one by one and the module is
            compiled for all lengths at once.
        batch: Most clips that run together, in up to 32 s of padded audio; 1 runs every clip alone.
            Null takes 8 on a GPU or compiled, and 1 otherwise.
    """

    module: str
    kwargs: Mapping[str, Any] | None = None
    channel_axis: bool = False
    seed: int = 0
    compile: bool = False
    buckets: bool = True
    batch: int | None = None

    def __post_init__(self) -> None:
        if self.batch is not None and self.batch < 1:
            raise ParameterError(f"batch must be 1 or more, or null, got {self.batch}")
        if not self.buckets and self.batch not in (None, 1):
            raise ParameterError(
                f"batch {self.batch} needs clips of one length, got buckets false; leave batch out"
            )


@dataclass(frozen=True)
class ModuleStream:
    """Options of a stream.

    Args:
        width: Columns of a frame.
        hop_length: Samples from one frame to the next.
        frame_rate_hz: The same as a rate; exactly one of the two.
        window_length: Samples that the first frame needs; the hop when null.
        output: Which of the outputs: an index where the module returns a tuple, a key where it
            returns a mapping, or a path such as "hidden_states.6"; the stream's name, or the first
            output, when null.
        frames_axis: Axis of the frames in the output, 1 or 2; the columns are the other.
        unit: Unit of the values.
        layer: Submodule whose output is taken instead of the module's, by its name in
            `named_modules`, such as "encoder.layers.3".
    """

    width: int
    hop_length: int | None = None
    frame_rate_hz: float | None = None
    window_length: int | None = None
    output: int | str | None = None
    frames_axis: Literal[1, 2] = 1
    unit: str = "model units"
    # Not in the text that provenance hashes: jobs from before it had none.
    layer: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.hop_length is None) == (self.frame_rate_hz is None):
            raise ParameterError("expected exactly one of hop_length and frame_rate_hz")
        if self.frame_rate_hz is not None and not 0 < self.frame_rate_hz < math.inf:
            raise ParameterError(f"frame_rate_hz must be above 0, got {self.frame_rate_hz}")

    def grid(self, fs_hz: float) -> FrameGrid:
        """Return the grid of the frames."""
        hop: int | Fraction | None = self.hop_length
        if hop is None:
            hop = Fraction(fs_hz) / Fraction(str(self.frame_rate_hz))
        return FrameGrid(self.width, hop, self.window_length, unit=self.unit)

    def frames(self, name: str, returned: Any, clips: int) -> Tensor:
        """Take the stream from what the module returned, as (clip, frame, column)."""
        found = _picked(returned, name, self.output)
        if not isinstance(found, Tensor) or found.ndim != 3 or found.shape[0] != clips:
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ShapeError(
                f"stream {name!r}: expected the module to return a tensor of shape ({clips}, "
                f"frame, column), or frames_axis and output to say where it is, got {got}"
            )
        return found.movedim(self.frames_axis, 1).float()


def _picked(returned: Any, name: str, output: int | str | None) -> Any:
    """Return one of a module's outputs, or None if it has none of this place or name."""
    if isinstance(returned, Mapping):
        output = name if output is None else output
        if output in returned:
            return returned[output]
    elif not isinstance(returned, tuple | list):
        return returned
    for part in str(0 if output is None else output).split("."):
        if isinstance(returned, Mapping):
            returned = returned.get(part)
        elif isinstance(returned, tuple | list) and part.isdecimal():
            returned = returned[int(part)] if int(part) < len(returned) else None
        else:
            return None
    return returned


class TorchModule(FeatureModel):
    """A module of the job's author; the job names its streams."""

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
        return parameters_of(ModuleParams)

    def kind(self, stream: str) -> StreamKind:
        """Return the kind of a stream; any identifier is a name of a stream."""
        if not stream.isidentifier():
            raise ParameterError(f"stream {stream!r}: expected a name of letters, digits and _")
        return self.streams["features"]

    def build(
        self, fs_hz: float, params: Params, streams: OptionsByStream, dtype: str = "float32"
    ) -> FrameExtractor:
        """Build the extractor; stream options are the fields of `ModuleStream`."""
        asked = asked_params(self, ModuleParams, params, dtype)
        for name in streams:
            self.kind(name)  # raises before the module is loaded
        declared = {name: _declared(name, options) for name, options in streams.items()}
        runner = ModuleRunner(asked, declared, fs_hz)
        runner.check()
        design = FrameDesign(
            runner.grids, lambda signal: runner.run([signal])[0], runner.constants,
            compute_batch=runner.run, on_threads=True, place=runner.place,
            gpu_tolerance=BATCH_RTOL, reads_only=True,
        )  # fmt: skip
        return FrameExtractor(self, fs_hz, design, streams, params, _hashed(asked, declared))


def _hashed(params: ModuleParams, streams: Mapping[str, ModuleStream]) -> dict[str, Any]:
    """Return the facts of provenance; later parameters at their default keep older hashes."""
    facts = {**vars(params), "streams": {name: str(stream) for name, stream in streams.items()}}
    if params.batch is None:
        del facts["batch"]
    if layers := {name: each.layer for name, each in streams.items() if each.layer is not None}:
        facts["layers"] = layers
    return facts


class _Layers(nn.Module):
    """A module that returns its output and the outputs of some submodules by name."""

    def __init__(self, module: nn.Module, layers: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self._outputs: dict[str, Any] = {}
        for name in layers:
            module.get_submodule(name).register_forward_hook(partial(self._keep, name))

    def _keep(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._outputs[name] = output

    def forward(self, x: Tensor) -> tuple[Any, dict[str, Any]]:
        output = self.module(x)
        layers, self._outputs = self._outputs, {}
        return output, layers


class ModuleRunner:
    """A module and its streams; a batch runs on one thread, as its operations may be short."""

    def __init__(
        self, params: ModuleParams, streams: Mapping[str, ModuleStream], fs_hz: float
    ) -> None:
        self._params, self._streams, self._fs_hz = params, streams, fs_hz
        self.grids = {name: stream.grid(fs_hz) for name, stream in streams.items()}
        module = load_module(params)
        self.constants = dict(module.state_dict())
        layers = [each.layer for each in streams.values() if each.layer is not None]
        where = f"module {params.module!r}: expected layer to name one of its submodules, got"
        check_known(where, layers, dict(module.named_modules()))
        copies = [module]
        # Two threads must not share a module, which may keep values in attributes while it runs.
        # Copies share the weights. A module that cannot be copied runs on one thread.
        with suppress(Exception):  # whatever an attribute raises that cannot be copied
            for _ in range(get_num_threads() - 1):
                weights = {id(weight): weight for weight in module.parameters()}
                copies.append(copy.deepcopy(module, weights))
        plain = [_Layers(each, layers) if layers else each for each in copies]
        self._plain, self._backend = plain, get_backend("cpu")
        #: Copies that no thread uses at the moment.
        self._free: SimpleQueue[Compiled] = SimpleQueue()
        for each in plain:
            self._free.put(
                Compiled(params.module, each, enabled=params.compile, dynamic=not params.buckets)
            )

    def place(self, backend: Backend) -> None:
        """Move the module to another backend's device."""
        self._backend = backend
        for each in self._plain:
            each.to(backend.device)

    def _batch_shape(self, n_samples: int) -> tuple[int, int]:
        """Return clips and samples of a signal's batch, which has the length of its bucket."""
        if not self._params.buckets:
            return 1, n_samples
        shortest = round(BUCKET_S * self._fs_hz)
        steps = 1 if self._params.compile else BUCKETS_UNCOMPILED
        number = max(0, math.ceil(steps * math.log2(n_samples / shortest)))
        bucket = math.ceil(shortest * 2 ** (number / steps))
        together = self._params.compile or self._backend.name != "cpu"
        clips = self._params.batch or (BATCH_CLIPS if together else 1)
        return max(1, min(clips, int(BATCH_S * self._fs_hz) // bucket)), bucket

    def run(self, signals: Sequence[Signal]) -> list[dict[str, Frames]]:
        """Return the frames of every signal by stream; a bucket's signals run in their order."""
        by_shape: dict[tuple[int, int], list[int]] = {}
        for i, signal in enumerate(signals):
            by_shape.setdefault(self._batch_shape(len(signal)), []).append(i)
        batches = [
            (shape, members[at : at + shape[0]])
            for shape, members in by_shape.items()
            for at in range(0, len(members), shape[0])
        ]
        made: dict[int, dict[str, Tensor]] = {}

        def run(k: int) -> None:
            (clips, samples), members = batches[k]
            batch, module = [signals[i] for i in members], self._free.get()
            try:
                frames = self._cut(module(self._padded(batch, samples, clips)), batch, clips)
            finally:
                self._free.put(module)
            made.update(zip(members, frames, strict=True))

        if len(self._plain) > 1 and self._backend.name == "cpu":
            parallel_for(run, len(batches))
        else:
            for k in range(len(batches)):
                run(k)
        return self._arrays([made[i] for i in range(len(signals))])

    def _arrays(self, made: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Frames]]:
        """Return every signal's frames by stream, in host memory."""
        if self._backend.name == "cpu":
            return [{name: each.numpy() for name, each in streams.items()} for streams in made]
        copies = iter(self._backend.download([each for one in made for each in one.values()]))
        return [{name: next(copies) for name in streams} for streams in made]

    def _padded(self, signals: Sequence[Signal], n_samples: int, clips: int) -> Tensor:
        """Return the signals as (clip, sample) or (clip, 1, sample), padded with zeros."""
        x = torch.zeros(clips, n_samples, device=self._backend.device)
        for row, signal in zip(x, signals, strict=False):
            if isinstance(signal, Tensor):
                row[: len(signal)] = signal
            else:
                row.numpy()[: len(signal)] = signal
        return x.unsqueeze(1) if self._params.channel_axis else x

    def _cut(self, returned: Any, signals: Sequence[Signal], clips: int) -> list[dict[str, Tensor]]:
        """Return copies of every signal's frames by stream, without frames of the padding."""
        output, layers = returned if isinstance(self._plain[0], _Layers) else (returned, {})
        found = {
            name: each.frames(name, layers[each.layer] if each.layer else output, clips)
            for name, each in self._streams.items()
        }
        # A module may return a tensor that it fills again for the next batch.
        in_rows = torch.contiguous_format
        return [
            {
                name: frames[row, : self.grids[name].n_frames(len(signal))].clone(
                    memory_format=in_rows
                )
                for name, frames in found.items()
            }
            for row, signal in enumerate(signals)
        ]

    def check(self) -> None:
        """Raise if frames of noise are not as declared, or depend on padding or other clips."""
        rng = np.random.default_rng(0)
        lengths = [round(seconds * self._fs_hz) for seconds in TRIED_S]
        signals = [(0.05 * rng.standard_normal(n)).astype(np.float32) for n in lengths]
        alone = [self._tried([signal], len(signal))[0] for signal in signals]
        for made, n in zip(alone, lengths, strict=True):
            for name, frames in made.items():
                wanted = (self.grids[name].n_frames(n), self._streams[name].width)
                if frames.shape != wanted:
                    raise ParameterError(
                        f"stream {name!r}: expected {wanted[0]} frames of {wanted[1]} columns for "
                        f"{n} samples as declared, got (frame, column) {frames.shape}; correct "
                        "width, hop_length, window_length or frames_axis"
                    )
        if not self._params.buckets:
            return
        _, longest = self._batch_shape(max(lengths))
        padded = [self._tried([signal], longest)[0] for signal in signals]
        if (stream := _differing(alone, padded)) is not None:
            raise ParameterError(
                f"stream {stream!r}: zeros after a clip change its frames; set buckets to false, "
                "which compiles the module for all lengths at once"
            )
        if self._params.batch == 1:
            return
        advice = "set batch: 1, which runs every clip alone"
        try:
            together = self._tried(signals, longest)
        except (ParameterError, ShapeError) as error:
            raise ParameterError(f"clips cannot run together: {error}; {advice}") from error
        if (stream := _differing(alone, together)) is not None:
            raise ParameterError(
                f"stream {stream!r}: expected frames that do not depend on other clips of a batch "
                f"(within {BATCH_RTOL:g} of the largest value), got frames that do; {advice}"
            )

    def _tried(self, signals: Sequence[Signal], n_samples: int) -> list[dict[str, Frames]]:
        """Run signals together, uncompiled; an error of the module becomes a ParameterError."""
        x = self._padded(signals, n_samples, len(signals))
        try:
            with torch.no_grad():
                returned = self._plain[0](x)
        except Exception as error:  # whatever the module raises for an input that it does not take
            raise ParameterError(
                f"module {self._params.module!r} does not take {tuple(x.shape)}: "
                f"{one_line(error)}; see channel_axis"
            ) from error
        return self._arrays(self._cut(returned, signals, len(signals)))


def _differing(
    wanted: Sequence[Mapping[str, Frames]], got: Sequence[Mapping[str, Frames]]
) -> str | None:
    """Return the name of a stream whose frames differ by more than rounding, if there is one."""
    for one, other in zip(wanted, got, strict=True):
        for name, frames in one.items():
            limit = BATCH_RTOL * np.abs(frames).max(initial=0.0)
            same = frames.shape == other[name].shape
            if not same or not np.abs(frames - other[name]).max(initial=0.0) <= limit:
                return name
    return None


def load_module(params: ModuleParams) -> nn.Module:
    """Return the module that a job names, ready for inference."""
    where = f"module {params.module!r}"
    if not NAME.fullmatch(params.module):
        raise ParameterError(
            f"module must be a name 'package.module:Class', got {params.module!r}; paths and URLs "
            "are not taken"
        )
    try:
        found = pkgutil.resolve_name(params.module)
    except Exception as error:  # a module may raise anything while it is imported
        raise ParameterError(f"{where} cannot be imported: {one_line(error)}") from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ParameterError(f"{where}: expected a class of torch.nn.Module, got {found!r:.80}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(params.seed)
        try:
            made = found(**(params.kwargs or {}))
        except Exception as error:  # of the module's author, about the arguments
            raise ParameterError(f"{where}: {one_line(error)}") from error
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
