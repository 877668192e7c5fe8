"""What holds for every model: chunks, batches, precision, backends, compilation, copies, rates."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from amtcore import Dau1997, Glasberg2002, King2019, Moore2016, Osses2021, Paulick2024
from amtcore.errors import ParameterError, ShapeError
from tests.short import some

from ..compare import FLOAT32_MODULATION, Tolerance, assert_close
from ..short import but, drawn, only, spread
from .compiling import one_graph
from .loudness_golden import one_thread  # noqa: F401
from .model_cases import CASES, FEW_CHANNELS, Case, in_chunks, leaves, use_plain_loops, whole

#: Two routes through a model in float64: rounding, which the adaptation's onsets magnify.
ROUTES64 = Tolerance(1e-9, "float64 rounding through onsets", 1e-12)
#: The same numbers where sums run in an order that depends on the batch.
NEIGHBOURS = Tolerance(1e-4, "single-precision sums in another order", 1e-6)
F64 = torch.float64


def _assert_equal(got: Any, expected: Any, case: Case) -> None:
    """Bit for bit, or up to the order of sums for models that do not promise more."""
    for a, b in zip(leaves(got), leaves(expected), strict=True):
        if case.exact:
            assert torch.equal(a, b)
        else:
            assert_close(a.detach(), b.detach(), NEIGHBOURS)


@functools.cache
def _with_stages(name: str) -> Any:
    return CASES[name].build(**({} if name == "lif_exodus" else {"return_stages": True}))


@functools.cache
def _whole_output(name: str) -> list[Tensor]:
    with torch.no_grad():
        return leaves(whole(_with_stages(name))(CASES[name].signal(2)))


#: Models with the same stream as another one: by other stages, ears or integration.
_SAME_STREAM = ("dau1997", "king2019_none", "jepsen2008", "glasberg2002")


@pytest.mark.parametrize(
    "name", but(_SAME_STREAM, [name for name, case in CASES.items() if case.streams])
)
@drawn(6, derandomize=True)
@given(cuts=st.lists(st.floats(0.0, 1.0), max_size=5))
@example(cuts=[0.0, 0.001, 0.43, 0.43, 1.0])
def test_chunks_equal_the_whole_exactly(name: str, cuts: list[float]) -> None:
    case = CASES[name]
    x = case.signal(2)
    with torch.no_grad():
        together = in_chunks(
            case, _with_stages(name), x, [int(cut * x.shape[case.input_axis]) for cut in cuts]
        )
    for got, expected in zip(together, _whole_output(name), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (CASES["king2019_hilbert"].build, "needs the whole signal.*use phase_insens='none'"),
        (
            lambda: Dau1997(16000, ihc_kwargs={"method": "hilbert"}),
            "needs the whole signal.*'dau1996'",
        ),
    ],
)
def test_what_needs_the_whole_signal_says_so(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        build().stream(torch.zeros(1, 100))


@pytest.mark.parametrize(
    ("name", "dtype", "watched"), spread(4, CASES, ["float32", "float64"], [False, True])
)
def test_a_batch_is_its_items(name: str, dtype: str, watched: bool) -> None:
    """A signal without batch axis, a batch, and the channels of a clip, bit for bit: rows do not
    meet. Also with stages, and where gradients by the signal are recorded."""
    case, kind = CASES[name], getattr(torch, dtype)
    scale = torch.tensor([1.0, 0.1, 3.0], dtype=kind).reshape(3, *(1 for _ in case.item))
    options = {} if name == "lif_exodus" else {"return_stages": True}
    model, x = whole(case.build(dtype=kind, **options)), scale * case.signal(3, dtype=kind)
    together = leaves(model(x.requires_grad_(watched)))
    for i in range(3):
        for of_batch, of_one in zip(together, leaves(model(x[i : i + 1])), strict=True):
            if len(of_batch) == 3:  # else the frequencies of a spectrum, the same for all
                assert torch.equal(of_batch[i], of_one[0])
    for of_batch, of_signal in zip(together, leaves(model(x[1])), strict=True):
        if len(of_batch) == 3:
            assert torch.equal(of_batch[1], of_signal)


#: Models and items so long that torch shares the elements of a batch out to threads.
LONG_ITEMS: list[tuple[Callable[..., Any], tuple[int, ...]]] = [
    (lambda **k: King2019(16000, flow=300, fhigh=3000, **k), (20_011,)),
    (lambda **k: King2019(16000, basef=1000, subfs=1000, **k), (40_001,)),
    (lambda **k: Dau1997(16000, 500, 900, ihc_kwargs={"method": "hilbert"}, **k), (9_999,)),
    (lambda **k: Dau1997(16000, 500, 900, ihc_kwargs={"method": "bernstein1999"}, **k), (777,)),
    (lambda **k: Glasberg2002(44100, **k), (12_001,)),
    (lambda **k: Moore2016(**k), (2, 9_001)),
]


@pytest.mark.parametrize(("case", "dtype"), spread(4, LONG_ITEMS, [torch.float32, F64]))
def test_long_items_of_a_batch_are_cut_as_they_are_alone(
    case: tuple[Callable[..., Any], tuple[int, ...]], dtype: torch.dtype
) -> None:
    """Where a batch is so large that torch shares its elements out to threads."""
    build, item = case
    x = 0.05 * torch.randn(3, *item, generator=torch.Generator().manual_seed(0), dtype=F64)
    model, x = build(dtype=dtype), x.to(dtype)
    together = leaves(model(x))
    for i, alone in enumerate(x):
        for got, expected in zip(leaves(model(alone)), together, strict=True):
            assert torch.equal(got, expected[i])


@pytest.mark.parametrize("name", CASES)
def test_vmap_equals_the_batch(name: str) -> None:
    """Also over clips whose channels are a batch to the model, and twice."""
    case = CASES[name]
    model, x = whole(case.build()), case.signal(3, 2, samples=min(600, max(case.item)))
    with torch.no_grad():
        together = [y.unflatten(0, (3, 2)) for y in leaves(model(x.flatten(0, 1)))]
        _assert_equal(torch.func.vmap(model)(x), together, case)
        _assert_equal(torch.func.vmap(model, in_dims=1, out_dims=1)(x), together, case)
        _assert_equal(torch.func.vmap(torch.func.vmap(model))(x), together, case)


def test_vmap_over_parameters_is_refused() -> None:
    model, x = CASES["dau1997"].build(learnable=True), CASES["dau1997"].signal(1)
    fc = model.filterbank.fc.detach().expand(2, -1)

    def call(fc: Tensor) -> Any:
        return torch.func.functional_call(model, {"filterbank.fc": fc}, (x,))

    with pytest.raises(ShapeError, match="once for each set of parameters"):
        torch.func.vmap(call)(fc)


@pytest.mark.parametrize("name", CASES)
def test_inputs_of_another_kind_are_named(name: str) -> None:
    case, model = CASES[name], CASES[name].build()
    with pytest.raises(ShapeError, match=r"time.*got a tensor of shape \(2, 3, "):
        model(case.signal(2, 3, samples=8))
    kind = torch.complex64 if name == "lif_exodus" else torch.int32  # spikes may be counts
    with pytest.raises(ShapeError, match="floating-point"):
        model(case.signal(samples=8).to(kind))


@pytest.mark.parametrize("name", some(2, [name for name in CASES if name != "lif_exodus"]))
def test_float32_against_float64(name: str) -> None:
    """Spikes are left to their own test: where rounding decides one, all that follow differ."""
    x = CASES[name].signal(1, dtype=F64)
    single, double = (
        leaves(CASES[name].build(dtype=dtype)(x)) for dtype in (torch.float32, torch.float64)
    )
    for got, expected in zip(single, double, strict=True):
        assert (got.dtype, expected.dtype) == (torch.float32, F64)
        assert_close(got, expected, FLOAT32_MODULATION)


#: Models without a kernel of their own; `test_recurrences` compares each kernel alone.
_SAME_KERNELS = ("dau1997", "king2019_none", "king2019_hilbert", "jepsen2008", "glasberg2002")


@pytest.mark.parametrize("name", but(_SAME_KERNELS, CASES))
def test_kernels_equal_the_plain_loops(name: str) -> None:
    case = CASES[name]
    x = case.signal(1, samples=min(132, max(case.item)), dtype=F64)  # more than a block
    fast = whole(case.build(dtype=F64, **FEW_CHANNELS.get(name, {})))(x)
    slow = whole(use_plain_loops(case.build(dtype=F64, **FEW_CHANNELS.get(name, {}))))(x)
    for got, expected in zip(leaves(fast), leaves(slow), strict=True):
        assert expected.abs().max() > 0
        assert_close(got.detach(), expected.detach(), ROUTES64)


#: Other models compile the same operators, or take half a minute; `test_lif_layer` compiles a layer
#: of neurons. A backward graph of learnable constants takes 10 s to make. Here autograd runs the
#: graph of learnable constants backward; `test_ears` compiles the backward graph of one filter.
_DAILY = [("king2019_none", "eager", True), ("king2019_none", "aot_eager", False)]


@pytest.mark.parametrize(
    ("name", "backend", "learnable"),
    [*_DAILY, *(pytest.param(name, "aot_eager", True, marks=pytest.mark.long) for name in CASES)],
)
def test_compiled_training_step_equals_eager(name: str, backend: str, learnable: bool) -> None:
    """One graph without breaks, forward and backward."""
    case = CASES[name]
    few_filters = {"modbank_nmod": 2} if name == "king2019_none" else {}
    model = case.build(learnable=learnable, **few_filters)
    call, x = whole(model), case.signal(2, samples=min(400, max(case.item)))
    results = []
    for function in (one_graph(call, backend), call):
        leaf = x.clone().requires_grad_()
        outputs = leaves(function(leaf))
        loss = sum((y.square().sum() for y in outputs), torch.zeros(()))
        results.append((outputs, torch.autograd.grad(loss, (leaf, *model.parameters()))))
    (got, got_gradients), (expected, expected_gradients) = results
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    for a, b in zip(got_gradients, expected_gradients, strict=True):
        assert_close(a, b, Tolerance(1e-5, "float32 reductions in another order"))


@pytest.mark.parametrize(
    "name", only(["king2019_hilbert"], ["king2019_hilbert", "paulick2024", "moore2016"])
)
def test_compiled_inference_equals_eager(name: str) -> None:
    """What runs only without gradients: envelopes, fused operations, blocks on threads."""
    case = CASES[name]
    model, x = case.build(), case.signal(2, samples=400)
    compiled = one_graph(model)
    with torch.no_grad():
        for got, expected in zip(leaves(compiled(x)), leaves(model(x)), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("name", "how", "learnable"), spread(6, CASES, ["pickle", "deepcopy", "state_dict"], [0, 1])
)
def test_copies_compute_the_same(name: str, how: str, learnable: int) -> None:
    case = CASES[name]
    options, x = {"learnable": bool(learnable)}, case.signal(1, samples=min(600, max(case.item)))
    model = case.build(**options)
    with torch.no_grad():
        fresh = leaves(whole(model)(x))
        model.load_state_dict({key: 1.01 * value for key, value in model.state_dict().items()})
        expected = leaves(whole(model)(x))
        assert not all(torch.equal(a, b) for a, b in zip(fresh, expected, strict=True))
        if how == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        elif how == "deepcopy":
            twin = copy.deepcopy(model)
        else:
            twin = case.build(**options)
            twin.load_state_dict(model.state_dict())
        assert [n for n, _ in twin.named_parameters()] == [n for n, _ in model.named_parameters()]
        for got, wanted in zip(leaves(whole(twin)(x)), expected, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", CASES)
def test_conversion_to_double_and_back(name: str) -> None:
    case = CASES[name]
    model, x = case.build(), case.signal(1, samples=min(600, max(case.item)))
    double = copy.deepcopy(model).double()
    assert double.dtype == F64
    with torch.no_grad():
        expected = leaves(whole(model)(x))
        assert {y.dtype for y in leaves(whole(double)(x))} == {F64}
        back = double.float()
        assert back.dtype == torch.float32
        for got, wanted in zip(leaves(whole(back)(x)), expected, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", CASES)
def test_learnable_and_fixed_constants_compute_the_same(name: str) -> None:
    case = CASES[name]
    x = case.signal(1, samples=min(1500, max(case.item)))
    learnable = whole(case.build(learnable=True))(x)
    for got, expected in zip(
        leaves(learnable), leaves(whole(case.build(learnable=False))(x)), strict=True
    ):
        assert got.requires_grad and not expected.requires_grad
        assert_close(got.detach(), expected, NEIGHBOURS)


@pytest.mark.parametrize("learnable", [False, True], ids=["fixed", "learnable"])
@pytest.mark.parametrize("name", CASES)
def test_representation_shows_the_main_values(name: str, learnable: bool) -> None:
    model = CASES[name].build(learnable=learnable)
    assert type(model) is CASES[name].kind
    text = repr(model)
    assert [value for value in CASES[name].shows if value not in text] == []
    assert f"learnable={learnable}" in text and f"learnable={not learnable}" not in text


# --- sampling rates ---

#: Sampled models are not those of continuous time; at 8 kHz the ears' filters are 7 % off.
AT_8_KHZ = Tolerance(0.08, "pole-zero pairs and tables up to half of 8 kHz")
RATES = (8000, 16000, 44100, 48000, 96000)
#: Models by rate, with channels around a tone of 500 Hz, or (loudness) all there are.
AT_RATE: dict[str, Callable[[float], Any]] = {
    "dau1997": lambda fs: Dau1997(fs, 300.0, 800.0, dtype=F64),
    "osses2021": lambda fs: Osses2021(fs, 300.0, 800.0, phase_type="zero", dtype=F64),
    "king2019": lambda fs: King2019(fs, 300.0, 800.0, dtype=F64),
    "paulick2024": lambda fs: Paulick2024(fs, 300.0, 800.0, 4, dtype=F64),
    "jepsen2008": lambda fs: Paulick2024(fs, 300.0, 800.0, 4, model="jepsen2008", dtype=F64),
    "glasberg2002": lambda fs: Glasberg2002(fs, dtype=F64),
}


def _beats(fs: float) -> Tensor:
    """A 500 Hz tone of 0.05 Pa with a 20 Hz beat, 0.3 s: alike at any rate."""
    t = torch.arange(round(0.3 * fs), dtype=F64) / fs
    return 0.05 * torch.sin(2 * math.pi * 10 * t).square() * torch.sin(2 * math.pi * 500 * t)


@functools.cache
def _strengths(name: str, fs: float) -> Tensor:
    """RMS of every channel and filter, or of the trace."""
    outputs = leaves(AT_RATE[name](fs)(_beats(fs)))
    if name == "king2019":
        outputs = [outputs[0].movedim(0, -1)]
    return torch.cat([y.square().mean(-1).sqrt().flatten() for y in outputs])


@pytest.mark.parametrize(("name", "fs"), spread(3, AT_RATE, RATES))
def test_rate_does_not_change_what_is_heard(name: str, fs: float) -> None:
    assert_close(_strengths(name, fs), _strengths(name, 192000), AT_8_KHZ)


@pytest.mark.parametrize("name", [name for name in AT_RATE if name != "glasberg2002"])
def test_a_channel_above_half_the_rate_is_refused(name: str) -> None:
    model = type(AT_RATE[name](16000))
    with pytest.raises(ParameterError, match="half the sampling rate"):
        model(8000, 300.0, 5000.0)


def test_one_rate_only() -> None:
    with pytest.raises(ParameterError, match="works at 32000 Hz, got 44100; resample"):
        Moore2016(44100)
