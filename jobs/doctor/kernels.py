"""Kernels of the processor against their plain loops, through whole models in both precisions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from earmill.jobs.doctor.check import Check, checked
from earmill.pipeline.common.errors import EarmillError

if TYPE_CHECKING:
    from torch import Tensor, nn

FS_HZ = 16000.0
#: The plain loops take milliseconds a sample.
SAMPLES = 200
#: Signals of the loudness models have to fill their longest window.
LOUDNESS_SAMPLES = 2400
RMS = 0.1
#: Relative error of a whole output: another order of rounding, which onsets magnify.
BOUNDS = {"float64": 1e-10, "float32": 1e-4}
#: Below this an output is rounding noise, whatever it is relative to.
_FLOOR = {"float64": 1e-12, "float32": 1e-6}


class UnequalError(EarmillError, AssertionError):
    """Two ways to the same numbers gave different ones."""


def kernel_checks() -> Iterator[Check]:
    """One check a model; together they run every family of kernels."""
    for name, build in _models().items():
        yield checked(f"kernels of {name}", partial(_against_plain_loops, build))


def _models() -> Mapping[str, Callable[..., nn.Module]]:
    """Small models: a few channels, short filters."""
    import amtcore

    few, short = (300.0, 1200.0), {"order": 64}
    return {
        "dau1997": lambda **dtype: amtcore.Dau1997(FS_HZ, *few, **dtype),
        "osses2021": lambda **dtype: amtcore.Osses2021(
            FS_HZ, *few, headphone_kwargs=short, middleear_kwargs=short, **dtype
        ),
        "king2019": lambda **dtype: amtcore.King2019(FS_HZ, basef=1000.0, **dtype),
        "paulick2024": lambda **dtype: amtcore.Paulick2024(
            FS_HZ, *few, 3, outerear_kwargs=short, **dtype
        ),
        "glasberg2002": lambda **dtype: amtcore.Glasberg2002(FS_HZ, **dtype),
        "moore2016": lambda **dtype: amtcore.Moore2016(**dtype),
        "lif": lambda **dtype: amtcore.LIFExodus((3,), 0.01, 0.005, **dtype),
    }


def _against_plain_loops(build: Callable[..., Any]) -> str:
    import torch

    said = []
    for name, bound in BOUNDS.items():
        dtype = getattr(torch, name)
        kernel, loop = build(dtype=dtype), build(dtype=dtype)
        for stage in loop.modules():
            if hasattr(stage, "backend"):
                stage.backend = "reference"
        x = _signal(kernel).to(dtype)
        with torch.no_grad():
            expected = _outputs(loop(x))
            error = worst_error(_outputs(kernel(x)), expected, _FLOOR[name])
        if not error <= bound:
            raise UnequalError(
                f"{name} kernels differ from their plain loops by {error:.1e}, expected at most "
                f"{bound:.0e}; do not use this machine's features, and report this line with the "
                "processor's"
            )
        said.append(f"{name} within {error:.0e}")
    return f"compiled, equal to their plain loops: {', '.join(said)}"


def _signal(model: Any) -> Tensor:
    import torch

    import amtcore

    shapes: dict[type, tuple[int, ...]] = {
        amtcore.Moore2016: (1, 2, LOUDNESS_SAMPLES),
        amtcore.Glasberg2002: (1, LOUDNESS_SAMPLES),
        amtcore.LIFExodus: (1, SAMPLES, 3),
    }
    generator = torch.Generator().manual_seed(0)
    shape = shapes.get(type(model), (1, SAMPLES))
    return RMS * torch.randn(shape, generator=generator, dtype=torch.float64)


def _outputs(result: Any) -> list[Tensor]:
    """All tensors of a model's output."""
    from torch import Tensor

    if isinstance(result, Tensor):
        return [result]
    parts = result.values() if isinstance(result, dict) else result
    return [leaf for part in parts for leaf in _outputs(part)]


def worst_error(got: list[Tensor], expected: list[Tensor], floor: float) -> float:
    """The greatest relative error of an array; infinite where one is not finite, or of another
    shape."""
    worst = 0.0
    for a, b in zip(got, expected, strict=True):
        if a.shape != b.shape or not bool(a.isfinite().all()):
            return float("inf")
        size = float(b.double().norm()) + floor * max(b.numel(), 1) ** 0.5
        worst = max(worst, float((a.double() - b.double()).norm()) / size)
    return worst
