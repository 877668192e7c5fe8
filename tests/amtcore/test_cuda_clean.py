"""Every class on CUDA tensors: forward, in chunks and backward, nothing makes the CPU wait.

No GPU is needed: see `device_watch`. What the kernels compute there is tested elsewhere.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amtcore import GammatoneFilterbank
from amtcore.errors import WrongDeviceError
from amtcore.kernels import operators
from amtcore.stages import stage
from tests.short import some

from ..short import only
from .compiling import one_graph
from .constant_cases import CASES, CHAINS, FS
from .device_watch import CUDA, DIFFERENTIABLE, AbsentDevice, tensors
from .model_cases import whole

#: Classes that say themselves that they need whole signals.
_WHOLE_SIGNALS = {"King2019ModulationFilterbank", "FastKing2019ModulationFilterbank", "King2019",
                  "IHCEnvelope-bernstein"}  # fmt: skip
STREAMING = sorted(
    name
    for name, case in CASES.items()
    if hasattr(case.kind, "stream") and name not in _WHOLE_SIGNALS
)


_CHOOSE, _IN_AUTOCAST = operators.use_reference, stage.in_autocast


def _use_reference(x: Tensor, backend: str | None) -> bool:
    return False if x.device.type == DIFFERENTIABLE else _CHOOSE(x, backend)


def _in_autocast(x: Tensor) -> bool:
    return False if x.device.type == DIFFERENTIABLE else _IN_AUTOCAST(x)


@functools.cache
def _importers(name: str, function: Any) -> list[ModuleType]:
    """Modules that have a function, or have imported it."""
    ours = (each for each in list(sys.modules.values()) if each.__name__.startswith("amtcore"))
    return [each for each in ours if getattr(each, name, None) is function]


@pytest.fixture
def lazy_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' operators on the device that autograd serves, and no autocast there."""
    for name, function, ours in (
        ("use_reference", _CHOOSE, _use_reference),
        ("in_autocast", _IN_AUTOCAST, _in_autocast),
    ):
        for module in _importers(name, function):
            monkeypatch.setattr(module, name, ours)


pytestmark = pytest.mark.usefixtures("lazy_kernels")


#: Their first frame comes after half a window of 2048 samples or more.
_LONG = {"Moore2016": 4, "Glasberg2002": 8}


@functools.cache
def _built(name: str, dtype: torch.dtype, learnable: bool) -> nn.Module:
    return CASES[name].build(dtype=dtype, learnable=learnable)


def _on(
    device: AbsentDevice, name: str, dtype: torch.dtype, learnable: bool = False
) -> tuple[Any, list[Tensor]]:
    """A case's module and inputs on a device."""
    case, module = CASES[name], _built(name, dtype, learnable)
    longer = [x.repeat_interleave(_LONG.get(name, 1), -1) for x in case.inputs]
    return device.take(module), [device.like(x, dtype, learnable) for x in longer]


@pytest.mark.parametrize("name", some(3, CASES, 1))
def test_a_whole_signal(name: str) -> None:
    device = AbsentDevice(CUDA)
    module, inputs = _on(device, name, torch.float32)
    with device.watching(), torch.no_grad():
        made = tensors(whole(module)(*inputs))
    assert made
    assert {y.device.type for y in made} == {CUDA}


@pytest.mark.parametrize("name", some(3, STREAMING))
def test_chunk_after_chunk_in_double(name: str) -> None:
    device = AbsentDevice(CUDA)
    module, inputs = _on(device, name, torch.float64)
    with device.watching(), torch.no_grad():
        first, state = module.stream(*inputs)
        second, state = module.stream(*inputs, state)
    made = tensors((first, second, state))
    assert {(y.device.type, y.dtype) for y in made} == {(CUDA, torch.float64)}


@pytest.mark.parametrize("name", only({*list(CASES)[4::6]} - {*CHAINS, "Glasberg2002"}, CASES))
def test_gradients_of_signals_and_constants(name: str) -> None:
    device = AbsentDevice(DIFFERENTIABLE)
    module, inputs = _on(device, name, torch.float32, learnable=True)
    with device.watching():
        for _ in range(2):  # the second finds gradients, and says what they are by each constant
            _loss(whole(module)(*inputs)).backward()
    gradients = [x.grad for x in (*module.parameters(), *inputs)]
    assert all(g is not None and g.device.type == DIFFERENTIABLE for g in gradients)


def _loss(result: Any) -> Tensor:
    return torch.stack([y.sum() for y in tensors(result) if y.requires_grad]).sum()


@pytest.mark.parametrize("name", ["HeadphoneFilter", "ExcitationPattern", "ERBIntegration"])
def test_tables_that_follow_learnt_constants_are_made_there(name: str) -> None:
    device = AbsentDevice(DIFFERENTIABLE)
    module, inputs = _on(device, name, torch.float32, learnable=True)
    optimizer = torch.optim.SGD(module.parameters(), 1e-3)
    with device.watching():
        for _ in range(2):
            optimizer.zero_grad()
            _loss(module(*inputs)).backward()
            optimizer.step()


