"""Hooks of stages fire in every model, and a stage may be any module of the same shapes.

Whole signals call every stage as a module, chunks where there are hooks. What cannot, says so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amtcore.errors import ParameterError
from amtcore.models.composition import defines, require_streamable
from amtcore.stages import IHCEnvelope
from amtcore.torch_internals import has_any_hooks, has_hooks
from tests.short import some

from ..compare import Tolerance, assert_close
from .model_cases import CASES, leaves

NAMES = [name for name in CASES if name != "lif_exodus"]
LOUDNESS = ("moore2016", "glasberg2002")
STREAMING = [name for name in NAMES if CASES[name].streams and name not in LOUDNESS]
#: Whole signals and blocks of them sum in another order.
BY_BLOCKS = Tolerance(2e-5, "transforms and products of other sizes", 1e-6)


@cache
def _built(name: str, **options: Any) -> nn.Module:
    return CASES[name].build(**options)


def _model(name: str, **options: Any) -> Any:
    """A model of one's own to change."""
    return copy.deepcopy(_built(name, **options))


def _signal(name: str) -> Tensor:
    return CASES[name].signal(1, samples=1200)


def _called(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module below the model that has a `forward` to call."""
    return [(name, module) for name, module in model.named_modules() if name]


class _Same(nn.Module):
    """A module of nobody's that computes what a stage computes, and counts its calls."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self._stage = [stage]  # not a submodule
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, *args: Tensor) -> Any:
        out = self._stage[0](*args)
        return torch.utils._pytree.tree_map(lambda y: self.gain * y, out)


@pytest.mark.parametrize("name", NAMES)
def test_hooks_of_every_stage_fire(name: str) -> None:
    """Before and after the call and in the gradient, once each; outputs stay what they are."""
    model, x = _model(name, learnable=True), _signal(name)
    expected = leaves(model(x))
    fired: list[tuple[str, str]] = []

    def note(kind: str, where: str) -> Callable[..., None]:
        return lambda *_: fired.append((kind, where))

    modules = _called(model)
    for where, module in modules:
        module.register_forward_pre_hook(note("before", where))
        module.register_forward_hook(note("after", where))
        module.register_full_backward_hook(note("gradient", where))
        module.register_full_backward_pre_hook(note("before gradient", where))
    outputs = leaves(model(x.requires_grad_()))
    sum(y.square().sum() for y in outputs if y.requires_grad).backward()
    wanted = {(kind, where) for where, _ in modules
              for kind in ("before", "after", "gradient", "before gradient")}  # fmt: skip
    assert set(fired) == wanted and len(fired) == len(wanted)
    for got, want in zip(outputs, expected, strict=True):
        assert_close(got.detach(), want.detach(), BY_BLOCKS)


@pytest.mark.parametrize("name", NAMES)
def test_hooks_change_what_follows(name: str) -> None:
    model, x = _model(name), _signal(name)
    before = leaves(model(x))
    first = next(iter(model.children()))
    handle = first.register_forward_hook(lambda module, args, out: 0.5 * out)
    during = leaves(model(x))
    handle.remove()
    assert any(not torch.equal(got, other) for got, other in zip(during, before, strict=True))
    after = leaves(model(x))
    assert all(torch.equal(got, other) for got, other in zip(after, before, strict=True))


@pytest.mark.parametrize("name", STREAMING)
def test_hooks_fire_for_every_chunk(name: str) -> None:
    """They see the output of the chunk, not its state, and may replace it."""
    model, x = _model(name), CASES[name].signal(1, samples=900)
    plain, state = model.stream(x[:, :500])
    rest, _ = model.stream(x[:, 500:], state, last=True)
    seen: dict[str, list[Any]] = {}
    for where, module in _called(model):
        module.register_forward_hook(
            lambda module, args, out, where=where: seen.setdefault(where, []).append(out)
        )
    first, state = model.stream(x[:, :500])
    second, _ = model.stream(x[:, 500:], state, last=True)
    assert {where: len(calls) for where, calls in seen.items()} == {
        where: 2 for where, _ in _called(model)
    }
    for got, want in zip(leaves((first, second)), leaves((plain, rest)), strict=True):
        assert torch.equal(got, want)
    next(iter(model.children())).register_forward_hook(lambda module, args, out: 0 * out)
    silent, _ = model.stream(0 * x[:, :500])
    again, _ = model.stream(x[:, :500])
    assert all(torch.equal(a, b) for a, b in zip(leaves(silent), leaves(again), strict=True))


