"""Every model and stage in torch's modes: inference mode, no gradients, export, TorchScript."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import amtcore
from amtcore.errors import TracingError
from tests.short import some

from ..compare import Tolerance, assert_close
from ..short import only
from . import constant_cases, model_cases
from .model_cases import leaves

#: Exported loudness models take the whole signal at once, the others the same kernels.
EXPORTED = Tolerance(1e-5, "single-precision sums over other stretches", 1e-9)
#: Stages whose second-to-last axis is time.
_FRAMES = (
    "ERBIntegration", "ExcitationPattern", "Moore2016ExcitationPattern", "SpecificLoudness",
    "Moore2016SpecificLoudness", "LoudnessIntegration", "Moore2016AGC",
    "Moore2016TemporalIntegration", "Moore2016BinauralLoudness", "LIFExodus",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One module, what it is called with, and which axis of that is time."""

    build: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    time: int = -1

    def fresh(self, **options: Any) -> Any:
        """The module, at rest."""
        return self.build(**options)

    def signals(self, batch: int = 1, extra: int = 0) -> tuple[Tensor, ...]:
        """Inputs of their own memory, repeated over the batch and lengthened."""
        longer = (
            torch.cat((x, x.narrow(self.time, 0, extra)), self.time) if extra else x.clone()
            for x in self.inputs
        )
        return tuple(x.repeat(batch, *[1] * (x.ndim - 1)) for x in longer)


CASES = {
    name: Case(case.build, case.inputs, -2 if name.split("-")[0] in _FRAMES else -1)
    for name, case in constant_cases.CASES.items()
} | {
    f"model-{name}": Case(case.build, (case.signal(1),), case.input_axis)
    for name, case in model_cases.CASES.items()
}
MODELS = [name for name in CASES if name.startswith("model-")]
#: Models with all of their channels are exported where these decide which kernels run.
_LOUDNESS = ("model-moore2016", "model-glasberg2002")


def _learnable(name: str) -> Any:
    return CASES[name].fresh(**({} if name == "Resampler" else {"learnable": True}))


def _backward(module: nn.Module, signals: tuple[Tensor, ...]) -> None:
    made = leaves(module(*(x.requires_grad_() for x in signals)))
    sum(y.sum() for y in made if y.requires_grad).backward()  # type: ignore[union-attr]
    assert all(x.grad is not None for x in signals)


# --- inference mode ---


@pytest.mark.parametrize("name", some(4, CASES))
def test_inference_mode_gives_what_no_grad_gives(name: str) -> None:
    """In the first call as in later ones."""
    case = CASES[name]
    with torch.no_grad():
        expected = leaves(case.fresh()(*case.signals(2)))
    with torch.inference_mode():
        module = case.fresh()
        for _ in range(1 if "LIF" in name or "lif" in name else 2):
            for got, wanted in zip(leaves(module(*case.signals(2))), expected, strict=True):
                assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", some(4, CASES, 2))
def test_gradients_after_inference_mode(name: str) -> None:
    """Tables and states that a call in inference mode made do not stay behind as its tensors."""
    case, module = CASES[name], _learnable(name)
    other = CASES[name].fresh()
    with torch.inference_mode():
        built_inside = case.fresh()
        for each in (module, other):
            each(*case.signals())
            each.double()
            each.float()
    for each in (module, other, built_inside):
        _backward(each, case.signals())
        kept = [*each.parameters(), *each.buffers()]
        assert not any(tensor.is_inference() for tensor in kept)


@pytest.mark.parametrize("name", ["AdaptLoop", "HeadphoneFilter", "ExcitationPattern"])
def test_constants_set_in_inference_mode_are_followed(name: str) -> None:
    case, module, other = CASES[name], _learnable(name), _learnable(name)
    constant = module.learnt[0]
    value = getattr(module, constant).detach() * 1.01
    with torch.inference_mode():
        setattr(module, constant, value)
        module(*case.signals())
    setattr(other, constant, value)
    _backward(module, case.signals())
    for got, wanted in zip(
        leaves(module(*case.signals())), leaves(other(*case.signals())), strict=True
    ):
        assert torch.equal(got, wanted)


# --- export ---

