"""Half precision, autocast, and signals of nothing, for every exported model and stage."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from amtcore.errors import ParameterError, ShapeError
from amtcore.features.registry import BUILT_IN, build_extractor, get_model
from tests.short import some

from ..short import spread
from .constant_cases import CASES, Case
from .loudness_golden import one_thread  # noqa: F401
from .model_cases import leaves, use_plain_loops, whole
from .test_arguments import FRAME_MODELS, build
from .test_cuda_clean import STREAMING
from .test_recurrences import CASES as RECURRENCES

HALVES = (torch.float16, torch.bfloat16)
#: Inputs with channels or neurons last: time is the axis before.
CHANNELS_LAST = ("ERB", "Excitation", "Specific", "Integration", "AGC", "Binaural", "LIF")


def _time_axis(name: str) -> int:
    return -2 if any(part in name for part in CHANNELS_LAST) else -1


def _built(case: Case) -> Any:
    return case.build(learnable=True)


def _run(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    with torch.no_grad():
        return leaves(whole(module)(*inputs))


# --- half precision ---


@pytest.mark.parametrize(("name", "kind"), spread(5, CASES, HALVES))
def test_half_modules_are_refused_and_left_as_they_were(name: str, kind: torch.dtype) -> None:
    module = _built(CASES[name])
    tensors = {**dict(module.named_buffers()), **dict(nn.Module.named_parameters(module))}
    before = {key: (tensor, tensor.clone()) for key, tensor in tensors.items()}
    convert = {torch.float16: module.half, torch.bfloat16: module.bfloat16}[kind]
    for call in (convert, lambda: module.to(kind)):
        with pytest.raises(ParameterError, match=rf"float32 or float64, got {kind}.*autocast"):
            call()
    assert module.dtype == torch.float32
    after = {**dict(module.named_buffers()), **dict(nn.Module.named_parameters(module))}
    for key, (tensor, values) in before.items():
        assert after[key] is tensor and torch.equal(tensor, values)


@pytest.mark.parametrize("name", FRAME_MODELS)
def test_models_of_frames_keep_the_type_that_they_were_built_with(name: str) -> None:
    """Their tables were converted before, and some calls failed, others gave other numbers."""
    model = build(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for kind in (*HALVES, torch.float64):
        with pytest.raises(ParameterError, match=rf"float32.*got {kind}"):
            model.to(kind)
        with pytest.raises(ParameterError, match=rf"float32.*got {kind}"):
            nn.Sequential(model).to(kind)
    model.float()
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert {key: t.dtype for key, t in model.state_dict().items()} == {
        key: t.dtype for key, t in before.items()
    }


#: For tests that only call a model of frames: the design of some takes 0.2 CPU seconds.
_frame_model = functools.cache(build)


@pytest.mark.parametrize("name", FRAME_MODELS)
@pytest.mark.parametrize(
    "wrong", [None, "clip.wav", [0.1, 0.2], np.zeros(800), *HALVES, torch.int16]
)
def test_models_of_frames_refuse_what_is_no_signal(name: str, wrong: Any) -> None:
    model = _frame_model(name)
    signal = torch.zeros(2, 800, dtype=wrong) if isinstance(wrong, torch.dtype) else wrong
    pair = (signal, signal) if name == "STOI" else (signal,)
    with pytest.raises(ShapeError, match=r"expected .*got") as error:
        model(*pair)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("name", FRAME_MODELS)
def test_models_of_frames_take_batches_of_nothing(name: str) -> None:
    model = _frame_model(name)
    for shape in ((0, 4000), (2, 0)):
        signal = torch.zeros(*shape[:-1], *model.input_channels[:1] * (model.input_channels[0] > 1),
                             shape[-1])  # fmt: skip
        made = model.outputs(signal)
        assert all(frames.shape[0] == shape[0] for frames in made.values())


@pytest.mark.parametrize("name", some(3, CASES, 1))
def test_half_input_needs_autocast(name: str) -> None:
    """There it is converted, as torch's custom_fwd has it: what is inside runs in float32."""
    kind = HALVES[len(name) % 2]
    module, inputs = _built(CASES[name]), CASES[name].inputs
    halves = tuple(x.to(kind) for x in inputs)
    with pytest.raises(ShapeError, match=rf"float32 or float64, got {kind}.*float\(\).*autocast"):
        _run(module, halves)
    expected = _run(_built(CASES[name]), tuple(x.float() for x in halves))
    with torch.autocast("cpu", torch.bfloat16):
        got = _run(module, halves)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.float32
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", some(3, CASES, 2))
def test_autocast_changes_nothing(name: str) -> None:
    """Values and gradients, bit for bit."""
    results = []
    for enabled in (False, True):
        module = _built(CASES[name])
        parameters = list(nn.Module.parameters(module))
        inputs = [x.clone().requires_grad_() for x in CASES[name].inputs]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            outputs = leaves(whole(module)(*inputs))
        loss = sum((y.square().mean() for y in outputs), torch.zeros(()))
        gradients = torch.autograd.grad(loss, [*inputs, *parameters], allow_unused=True)
        results.append([*(y.detach() for y in outputs), *(g for g in gradients if g is not None)])
    for a, b in zip(*results, strict=True):
        assert a.dtype == torch.float32
        np.testing.assert_array_equal(a, b)


# --- empty batches and empty time ---