@pytest.mark.parametrize("name", LOUDNESS)
def test_blocks_and_hooks_do_not_go_together(name: str) -> None:
    model, x = _model(name), _signal(name)
    handle = model.specific_loudness.register_forward_hook(lambda *_: None)
    with pytest.raises(ParameterError, match=r"specific_loudness has hooks.*call the model itself"):
        model.stream(x)
    handle.remove()
    model.stream(x)


@pytest.mark.parametrize("name", NAMES)
def test_hooks_of_all_modules_fire(name: str) -> None:
    model, x, fired = _model(name), _signal(name), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: fired.append(m))
    try:
        model(x)
    finally:
        handle.remove()
    assert {id(m) for m in fired} >= {id(m) for _, m in _called(model)}


@pytest.mark.parametrize(
    ("name", "stage"),
    some(4, [(name, stage) for name in NAMES for stage, _ in _built(name).named_children()]),
)
def test_a_stage_can_be_any_module_of_its_shapes(name: str, stage: str) -> None:
    """Whole signals with gradients; no chunks, and no kernels, which say so."""
    model, x = _model(name, return_stages=True), _signal(name)
    expected = leaves(model(x))
    other = _Same(copy.deepcopy(getattr(model, stage)))
    setattr(model, stage, other)
    outputs = leaves(model(x))
    for got, want in zip(outputs, expected, strict=True):
        assert_close(got.detach(), want, BY_BLOCKS)
    sum(y.square().sum() for y in outputs if y.requires_grad).backward()
    assert other.gain.grad is not None and float(other.gain.grad) != 0.0
    assert repr(model)
    with pytest.raises(ParameterError, match=rf"{stage}.*_Same.*call the model itself"):
        model.stream(x)
    if name not in LOUDNESS:
        with pytest.raises(ParameterError, match=rf"{stage} is a _Same, which has no kernel"):
            model.chain("modulation")


def test_features_of_a_changed_model_are_refused() -> None:
    model = _model("dau1997")
    handle = model.ihc.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(ParameterError, match=r"Dau1997.ihc has hooks, which kernels do not run"):
        model.chain("modulation")
    handle.remove()
    assert model.chain("modulation")[0]


def test_an_ear_inside_a_sequence_can_be_any_module() -> None:
    model, x = _model("paulick2024"), _signal("paulick2024")
    model.outer_middle_ear.headphone = nn.Identity()
    assert leaves(model(x))
    with pytest.raises(ParameterError, match="'headphone' is a Identity without stream"):
        model.stream(x)
    with pytest.raises(ParameterError, match="'headphone' is a Identity without stream"):
        model.front_end()


class _Louder(IHCEnvelope):
    """One of ours with another computation."""

    def _run(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y, state = super()._run(x, state)
        return 2.0 * y, state


class _Called(IHCEnvelope):
    """One of ours that is only right when called."""

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


def test_a_stage_derived_from_ours_is_not_replaced_by_its_parent() -> None:
    """Kernels know the parent only; chunks go through what the child defines."""
    x = _signal("dau1997")
    for kind in (_Louder, _Called):
        model = _model("dau1997")
        envelope = model.ihc(x.unsqueeze(1))
        model.ihc = kind(model.fs)
        assert torch.equal(model.ihc(x.unsqueeze(1)), 2.0 * envelope)
        with pytest.raises(ParameterError, match="which has no kernel"):
            model.chain("envelope")
    with pytest.raises(ParameterError, match="_Called without stream"):
        model.stream(x)
    model.ihc = _Louder(model.fs)
    whole = model(x)
    first, state = model.stream(x[:, :700])
    second, _ = model.stream(x[:, 700:], state)
    for a, b, both in zip(first, second, whole, strict=True):
        assert torch.equal(torch.cat((a, b), -1), both)


def test_the_guards() -> None:
    stage = IHCEnvelope(16000)
    assert not defines(stage, ("forward",)) and not has_hooks(stage) and not has_any_hooks(stage)
    assert defines(nn.Identity(), ("forward",), ("stream",))
    assert defines(_Louder(16000), ("_run",), ("block_ops",))
    assert not defines(_Louder(16000), ("_run",), ("_run",))
    require_streamable("ihc", _Louder(16000))
    handle = stage.register_full_backward_hook(lambda *_: None)
    assert has_hooks(nn.Sequential(stage)) and has_any_hooks(stage)
    handle.remove()
    assert not has_hooks(stage)