# Learnable modules that are exported in the short version as well.
_SHORT = ("Dau1997", "HeadphoneFilter")
# One of each family of kernels, exported in the short version. Dau1997 exports the kernels of its
# stages.
_EXPORTED = (
    "BrokenStickCompression", "ButterworthFilter", "Resampler", "IHCPaulick2024",
    "ExcitationPattern", "Moore2016AGC", "Dau1997", "LIFExodus", "HeadphoneFilter",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "learnable"),
    [
        *(
            pytest.param(name, learnable, marks=pytest.mark.long if slow else ())
            for name in (*constant_cases.CASES, *_LOUDNESS)
            for learnable, slow in ((False, name not in _EXPORTED), (True, name not in _SHORT))
            if not (learnable and name in _LOUDNESS)
        ),
    ],
)
def test_exported_programs_take_any_length_and_batch(name: str, learnable: bool) -> None:
    """One export with a dynamic batch and a dynamic time axis; of learnable modules with
    gradients, where other operators run."""
    case, module = CASES[name], _learnable(name) if learnable else CASES[name].fresh()
    batch = Dim("batch", min=2, max=64)
    time = Dim("time", min=2 if name in _FRAMES else 40, max=10**6)
    axes = tuple({0: batch, x.ndim + case.time: time} for x in case.inputs)
    with torch.set_grad_enabled(learnable):
        program = torch.export.export(
            module, case.signals(3), dynamic_shapes=axes, strict=False
        ).module()
        length = case.inputs[0].shape[case.time]
        for items, extra in ((3, 0), (2, 1), (5, length // 2)):
            signals = case.signals(items, extra)
            expected = leaves(CASES[name].fresh()(*signals))
            for got, wanted in zip(leaves(program(*signals)), expected, strict=True):
                assert got.shape == wanted.shape
                assert_close(got.detach(), wanted.detach(), EXPORTED, name)


@pytest.mark.parametrize("fs_out", only([66150], [1000, 16000, 66150]))
def test_an_exported_resampler_of_any_ratio_takes_any_length(fs_out: int) -> None:
    stage = amtcore.Resampler(44100, fs_out)
    x = torch.randn(3, 2, 5003, generator=torch.Generator().manual_seed(0))
    axes = ({0: Dim("batch", min=2, max=64), 2: Dim("time", min=1000, max=10**6)},)
    program = torch.export.export(stage, (x,), dynamic_shapes=axes, strict=False).module()
    for each in (x, x[:2, :, :1001].clone(), x.repeat(1, 1, 2)):
        assert torch.equal(program(each), stage(each))


@pytest.mark.parametrize("name", only(["model-lif_exodus"], MODELS))  # Dau1997 is exported above
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.long)])
def test_exported_models_of_one_length_with_gradients(name: str, strict: bool) -> None:
    case = CASES[name]
    module = _learnable(name)
    program = torch.export.export(module, case.signals(), strict=strict).module()
    expected = leaves(CASES[name].fresh()(*case.signals()))
    for got, wanted in zip(leaves(program(*case.signals())), expected, strict=True):
        assert_close(got.detach(), wanted.detach(), EXPORTED, name)


def test_an_exported_layer_of_neurons_starts_from_the_state_at_the_export() -> None:
    layer, data = amtcore.LIFExodus((2, 2), 0.05, learnable=False), torch.full((1, 40, 2), 0.3)
    layer(data)
    kept = layer.state()
    program = torch.export.export(layer, (data,), strict=False).module()
    assert all(torch.equal(kept[name], now) for name, now in layer.state().items())
    first, second = program(data), program(data)
    assert torch.equal(first, second) and torch.equal(first, layer(data))


@pytest.mark.long  # test_lif_layer.py compiles a layer with gradients, and looks at its state
def test_compiled_code_is_not_taken_for_an_export() -> None:
    """Compiled neurons keep their state, as without a compiler."""
    layer, other = (amtcore.LIFExodus((2, 2), 0.05, learnable=False) for _ in range(2))
    data = torch.full((1, 40, 2), 0.3)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(compiled(data), other(data))
    assert all(torch.equal(kept, other.state()[name]) for name, kept in layer.state().items())
    assert other.vmem.abs().sum() > 0


# --- TorchScript ---


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", some(5, CASES, 1))
def test_torchscript_is_refused(name: str) -> None:
    """Alone, and inside of a module or a function of somebody else."""
    case, module = CASES[name], CASES[name].fresh()
    ways: list[Callable[[], Any]] = [
        lambda: torch.jit.script(module),
        lambda: torch.jit.trace(module, case.signals()),
        lambda: torch.jit.trace(lambda *x: module(*x), case.signals()),
    ]
    if len(case.inputs) == 1:
        outer = nn.Sequential(nn.Identity(), module)
        ways += [lambda: torch.jit.script(outer), lambda: torch.jit.trace(outer, case.signals())]
    for way in ways:
        with pytest.raises(TracingError, match=r"cannot be traced or scripted.*torch\.export") as e:
            way()
        assert "\n" not in str(e.value)
