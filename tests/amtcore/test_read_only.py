"""Attributes after construction: each one works like a rebuilt module, or is read-only."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from amtcore import AdaptLoop, Dau1997, IHCEnvelope, King2019, LIFExodus, Paulick2024
from amtcore.errors import AmtError, ParameterError, ReadOnlyError
from amtcore.stages.constants import Converted, HasConstants
from amtcore.stages.stage import Stage
from tests.short import some

from ..short import spread
from .constant_cases import CASES, Case
from .model_cases import use_plain_loops
from .test_arguments import FRAME_MODELS, build

#: Settings that every call reads; a test below shows each at work.
_LIVE = {"training", "backend", "return_stages"}
_LIVE_OF_NEURONS = {
    "name", "vmem", "isyn", "spikes", "learning_window", "max_spikes_per_dt", "bias", "threshold",
    "tau_mem", "tau_syn", "alpha", "beta", "dash_mem", "dash_syn",
}  # fmt: skip
#: Constants of filters whose other constants the constructor designs from them: these stay.
_ALONE = {("GammatoneFilterbank", "fc"), ("King2019ModulationFilterbank", "qfactor"),
          ("FastKing2019ModulationFilterbank", "qfactor")}  # fmt: skip


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every public attribute that is no method and no child, and not torch's own."""
    for name in sorted(set(dir(module)) - set(dir(nn.Module())) | {"training"}):
        if name.startswith("_") or name in module._modules:
            continue
        value = getattr(module, name)
        if not inspect.isroutine(value) or isinstance(vars(type(module)).get(name), property):
            yield name, value


