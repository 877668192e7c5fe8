"""Constants of every model and stage: one state dict for both kinds, and values in their unit."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amtcore import AdaptLoop, Dau1997, Glasberg2002, HeadphoneFilter, IHCEnvelope
from amtcore.errors import ParameterError, ShapeError
from tests.short import some

from ..compare import Tolerance, assert_close
from .constant_cases import CASES, CHAINS, FS, Case, constants, exported, move
from .loudness_golden import one_thread  # noqa: F401

SAME = Tolerance(1e-6, "the same constants", 1e-12)
CHAIN = Tolerance(1e-9, "the chain rule", 1e-12)
HOWS = ("load", "to_empty", "meta", "assign", "meta assign", "deepcopy", "pickle")
#: `make test` loads Dau1997 in every way, and every second one of the other classes in one of
#: these, in turn; of chains it loads the stages.
FEW_WAYS = ("meta assign", None, "pickle", None)


def _way(name: str, how: str) -> Any:
    turn = FEW_WAYS[list(CASES).index(name) % len(FEW_WAYS)]
    long = name != "Dau1997" and (how != turn or name in CHAINS)
    return pytest.param(name, how, marks=[pytest.mark.long] * long, id=f"{name}-{how}")


def test_every_exported_class_is_covered() -> None:
    assert exported() <= {name.split("-")[0] for name in CASES}


def _spoiled(model: nn.Module) -> nn.Module:
    """The memory of `to_empty` may hold anything; here it is NaN."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for kept in (*model.parameters(), *model.buffers()):
            kept.fill_(math.nan if kept.is_floating_point() else 0)
    return model


def _twin(case: Case, source: nn.Module, how: str, learnable: bool) -> nn.Module:
    """The constants of one model in another of either kind."""
    saved = source.state_dict()
    if "meta" in how:
        with torch.device("meta"):
            twin = case.build(learnable=learnable)
        assert all(kept.is_meta for kept in (*twin.parameters(), *twin.buffers()))
    else:
        twin = case.build(learnable=learnable)
    if how in ("to_empty", "meta"):
        _spoiled(twin)
    result = twin.load_state_dict(saved, strict=True, assign="assign" in how)
    assert not result.missing_keys and not result.unexpected_keys
    if how == "deepcopy":
        return copy.deepcopy(twin)
    return pickle.loads(pickle.dumps(twin)) if how == "pickle" else twin


@pytest.mark.parametrize(("name", "how"), [_way(name, how) for name in CASES for how in HOWS])
def test_one_kind_loads_what_the_other_saved(name: str, how: str) -> None:
    case = CASES[name]
    learnt, fresh = case.build(learnable=True), case.build(learnable=False)
    move(learnt)
    with torch.no_grad():
        expected = case.outputs(learnt)
        fixed = _twin(case, learnt, how, learnable=False)
        again = _twin(case, fixed, how, learnable=True)
        for twin in (fixed, again):
            for got, wanted in zip(case.outputs(twin), expected, strict=True):
                assert_close(got, wanted, SAME, name)
        assert list(fixed.state_dict()) == list(fresh.state_dict())
        assert set(again.state_dict()) == set(fresh.state_dict())
        if list(learnt.parameters()):  # else nothing was moved
            unmoved = case.outputs(fresh)
            assert not all(torch.equal(a, b) for a, b in zip(unmoved, expected, strict=True))
    assert [p.requires_grad for p in again.parameters()] == [True] * len(list(learnt.parameters()))
    assert not list(fixed.parameters())


