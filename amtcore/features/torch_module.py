"""Any importable `nn.Module` as a feature model: the job names its class and declares its outputs.

    extract:
      - model: torch_module
        fs_hz: 16000
        params: {module: "mypackage.nets:Encoder", kwargs: {width: 64}}
        streams:
          encoded: {width: 64, hop_length: 320, window_length: 400}

Clips are grouped in buckets of length. A batch of a bucket is one zero-padded tensor (clip, sample)
that goes through the module once. Every stream takes its output of the module, cut to the frames of
each clip. All batches of a bucket have one shape, filled up with clips of zeros, so a compiled
module has few shapes. When a module is built, noise of three lengths goes through it, clip by clip
and together; a module whose frames differ is refused.

Only names of installed classes of `nn.Module` are accepted, no paths or URLs, and no names from a
dataset (`names_code`).
"""

from __future__ import annotations

import copy
import importlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from amtcore.errors import ParameterError, ShapeError, nearest_hint, one_line
from amtcore.features import FeatureModel, FrameDesign, FrameGrid, Parameter, StreamKind
from amtcore.features.feature_model import Frames, Params, StreamOptions, check_options
from amtcore.features.frame_model import FrameExtractor, Signal, check_float32
from amtcore.features.parameters import built, checked_params, parameters_of
from amtcore.features.torch_compile import Compiled
from amtcore.kernels.vector.threads import get_num_threads, parallel_for

NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
#: Shortest bucket; each further bucket is twice as long.
BUCKET_S = 1.0
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
        compile: Run it under torch.compile; without, the values differ by rounding.
        buckets: Pad clips with zeros to a few lengths; off, clips run one by one and the module is
            compiled for all lengths at once.
        batch: Most clips that run together, in up to 32 s of padded audio; null takes 8, and 1 runs
            every clip alone.
    """

    module: str
    kwargs: Mapping[str, Any] | None = None
    channel_axis: bool = False
    seed: int = 0
    compile: bool = True
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
        hop: int | Fraction
        if self.hop_length is not None:
            hop = self.hop_length
        else:
            hop = Fraction(fs_hz) / Fraction(str(self.frame_rate_hz))
        return FrameGrid(self.width, hop, self.window_length, unit=self.unit)

    def frames(self, name: str, returned: Any, clips: int) -> np.ndarray:
        """Take the stream from what the module returned, as (clip, frame, column)."""
        found = _picked(returned, name, self.output)
        if not isinstance(found, Tensor) or found.ndim != 3 or found.shape[0] != clips:
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ShapeError(
                f"stream {name!r}: expected the module to return a tensor of shape ({clips}, "
                f"frame, column), or frames_axis and output to say where it is, got {got}"
            )
        frames: np.ndarray = found.movedim(self.frames_axis, 1).float().numpy()
        return frames


def _picked(returned: Any, name: str, output: int | str | None) -> Any:
    """Return one of a module's outputs, or None if it has none of this place or name."""
    if isinstance(returned, Mapping):
        key = name if output is None else output
        if key in returned:
            return returned[key]
    elif not isinstance(returned, tuple | list):
        return returned
    elif output is None:
        output = 0
    for part in str(output).split("."):
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
        self,
        fs_hz: float,
        params: Params,
        streams: Mapping[str, StreamOptions],
        dtype: str = "float32",
    ) -> FrameExtractor:
        """Build the extractor; stream options are the fields of `ModuleStream`."""
        check_float32(self.name, dtype)
        given = checked_params(self.name, self.parameters, params)
        asked = built(ModuleParams, self.name, given)
        declared = {name: _declared(name, options) for name, options in streams.items()}
        grids = {name: stream.grid(fs_hz) for name, stream in declared.items()}
        infos = [grids[name].info(name, self.name, self.kind(name), fs_hz) for name in declared]
        module = load_module(asked)
        runner = ModuleRunner(module, asked, declared, grids, fs_hz)
        runner.check()
        design = FrameDesign(
            grids, lambda signal: runner.run([signal])[0], dict(module.state_dict()),
            compute_batch=runner.run,
        )  # fmt: skip
        facts = _hashed(asked, declared)
        return FrameExtractor(self.name, fs_hz, self.input_unit, infos, design, params, facts)


def _hashed(params: ModuleParams, streams: Mapping[str, ModuleStream]) -> dict[str, Any]:
    """Return the facts that decide the values, for provenance.

    Parameters that a later version added are left out at their default, so that the hash of older
    jobs does not change.
    """
    facts = {name: getattr(params, name) for name in parameters_of(ModuleParams)}
    if params.batch is None:
        del facts["batch"]
    layers = {name: stream.layer for name, stream in streams.items() if stream.layer is not None}
    outputs = {name: str(stream) for name, stream in streams.items()}
    return facts | {"streams": outputs} | ({"layers": layers} if layers else {})