@pytest.mark.parametrize("name", ["HeadphoneFilter", "MiddleEarFilter", "OuterMiddleEarFilter"])
def test_a_filter_that_was_moved_is_not_designed_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it has the same taps on every device: also a gain in dB is a power that each rounds its
    own way."""
    device = AbsentDevice(CUDA)
    module, inputs = _on(device, name, torch.float32)
    monkeypatch.delattr(CASES[name].kind, "design")
    with device.watching():
        assert module(*inputs).device.type == CUDA
        assert module.applied_taps() is module.applied_taps()


@pytest.mark.parametrize("kind", only([CUDA], [CUDA, DIFFERENTIABLE]))
def test_decisions(kind: str) -> None:
    device = AbsentDevice(kind)
    model, (x,) = _on(device, "Paulick2024", torch.float32)
    noise = device.like(torch.zeros(x.shape), torch.float32)
    with device.watching(), torch.no_grad():
        answer = model.detection_task(x, noise, threshold=1.0)
        weights = torch.ones(model.num_channels, device=kind)
        region = model.roi_selection(model(x), channel_range=(0, model.num_channels))
        variable = model.compute_decision_variable(region, channel_weights=weights)
        correlation = model.template_correlation(region, region)
    assert {y.device.type for y in (answer, variable, correlation)} == {kind}


@pytest.mark.parametrize("name", only(["Glasberg2002"], ["Moore2016", "Glasberg2002"]))
def test_loudness_level(name: str) -> None:
    device = AbsentDevice(CUDA)
    model, _ = _on(device, name, torch.float32)
    sone = device.like(torch.zeros(2, 5), torch.float32)
    with device.watching():
        assert model.compute_loudness_level(sone).device.type == CUDA


@pytest.mark.parametrize("name", ["HeadphoneFilter", "MiddleEarFilter", "OuterMiddleEarFilter"])
def test_responses(name: str) -> None:
    device = AbsentDevice(CUDA)
    stage, _ = _on(device, name, torch.float32)
    with device.watching():
        assert {y.device.type for y in stage.get_frequency_response(256)} == {CUDA}


@pytest.mark.parametrize("name", ["Dau1997", "Moore2016", "LIFExodus"])
def test_one_graph(name: str) -> None:
    """Compiled for the device, the whole model without a break."""
    device = AbsentDevice(CUDA)
    module, inputs = _on(device, name, torch.float32)
    with device.watching(), torch.no_grad():
        made = one_graph(whole(module), "eager")(*inputs)
    assert {y.device.type for y in tensors(made)} == {CUDA}


PLANTED: dict[str, Callable[[Tensor], Any]] = {
    "a number": lambda x: x.sum().item(),
    "a branch": lambda x: bool((x > 0).any()),
    "a list": lambda x: x.tolist(),
    "a copy to the CPU": lambda x: x.cpu(),
    "a constant from the CPU": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "a table on the CPU": lambda x: x + torch.arange(4.0),
    "an index on the CPU": lambda x: x[[0, 1]],
    "a shape by values": lambda x: x[x > 0],
    "an inverse": lambda x: torch.linalg.inv(x.expand(4, 4)),
    "a pseudoinverse": lambda x: torch.linalg.pinv(x.expand(4, 4)),
}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
@pytest.mark.parametrize("kind", [CUDA, DIFFERENTIABLE])
def test_what_waits_or_mixes_devices_raises(kind: str, plant: Callable[[Tensor], Any]) -> None:
    device = AbsentDevice(kind)
    x = device.like(torch.zeros(4), torch.float32)
    with device.watching(), pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        plant(x)


@pytest.mark.parametrize("name", [name for name in CASES if "-" not in name])
def test_a_tensor_elsewhere_is_refused_in_our_words(name: str) -> None:
    device = AbsentDevice(CUDA)
    module, inputs = _on(device, name, torch.float32)
    here = [torch.empty(x.shape, device="meta") for x in inputs]
    with pytest.raises(
        WrongDeviceError, match=r"expected a tensor on 'cuda:0'.* got one on 'meta'; move"
    ):
        whole(module)(*here)


def test_a_state_elsewhere_is_refused_in_our_words() -> None:
    device = AbsentDevice(CUDA)
    bank = device.take(GammatoneFilterbank([500.0, 1000.0], FS))
    x = device.like(torch.zeros(1, 300), torch.float32)
    with pytest.raises(
        WrongDeviceError, match=r"expected a state on 'cuda:0'.* got one on 'cpu'; move"
    ):
        bank.stream(x, torch.zeros(1, 2, 8))
