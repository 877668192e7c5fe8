"""Every exported model and stage, small, for the suites about their constants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import amtcore
from amtcore import stages
from amtcore.models import ModulationSpectrum, Sharpness
from amtcore.models.frame_module import FrameModule
from amtcore.stages.constants import HasConstants

from .model_cases import leaves, whole

FS = 16000
FC = [500.0, 1000.0]
HZ = torch.arange(40.0, 8000.0, 80.0)
#: Every fourth channel of the loudness models, one window, a short ear filter.
_EAR, _STEP = {"order": 64}, {"erb_step": 2.0}
_LOUD = {"outer_middle_ear_kwargs": _EAR}
_SHORT_EARS = {"headphone_kwargs": _EAR, "middleear_kwargs": _EAR}
_RANGE = (400.0, 700.0)


def noise(*shape: int, rms: float = 0.05) -> Tensor:
    """White noise, the same each time."""
    return rms * torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _frames(*shape: int, top: float = 80.0) -> Tensor:
    """Levels in dB of some frames."""
    return top * torch.rand(*shape, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Case:
    """One class with some options.

    Args:
        kind: The class.
        arguments: Of its constructor.
        inputs: What it is called with.
        options: Further keywords.
    """

    kind: type[nn.Module]
    arguments: tuple[Any, ...]
    inputs: tuple[Tensor, ...]
    options: dict[str, Any]

    def build(self, **options: Any) -> Any:
        """The module; `Resampler` has nothing to learn."""
        if self.kind is amtcore.Resampler:
            options.pop("learnable", None)
        return self.kind(*self.arguments, **self.options, **options)

    def outputs(self, module: nn.Module) -> list[Tensor]:
        """All tensors that a module makes of the inputs."""
        dtype = module.dtype
        return leaves(whole(module)(*(x.to(dtype) for x in self.inputs)))


BANDS, WAVE = noise(1, 2, 300), noise(1, 300)
LEVELS, SONES = _frames(1, 12, 3), _frames(1, 12, 3, top=1.0)
INTENSITY = 10.0 ** (_frames(1, 5, len(HZ)) / 10.0)


def _case(name: str, arguments: Any, *inputs: Tensor, **options: Any) -> Case:
    fixed = arguments if isinstance(arguments, tuple) else (arguments,)
    return Case(getattr(amtcore, name.split("-")[0]), fixed, inputs, options)


_LIST: dict[str, tuple[Any, ...]] = {
    "AdaptLoop": (FS, BANDS),
    "BrokenStickCompression": ((), BANDS),
    "PowerCompression": ((), BANDS),
    "SquaringExpansion": ((), BANDS),
    "ButterworthFilter": ((FS, 300.0, 3), BANDS),
    "DRNLFilterbank": ((FC, FS), 1e-6 * WAVE),
    "GammatoneFilterbank": ((FC, FS), WAVE),
    "IHCEnvelope": (FS, BANDS),
    "IHCPaulick2024": (FS, 1e-3 * BANDS),
    "Resampler": ((FS, 4000), BANDS),
    "ModulationFilterbank": ((FS, FC), BANDS),
    "FastModulationFilterbank": ((FS, FC), BANDS),
    "King2019ModulationFilterbank": (FS, BANDS),
    "FastKing2019ModulationFilterbank": (FS, BANDS),
    "Moore2016Spectrum": ((), noise(1, 2, 900)),
    "MultiResolutionFFT": ((), noise(1, 900)),
    "ERBIntegration": (HZ, INTENSITY),
    "ExcitationPattern": ((HZ, FC), INTENSITY, LEVELS[:, :5, :2]),
    "Moore2016ExcitationPattern": (HZ, INTENSITY),
    "SpecificLoudness": ([100.0, 500.0, 1000.0], LEVELS),
    "Moore2016SpecificLoudness": ([100.0, 500.0, 1000.0], LEVELS),
    "LoudnessIntegration": ((), SONES),
    "Moore2016AGC": ((), SONES),
    "Moore2016TemporalIntegration": ((), SONES),
    "Moore2016BinauralLoudness": ((), SONES, SONES.flip(-1)),
    "Dau1997": ((FS, *_RANGE), WAVE),
    "LIFExodus": (((4, 2), 0.01, 0.005), 0.3 * noise(1, 60, 4, rms=1.0).abs()),
}
_WITH_OPTIONS: dict[str, tuple[Any, tuple[Tensor, ...], dict[str, Any]]] = {
    "AdaptLoop-off": (FS, (BANDS,), {"preset": "dau1996"}),
    "AdaptLoop-levels": (FS, (BANDS,), {"min_level": [1e-5, 1e-4], "limit": 2.5}),
    "ButterworthFilter-high": ((FS, 3.0), (BANDS,), {"btype": "high"}),
    "DRNLFilterbank-hix": ((FC, FS), (1e-6 * WAVE,), {"subject": "HIx", "model": "jepsen2008"}),
    "IHCEnvelope-breebaart": (FS, (BANDS,), {"method": "breebaart2001"}),
    "IHCEnvelope-second": (FS, (BANDS,), {"method": "relanoiborra2019"}),
    "IHCEnvelope-bernstein": (FS, (BANDS,), {"method": "bernstein1999"}),
    "ModulationFilterbank-butterworth": (
        (FS, FC), (BANDS,), {"filter_type": "butterworth", "preset": "jepsen2008"},
    ),
    "King2019ModulationFilterbank-none": (FS, (BANDS,), {"phase_insens": "none"}),
    "HeadphoneFilter": (FS, (WAVE,), _EAR),
    "MiddleEarFilter": (FS, (WAVE,), _EAR),
    "MiddleEarFilter-jepsen": (FS, (WAVE,), {**_EAR, "filter_type": "jepsen2008"}),
    "MiddleEarFilter-velocity": (FS, (WAVE,), {**_EAR, "normalize_gain": False}),
    "OuterMiddleEarFilter": (FS, (WAVE,), _EAR),
    "LoudnessEar": (FS, (WAVE,), _EAR),
    "Osses2021": ((FS, *_RANGE), (WAVE,), _SHORT_EARS),
    "King2019": (FS, (WAVE,), {"basef": 1000.0}),
    "King2019-resampled": (
        FS, (WAVE,), {"basef": 1000.0, "compression_type": "power", "lp_150hz": True,
                      "subfs": 1000.0, "phase_insens": "none"},
    ),
    "Paulick2024": ((FS, *_RANGE, 2), (4 * WAVE,), {"outerear_kwargs": _EAR}),
    "Paulick2024-jepsen": (
        (FS, *_RANGE, 2), (4 * WAVE,), {"outerear_kwargs": _EAR, "model": "jepsen2008"},
    ),
    "Moore2016": (
        (), (noise(1, 2, 1600),),
        {**_LOUD, "excitation_kwargs": _STEP, "spectrum_kwargs": {"n_windows": 1}},
    ),
    "Glasberg2002": (FS, (noise(1, 800),), {**_LOUD, "erb_kwargs": _STEP}),
    "LIFExodus-decays": (
        ((4, 2), 0.01, 0.005), (0.3 * noise(1, 60, 4, rms=1.0).abs(),), {"leak_mode": "decays"},
    ),
    "LIFExodus-bitshifts": (
        ((4, 2), 0.01, 0.005), (0.3 * noise(1, 60, 4, rms=1.0).abs(),), {"leak_mode": "bitshifts"},
    ),
}  # fmt: skip
CASES = {
    **{name: _case(name, *rest) for name, rest in _LIST.items()},
    **{name: _case(name, args, *x, **more) for name, (args, x, more) in _WITH_OPTIONS.items()},
}


#: Models that are chains of stages, each of which is a case as well: `make test` leaves some of
#: their slow cases to `make test-long`.
CHAINS = (
    *("King2019", "King2019-resampled", "Osses2021", "Paulick2024", "Paulick2024-jepsen"),
    "Moore2016",
)


def exported() -> set[str]:
    """Names of all module classes that the package or its stages export.

    Modules of frames have no learnable constants, and tests of their own.
    """
    homes = ((amtcore, amtcore.__all__), (stages, vars(stages)))
    every = {name: getattr(home, name) for home, names in homes for name in names}
    return {
        n
        for n, kind in every.items()
        if isinstance(kind, type)
        and issubclass(kind, nn.Module)
        and not issubclass(kind, FrameModule | ModulationSpectrum | Sharpness)
    }


def constants(model: nn.Module) -> Iterator[tuple[str, HasConstants, str]]:
    """(key in the state dict, stage, name) of every learnt constant."""
    for prefix, stage in model.named_modules():
        if isinstance(stage, HasConstants):
            for name in stage.learnt:
                yield f"{prefix}.{name}".lstrip("."), stage, name


def move(model: nn.Module, size: float = 0.1) -> None:
    """Move every parameter at random, as training would."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