def _cut(inputs: tuple[Tensor, ...], axis: int) -> tuple[Tensor, ...]:
    return tuple(x.narrow(axis, 0, 0) for x in inputs)


@functools.cache
def _shapes(name: str) -> list[tuple[int, ...]]:
    return [tuple(y.shape) for y in _run(_built(CASES[name]), CASES[name].inputs)]


def _plain(module: nn.Module, backend: str) -> nn.Module:
    return use_plain_loops(module) if backend == "reference" else module


@pytest.mark.parametrize(("name", "backend"), spread(5, CASES, ["kernels", "reference"]))
def test_an_empty_batch_gives_an_empty_batch(name: str, backend: str) -> None:
    module = _plain(_built(CASES[name]), backend)
    inputs = [x.requires_grad_() for x in _cut(CASES[name].inputs, 0)]
    expected = [(0, *shape[1:]) if shape[0] == 1 else shape for shape in _shapes(name)]
    if backend == "reference":  # which takes its time: no more than 5 samples
        axis = _time_axis(name)
        inputs = [x.narrow(axis, 0, min(5, x.shape[axis])).requires_grad_() for x in inputs]
        expected = []
    outputs = leaves(whole(module)(*inputs))
    assert all(y.shape[0] == 0 or y.ndim == 1 for y in outputs)
    for y, shape in zip(outputs, expected, strict=backend == "kernels"):
        assert y.shape == shape  # frequencies, which some return, have no batch
    loss = sum((y.sum() for y in outputs if y.requires_grad), torch.zeros(()))
    if loss.requires_grad:
        torch.autograd.grad(loss, [*inputs, *nn.Module.parameters(module)], allow_unused=True)


@pytest.mark.parametrize(
    ("name", "batched", "backend"), spread(7, CASES, [True, False], ["kernels", "reference"])
)
def test_empty_time_gives_empty_time(name: str, batched: bool, backend: str) -> None:
    module = _plain(_built(CASES[name]), backend)
    axis = _time_axis(name)
    inputs = _cut(CASES[name].inputs, axis)
    if not batched:
        few = (x.narrow(axis, 0, min(5, x.shape[axis])) for x in CASES[name].inputs)
        try:
            _run(module, tuple(x[0] for x in few))
        except ShapeError:
            return  # takes batches only
        inputs = tuple(x[0] for x in inputs)
    for y, shape in zip(_run(module, inputs), _shapes(name), strict=True):
        if not batched:
            shape = shape[1:] if shape[0] == 1 else shape
        same = [a == b for a, b in zip(y.shape, shape, strict=True)]
        # Without a time axis: frequencies, and Moore2016's maximum, which of nothing is 0.
        is_statistic = len(shape) <= int(batched) or (
            "MultiResolutionFFT" in name and len(shape) == 1
        )
        assert all(same) if is_statistic else same.count(False) == 1 and y.numel() == 0
        assert torch.isfinite(y).all()


@pytest.mark.parametrize("name", some(3, STREAMING, 1))
def test_empty_chunks_change_nothing(name: str) -> None:
    """Before the first chunk and between two; their own outputs are empty."""
    module, inputs = _built(CASES[name]), CASES[name].inputs
    empty = _cut(inputs, _time_axis(name))
    with torch.no_grad():
        expected = module.stream(*inputs)
        nothing, state = module.stream(*empty)
        first, state = module.stream(*inputs, state)
        nothing_again, same = module.stream(*empty, state)
        second, third = (leaves(module.stream(*inputs, each)[0]) for each in (state, same))
    for got, wanted in ((leaves(first), leaves(expected[0])), (third, second)):
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(a, b)
    for y in (*leaves(nothing), *leaves(nothing_again)):
        assert y.numel() == 0 or y.ndim == 1  # Moore2016's maximum so far


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("case", RECURRENCES)
def test_recurrences_of_nothing(case: str, backend: str) -> None:
    torch.manual_seed(0)
    x, coef, state, run = RECURRENCES[case](torch.float64)
    y, after = run(x[..., :0], coef, state, backend=backend)
    assert y.shape == (*run(x[..., :1], coef, state)[0].shape[:2], 0)
    assert torch.equal(after, state)
    leaf = x[:0, :, :3].requires_grad_()
    y, after = run(leaf, coef, state[:0], backend=backend)
    assert y.shape[0] == 0 and after.shape == (0, *state.shape[1:])
    assert torch.autograd.grad(y.sum(), leaf)[0].shape == leaf.shape


@pytest.mark.parametrize("name", BUILT_IN)
def test_extractors_of_nothing(name: str) -> None:
    """No clips, and clips of no samples, whole and as streams."""
    info = get_model(name)
    params = {"basef": 1000.0, "phase_insens": "none"} if name == "king2019" else {}
    streams: dict[str, Any] = {stream: {} for stream in info.streams}
    if name == "king2019":
        streams["spikes"] = {"gain": 1.0}
    extractor = build_extractor(name, streams=streams, params=params)
    assert extractor.extract([]) == []
    nothing = np.zeros(0, np.float32)
    (found,) = extractor.extract([nothing])
    opened = extractor.open_stream()
    for made in (found, opened.push(nothing), opened.finish()):
        for stream in extractor.streams:
            if stream.layout == "events":
                assert made[stream.name].n_frames == len(made[stream.name]) == 0
            else:
                assert made[stream.name].shape == (0, stream.width)
