"""Every model, small, for the suites that run over all of them: how it is built, fed and read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from amtcore import Dau1997, Glasberg2002, King2019, LIFExodus, Moore2016, Osses2021, Paulick2024

FS = 16000
_RANGE = (300.0, 1200.0)
_SHORT_EARS = {"order": 64}


@dataclass(frozen=True)
class Case:
    """One model.

    Args:
        kind: Class of the model.
        build: The model with the given options (dtype, learnable, return_stages).
        item: Shape of one signal.
        output_axis: Time in the outputs of a batch; statistics of whole signals have no such axis.
        stage_axis: Time in the stages of a batch.
        shows: What its representation says.
        input_axis: Time in the signals.
        streams: Whether chunks can be processed one after another.
        exact: Whether vmap gives bit for bit what a batch gives. Matrix products and transforms
            sum in an order that depends on their shape, and of a mapped batch none is seen.
        rms: Of the signals, in the model's unit.
    """

    kind: type[nn.Module]
    build: Callable[..., Any]
    item: tuple[int, ...]
    shows: tuple[str, ...]
    output_axis: int = -1
    stage_axis: int = -1
    input_axis: int = -1
    streams: bool = True
    exact: bool = True
    rms: float = 0.02

    def signal(
        self, *batch: int, samples: int | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """White noise, (*batch, *item), of another length if asked."""
        generator = torch.Generator().manual_seed(0)
        shape = list(self.item)
        if samples is not None:
            shape[self.input_axis] = samples
        x = torch.randn(*batch, *shape, generator=generator, dtype=torch.float64)
        return (self.rms * x).to(dtype)

    def traces(self, result: Any) -> list[tuple[Tensor, int | None]]:
        """Outputs and stages of a batch with their time axis; None for those without one."""
        has_stages = isinstance(result, tuple) and isinstance(result[-1], dict)
        outputs, stages = result if has_stages else (result, {})
        axes = [(leaf, self.output_axis) for leaf in tree_leaves(outputs)]
        axes += [(leaf, self.stage_axis) for leaf in tree_leaves(stages)]
        return [(leaf, axis if leaf.ndim > 1 else None) for leaf, axis in axes]


def whole(model: nn.Module) -> Callable[[Tensor], Any]:
    """The model as a function of whole signals: LIFExodus keeps state between calls."""
    if isinstance(model, LIFExodus):
        return lambda x: model.stream(x)[0]
    return model


def in_chunks(case: Case, model: nn.Module, x: Tensor, cuts: list[int]) -> list[Tensor]:
    """Outputs and stages of the chunks between the cuts, put together again."""
    axis, state, parts = case.input_axis, None, []
    edges = [0, *sorted(cuts), x.shape[axis]]
    for i, (begin, end) in enumerate(pairwise(edges)):
        ending = {} if isinstance(model, LIFExodus) else {"last": i == len(cuts)}
        out, state = model.stream(x.narrow(axis, begin, end - begin), state, **ending)
        parts.append(case.traces(out))
    return [
        pieces[-1][0] if pieces[0][1] is None else torch.cat([t for t, _ in pieces], pieces[0][1])
        for pieces in zip(*parts, strict=True)
    ]


def leaves(result: Any) -> list[Tensor]:
    """All tensors of a result."""
    return tree_leaves(result)


def use_plain_loops(model: nn.Module) -> nn.Module:
    """The same model on the reference backend."""
    for stage in model.modules():
        if hasattr(stage, "backend"):
            stage.backend = "reference"
    return model


def _osses(**options: Any) -> Osses2021:
    ears = {"headphone_kwargs": _SHORT_EARS, "middleear_kwargs": _SHORT_EARS}
    return Osses2021(FS, *_RANGE, **ears, **options)


def _king(**options: Any) -> King2019:
    return King2019(FS, basef=1000.0, **options)


def _king_resampled(**options: Any) -> King2019:
    other = {"compression_type": "power", "lp_150hz": True, "subfs": 1000.0}
    return _king(phase_insens="none", **other, **options)


def _paulick(**options: Any) -> Paulick2024:
    return Paulick2024(FS, *_RANGE, 3, outerear_kwargs=_SHORT_EARS, **options)


CASES = {
    "dau1997": Case(
        Dau1997,
        lambda **options: Dau1997(FS, *_RANGE, **options),
        (1500,),
        ("fs=16000", "num_channels=10", "preset=dau1997", "n=4", "limit=10"),
    ),
    "osses2021": Case(
        Osses2021,
        _osses,
        (1500,),
        ("phase_type=amt", "order=64", "preset=osses2021", "limit=5", "lopezpoveda2001"),
    ),
    "king2019_none": Case(
        King2019,
        lambda **options: _king(phase_insens="none", **options),
        (1500,),
        ("num_channels=5", "compression_type=brokenstick", "knee_db=30", "phase_insens=none"),
        output_axis=1,
    ),
    "king2019_resampled": Case(
        King2019,
        _king_resampled,
        (1500,),
        ("compression_type=power", "fs_out=1000", "down=16"),
        output_axis=1,
    ),
    "king2019_hilbert": Case(
        King2019,
        _king,
        (1500,),
        ("num_channels=5", "phase_insens=hilbert"),
        output_axis=1,
        streams=False,
        exact=False,
    ),
    "paulick2024": Case(
        Paulick2024,
        _paulick,
        (1500,),
        ("num_channels=3", "model=paulick2024", "subject=NH", "use_outerear=True"),
        rms=0.2,
    ),
    "jepsen2008": Case(
        Paulick2024,
        lambda **options: _paulick(model="jepsen2008", **options),
        (1500,),
        ("num_channels=3", "model=jepsen2008", "gain_db=50", "relanoiborra2019"),
        rms=0.2,
    ),
    "moore2016": Case(
        Moore2016,
        lambda **options: Moore2016(**options),
        (2, 9500),
        ("hop_length=32", "sigma=0.08", "attack_alpha=0.045"),
        output_axis=1,
        stage_axis=1,
        exact=False,
    ),
    "glasberg2002": Case(
        Glasberg2002,
        lambda **options: Glasberg2002(FS, **options),
        (5000,),
        ("fs=16000", "hop_length=16", "tau_attack=0.0217"),
        output_axis=1,
        stage_axis=1,
        exact=False,
    ),
    "lif_exodus": Case(
        LIFExodus,
        lambda **options: LIFExodus((6, 3), 0.01, 0.005, **options),
        (70, 6),
        ("shape=(6, 3)", "n_synapses=2", "leak_mode=taus", "dt=0.001"),
        output_axis=1,
        input_axis=-2,
        rms=0.3,
    ),
}
#: Options for tests with plain loops, where all channels take seconds: every fourth one.
FEW_CHANNELS = {
    "moore2016": {"excitation_kwargs": {"erb_step": 1.0}},
    "glasberg2002": {"erb_kwargs": {"erb_step": 1.0}},
}