def _other(value: Any) -> Any:
    """Another value, of the same kind where that is easy."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return value.detach() + 1 if isinstance(value, torch.Tensor) else "another"


def _assignable(module: nn.Module, name: str) -> bool:
    live = _LIVE | (_LIVE_OF_NEURONS if isinstance(module, LIFExodus) else set())
    own = module.bounded if isinstance(module, HasConstants) else ()
    return name in live or name in own or name in dict(module.named_parameters(recurse=False))


@pytest.mark.parametrize("name", some(3, CASES))
def test_every_attribute_that_is_not_live_is_read_only(name: str) -> None:
    """Checks a module and all modules inside it; refused values change no output."""
    case = CASES[name]
    model = case.build()
    before, text, refused = case.outputs(model), repr(model), 0
    for module in model.modules():
        if not isinstance(module, Converted):
            continue
        for attribute, value in _attributes(module):
            if _assignable(module, attribute):
                continue
            with pytest.raises(ReadOnlyError, match=f"{attribute} is read-only") as error:
                setattr(module, attribute, _other(value))
            assert "\n" not in str(error.value)
            refused += 1
    assert refused > 5 and repr(model) == text
    if isinstance(model, LIFExodus):
        model.reset_state()
    for got, expected in zip(case.outputs(model), before, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", FRAME_MODELS)
def test_settings_of_models_of_frames_are_read_only(name: str) -> None:
    model = build(name)
    for setting in ("dtype", "grids", *(["fs"] if hasattr(model, "fs") else [])):
        with pytest.raises(ReadOnlyError, match=f"{setting} is read-only"):
            setattr(model, setting, getattr(model, setting))


@pytest.mark.parametrize(("name", "learnable"), spread(5, CASES, [False, True]))
def test_a_constant_that_is_set_is_one_that_was_loaded_or_built(name: str, learnable: bool) -> None:
    case = CASES[name]
    model, loaded = case.build(learnable=learnable), case.build(learnable=learnable)
    for prefix, stage in model.named_modules():
        for constant in stage.bounded if isinstance(stage, HasConstants) else ():
            value = getattr(stage, constant).detach().clone()
            limit = stage.limit_of(constant)
            moved = limit.within(value.double() * 0.99)
            setattr(stage, constant, moved)
            if not torch.equal(getattr(stage, constant).detach(), moved.to(value.dtype)):
                raise AssertionError(f"{prefix}.{constant} did not take {moved}")
    loaded.load_state_dict(model.state_dict())
    for got, expected in zip(case.outputs(model), case.outputs(loaded), strict=True):
        assert torch.equal(got, expected)


def _of_constructor() -> list[tuple[str, str]]:
    found = []
    for name, case in CASES.items():
        if not issubclass(case.kind, Stage):  # a model, which takes longer to build
            continue
        stage = case.build()
        arguments = inspect.signature(type(stage)).parameters
        found += [(name, c) for c in stage.bounded if c in arguments and "LIF" not in name]
    return found


@pytest.mark.parametrize(("name", "constant"), _of_constructor())
def test_a_constant_that_is_set_is_the_argument_of_a_rebuilt_stage(
    name: str, constant: str
) -> None:
    case: Case = CASES[name]
    stage = case.build()
    value = (getattr(stage, constant).double() * 0.95).tolist()
    setattr(stage, constant, value)
    named = dict(zip(inspect.signature(type(stage)).parameters, case.arguments, strict=False))
    rebuilt = case.kind(**{**named, **case.options, constant: value})
    same = [
        torch.equal(a, b) for a, b in zip(case.outputs(stage), case.outputs(rebuilt), strict=True)
    ]
    assert all(same) is ((type(stage).__name__, constant) not in _ALONE)  # as their pages say


def test_live_settings_work() -> None:
    x = 0.05 * torch.randn(1, 300, generator=torch.Generator().manual_seed(0))
    model = Dau1997(16000, 500, 1000)
    plain = [y.clone() for y in model(x)]
    model.return_stages = True
    output, stages = model(x)
    assert list(stages) == ["filterbank", "ihc", "adaptation"]
    use_plain_loops(model)
    reference = model.ihc(stages["filterbank"])
    assert torch.equal(reference, IHCEnvelope(16000, backend="reference")(stages["filterbank"]))
    assert all(torch.equal(a, b) for a, b in zip(output, plain, strict=True))
    model.eval()
    assert not model.training


def test_the_message_says_what_to_do() -> None:
    with pytest.raises(
        ReadOnlyError, match=r"IHCEnvelope\.cutoff is read-only.*build a new IHCEnv"
    ):
        IHCEnvelope(16000).cutoff = 500.0
    with pytest.raises(ReadOnlyError, match="advance follows from the arguments"):
        Paulick2024(16000, 300, 900, 2).outer_middle_ear.headphone.advance = 3
    with pytest.raises(AttributeError):
        King2019(16000, basef=1000).dboffset = 94.0
    assert issubclass(ReadOnlyError, AmtError)


def test_stages_can_be_exchanged_added_and_taken_out() -> None:
    model = King2019(16000, basef=1000, phase_insens="none")
    assert model.lp150_filter is None
    x = 0.05 * torch.randn(1, 300, generator=torch.Generator().manual_seed(0))
    other = King2019(16000, basef=1000, phase_insens="none", lp_150hz=True)
    model.lp150_filter = other.lp150_filter
    assert torch.equal(model(x), other(x))
    model.lp150_filter = None
    assert torch.equal(model(x), King2019(16000, basef=1000, phase_insens="none")(x))


class _Counting(IHCEnvelope):
    """A class of somebody else, with attributes of its own."""

    def __init__(self) -> None:
        super().__init__(16000)
        self.calls, self.looks_ahead_by = 0, 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_attributes_of_derived_classes_stay_their_own() -> None:
    stage = _Counting()
    stage(torch.zeros(1, 2, 10))
    stage.looks_ahead_by = 4
    stage.note = "mine"
    assert stage.calls == 1
    with pytest.raises(ReadOnlyError):
        stage.cutoff = 3.0


def test_settings_of_neurons_are_checked() -> None:
    layer = LIFExodus((4, 2))
    for name, wrong in (("learning_window", -1.0), ("max_spikes_per_dt", 0.5), ("tau_mem", 0.0)):
        with pytest.raises(ParameterError, match=name):
            setattr(layer, name, wrong)
    layer.max_spikes_per_dt = 1
    assert layer(10.0 * torch.ones(1, 3, 4)).detach().max() == 1.0


def test_bounds_hold_for_what_is_set() -> None:
    with pytest.raises(ParameterError, match="must lie between"):
        AdaptLoop(16000).tau = -0.1