@pytest.mark.parametrize("name", some(3, CASES))
def test_both_kinds_are_alike_before_any_learning(name: str) -> None:
    case = CASES[name]
    fixed, learnable = case.build(learnable=False), case.build(learnable=True)
    for key, value in fixed.state_dict().items():
        assert torch.equal(learnable.state_dict()[key], value), key
    with torch.no_grad():
        for a, b in zip(case.outputs(learnable), case.outputs(fixed), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", some(3, CASES, 1))
def test_values_are_set_in_their_unit_in_either_kind(name: str) -> None:
    """By assignment; a fixed one also in place, which tables must follow."""
    case = CASES[name]
    learnable, fixed, edited = (case.build(learnable=kind) for kind in (True, False, False))
    for key, stage, constant in constants(learnable):
        owner, _, _ = key.rpartition(".")
        value = 0.98 * getattr(stage, constant).detach()
        parameter = getattr(stage, f"{constant}_raw")
        setattr(stage, constant, value)
        assert torch.equal(getattr(stage, constant), value), key
        assert getattr(stage, f"{constant}_raw") is parameter and parameter.grad is None
        setattr(fixed.get_submodule(owner), constant, value.tolist())
        edited.get_buffer(key).mul_(0.98)
        assert torch.equal(fixed.get_buffer(key), value) and torch.equal(
            edited.get_buffer(key), value
        )
    with torch.no_grad():
        expected = case.outputs(learnable)
        for other in (fixed, edited):
            for a, b in zip(case.outputs(other), expected, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("name", some(3, CASES, 2))
def test_gradients_in_the_unit_of_every_constant(name: str) -> None:
    """What the parameters get is the gradient by the value times the slope of the value."""
    case = CASES[name]
    model = case.build(learnable=True, dtype=torch.float64)
    values = {key: getattr(s, c).detach().requires_grad_() for key, s, c in constants(model)}

    def loss(outputs: list[Tensor]) -> Tensor:
        return sum((y.square().sum() for y in outputs), torch.zeros(()))

    raw = [model.get_parameter(f"{key}_raw") for key in values]
    if not raw:
        return
    learnt = torch.autograd.grad(loss(case.outputs(model)), raw, allow_unused=True)
    by_value = torch.autograd.grad(
        loss(case.outputs(_Given(model, values))), list(values.values()), allow_unused=True
    )
    for (key, stage, constant), parameter, got, of_value in zip(
        constants(model), raw, learnt, by_value, strict=True
    ):
        assert (got is None) == (of_value is None), key
        if got is not None:
            (expected,) = torch.autograd.grad(getattr(stage, constant), parameter, of_value)
            assert_close(got, expected, CHAIN, key)
            parameter.grad = got
            inside = expected != 0  # what starts on a bound stays there
            assert_close(getattr(stage, constant).grad[inside], of_value[inside], CHAIN, key)


class _Given(nn.Module):
    """A model that is called with other constants, by their names in the state dict."""

    def __init__(self, model: nn.Module, values: dict[str, Tensor]) -> None:
        super().__init__()
        self.dtype = model.dtype
        self._call = lambda *x: torch.func.functional_call(model, values, x)

    def forward(self, *x: Tensor) -> Any:
        return self._call(*x)


@pytest.mark.parametrize("learnable", [False, True], ids=["fixed", "learnable"])
def test_values_out_of_bounds_are_refused_wherever_they_come_from(learnable: bool) -> None:
    stage = AdaptLoop(FS, learnable=learnable)
    before = stage.tau.clone()
    for wrong, error, message in (
        (-0.1, ParameterError, "tau must lie between 6.25e-05 and 1000, got -0.1"),
        (math.nan, ParameterError, "tau must lie .* got nan"),
        ([0.1, 0.2], ShapeError, r"tau must have shape \(5,\) or be one number, got \(2,\)"),
    ):
        with pytest.raises(error, match=message):
            stage.tau = wrong
    with pytest.raises(RuntimeError, match=r"tau must lie between 6\.25e-05 and 1000, got 0"):
        stage.load_state_dict(stage.state_dict() | {"tau": torch.zeros(5)})
    with pytest.raises(RuntimeError, match="size mismatch for tau"):
        stage.load_state_dict(stage.state_dict() | {"tau": torch.ones(4)})
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "tau"'):
        stage.load_state_dict({k: v for k, v in stage.state_dict().items() if k != "tau"})
    assert torch.equal(stage.tau, before)
    hair_cell = IHCEnvelope(FS, learnable=learnable)
    with pytest.raises(ParameterError, match="a must be the denominator of a stable filter"):
        hair_cell.a = [1.0, -1.01]
    with pytest.raises(RuntimeError, match=r"limit must lie between 1 and 1e\+06, got 0"):
        stage.load_state_dict(AdaptLoop(FS, limit=0).state_dict())


def test_a_filter_saved_with_its_taps_is_loaded() -> None:
    """Earlier versions saved what follows from the constants."""
    stage = HeadphoneFilter(FS, order=8)
    stage.load_state_dict(stage.state_dict() | {"taps": torch.zeros(9)})
    assert stage.fir_coeffs.any()


def test_precision_follows_conversions() -> None:
    """A learnt double keeps in float what float can hold, however it is parametrised."""
    model = Dau1997(FS, 400.0, 700.0, learnable=True, dtype=torch.float64)
    move(model)
    wanted = {key: value.float() for key, value in model.state_dict().items()}
    for key, value in model.float().state_dict().items():
        assert torch.equal(value, wanted[key]), key


def test_frozen_and_exchanged_constants_change_the_tables() -> None:
    """Tables are kept while nothing can change them, and made in the graph where something can."""
    model = Glasberg2002(FS, learnable=True)
    stage = model.erb_integration
    x = torch.full((1, 1, len(stage.frequencies)), 1e4)
    stage.bandwidth_scale_raw.requires_grad_(False)
    first = stage(x)
    with torch.no_grad():
        stage.bandwidth_scale_raw += 0.1
    second = stage(x)
    assert not torch.equal(second, first)
    third = torch.func.functional_call(stage, {"bandwidth_scale": torch.tensor(1.3)}, (x,))
    assert not torch.equal(third, second) and torch.equal(stage(x), second)
    other = torch.tensor(1.3, requires_grad=True)
    fixed = Glasberg2002(FS).erb_integration
    y = torch.func.functional_call(fixed, {"bandwidth_scale": other}, (x,))
    (gradient,) = torch.autograd.grad(y.sum(), other)
    assert gradient.abs() > 0
    assert torch.equal(fixed(x), Glasberg2002(FS).erb_integration(x))


@pytest.mark.parametrize("name", ["Dau1997", "Paulick2024", "Glasberg2002", "King2019-resampled"])
def test_saved_on_disk_as_weights_only(name: str, tmp_path: Any) -> None:
    case = CASES[name]
    model, twin = case.build(learnable=True), case.build()
    move(model)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    twin.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    with torch.no_grad():
        for a, b in zip(case.outputs(twin), case.outputs(model), strict=True):
            assert_close(a, b, SAME)