class _Layers(nn.Module):
    """A module that returns its output and the outputs of some submodules by name."""

    def __init__(self, module: nn.Module, layers: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self._outputs: dict[str, Any] = {}
        for name in layers:
            module.get_submodule(name).register_forward_hook(self._keep(name))

    def _keep(self, name: str) -> Any:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            self._outputs[name] = output

        return hook

    def forward(self, x: Tensor) -> tuple[Any, dict[str, Any]]:
        output = self.module(x)
        layers, self._outputs = self._outputs, {}
        return output, layers


def _copies(module: nn.Module) -> list[nn.Module]:
    """Return a copy of a module for every thread, with shared weights.

    Two threads must not share a module, which may keep values in attributes while it runs. A module
    that cannot be copied is returned alone.
    """
    weights = {id(weight): weight for weight in module.parameters()}
    try:
        more = [copy.deepcopy(module, dict(weights)) for _ in range(get_num_threads() - 1)]
    except Exception:  # whatever an attribute of a module raises that cannot be copied
        return [module]
    return [module, *more]


class ModuleRunner:
    """A module and its streams on batches of signals.

    Each batch runs on one thread with a copy of the module. The operations of a small module are
    too short to be shared by torch's own threads.
    """

    def __init__(
        self,
        module: nn.Module,
        params: ModuleParams,
        streams: Mapping[str, ModuleStream],
        grids: Mapping[str, FrameGrid],
        fs_hz: float,
    ) -> None:
        layers = [each.layer for each in streams.values() if each.layer is not None]
        known = dict(module.named_modules())
        for layer in layers:
            if layer not in known:
                raise ParameterError(
                    f"module {params.module!r}: expected layer to name one of its submodules, got "
                    f"{layer!r}{nearest_hint(layer, known)}"
                )
        self._params, self._streams, self._grids, self._fs_hz = params, streams, grids, fs_hz
        copies = [_Layers(each, layers) if layers else each for each in _copies(module)]
        self._plain, self._copies = copies[0], len(copies)
        #: Copies that no thread uses at the moment.
        self._free: SimpleQueue[Compiled] = SimpleQueue()
        for each in copies:
            self._free.put(
                Compiled(params.module, each, enabled=params.compile, dynamic=not params.buckets)
            )

    def bucket(self, n_samples: int) -> int:
        """Return the samples of a signal's bucket: the shortest bucket times a power of two."""
        if not self._params.buckets:
            return n_samples
        shortest = round(BUCKET_S * self._fs_hz)
        doublings = max(0, math.ceil(math.log2(n_samples / shortest)))
        return int(shortest * 2**doublings)

    def clips(self, bucket: int) -> int:
        """Return the number of clips in every batch of a bucket."""
        if not self._params.buckets:
            return 1
        most = max(1, int(BATCH_S * self._fs_hz) // bucket)
        return min(most, BATCH_CLIPS if self._params.batch is None else self._params.batch)

    def run(self, signals: Sequence[Signal]) -> list[dict[str, Frames]]:
        """Return the frames of every signal by stream.

        Signals of a bucket run together in their order. Every batch of a bucket has the same shape.
        """
        by_bucket: dict[int, list[int]] = {}
        for i, signal in enumerate(signals):
            by_bucket.setdefault(self.bucket(len(signal)), []).append(i)
        batches = [
            (bucket, members[at : at + self.clips(bucket)])
            for bucket, members in by_bucket.items()
            for at in range(0, len(members), self.clips(bucket))
        ]
        made: dict[int, dict[str, Frames]] = {}

        def run(k: int) -> None:
            bucket, members = batches[k]
            size, module = self.clips(bucket), self._free.get()
            try:
                returned = module(self._padded([signals[i] for i in members], bucket, size))
            finally:
                self._free.put(module)
            found = self._taken(returned, size)
            for row, i in enumerate(members):
                made[i] = self._cut(found, row, len(signals[i]))

        if self._copies > 1:
            parallel_for(run, len(batches))
        else:
            for k in range(len(batches)):
                run(k)
        return [made[i] for i in range(len(signals))]

    def _padded(self, signals: Sequence[Signal], n_samples: int, clips: int) -> Tensor:
        """Return the signals as (clip, sample) or (clip, 1, sample), padded with zeros."""
        x = torch.zeros(clips, n_samples)
        for row, signal in zip(x, signals, strict=False):
            row[: len(signal)] = torch.from_numpy(signal)
        return x.unsqueeze(1) if self._params.channel_axis else x

    def _taken(self, returned: Any, clips: int) -> dict[str, np.ndarray]:
        """Return every stream as (clip, frame, column)."""
        output, layers = returned if isinstance(self._plain, _Layers) else (returned, {})
        return {
            name: each.frames(name, layers[each.layer] if each.layer else output, clips)
            for name, each in self._streams.items()
        }

    def _cut(self, found: Mapping[str, np.ndarray], row: int, n_samples: int) -> dict[str, Frames]:
        """Return copies of one clip's frames, without frames of the padding."""
        return {
            name: each[row, : self._grids[name].n_frames(n_samples)].copy()
            for name, each in found.items()
        }

    def check(self) -> None:
        """Run noise through the module, and raise if its frames are not as declared.

        Frames must not depend on padding or on the other clips of a batch.
        """
        rng = np.random.default_rng(0)
        lengths = [round(seconds * self._fs_hz) for seconds in TRIED_S]
        signals = [(0.05 * rng.standard_normal(n)).astype(np.float32) for n in lengths]
        alone = [self._tried([signal], len(signal))[0] for signal in signals]
        for made, n in zip(alone, lengths, strict=True):
            self._check_shapes(made, n)
        if not self._params.buckets:
            return
        longest = self.bucket(max(lengths))
        for signal, wanted in zip(signals, alone, strict=True):
            name = self._differs(wanted, self._tried([signal], longest)[0])
            if name:
                raise ParameterError(
                    f"stream {name!r}: zeros after a clip change its frames; set buckets to false, "
                    "which compiles the module for all lengths at once"
                )
        if self._params.batch == 1:
            return
        advice = "set batch: 1, which runs every clip alone"
        try:
            together = self._tried(signals, longest)
        except (ParameterError, ShapeError) as error:
            raise ParameterError(f"clips cannot run together: {error}; {advice}") from error
        for wanted, got in zip(alone, together, strict=True):
            name = self._differs(wanted, got)
            if name:
                raise ParameterError(
                    f"stream {name!r}: expected frames that do not depend on other clips of a "
                    f"batch (within {BATCH_RTOL:g} of the largest value), got frames that do; "
                    f"{advice}"
                )

    def _tried(self, signals: Sequence[Signal], n_samples: int) -> list[dict[str, Frames]]:
        """Run signals together, uncompiled; an error of the module becomes a ParameterError."""
        x = self._padded(signals, n_samples, len(signals))
        try:
            with torch.no_grad():
                returned = self._plain(x)
        except Exception as error:  # whatever the module raises for an input that it does not take
            raise ParameterError(
                f"module {self._params.module!r} does not take {tuple(x.shape)}: "
                f"{one_line(error)}; see channel_axis"
            ) from error
        found = self._taken(returned, len(signals))
        return [self._cut(found, row, len(signal)) for row, signal in enumerate(signals)]

    def _check_shapes(self, made: Mapping[str, Frames], n_samples: int) -> None:
        for name, frames in made.items():
            wanted = (self._grids[name].n_frames(n_samples), self._streams[name].width)
            if frames.shape != wanted:
                raise ParameterError(
                    f"stream {name!r}: expected {wanted[0]} frames of {wanted[1]} columns for "
                    f"{n_samples} samples as declared, got (frame, column) {frames.shape}; correct "
                    "width, hop_length, window_length or frames_axis"
                )

    @staticmethod
    def _differs(wanted: Mapping[str, Frames], got: Mapping[str, Frames]) -> str:
        """Return the name of a stream whose frames differ by more than rounding, or ""."""
        for name, frames in wanted.items():
            limit = BATCH_RTOL * np.abs(frames).max(initial=0.0)
            same = frames.shape == got[name].shape
            if not same or not np.abs(frames - got[name]).max(initial=0.0) <= limit:
                return name
        return ""


def load_module(params: ModuleParams) -> nn.Module:
    """Return the module that a job names, ready for inference.

    Raises:
        ParameterError: The name is invalid, cannot be imported, or is no class of `nn.Module`.
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
        raise ParameterError(
            f"module {params.module!r} cannot be imported: {one_line(error)}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ParameterError(
            f"module {params.module!r}: expected a class of torch.nn.Module, got {found!r:.80}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(params.seed)
        try:
            made = found(**(params.kwargs or {}))
        except Exception as error:  # of the module's author, about the arguments
            raise ParameterError(f"module {params.module!r}: {one_line(error)}") from error
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
