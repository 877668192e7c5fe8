"""What is no finite number: kernels carry it exactly as the plain loops do, values and gradients.

Every test puts NaN and both infinities at the start, in the middle and at the end, each into a
channel or a signal of its own, and compares where NaN and infinities come out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import amtcore
from amtcore.errors import NonFiniteError
from amtcore.features import feature_model as features_base
from amtcore.features import loudness_model as features_loudness
from amtcore.features.frame_module_model import FrameModuleModel
from amtcore.features.registry import BUILT_IN, build_extractor, get_model, registrations
from amtcore.kernels.operations.attack_release import ATTACK_RELEASE
from amtcore.kernels.operations.envelope import HILBERT_ENVELOPE
from amtcore.kernels.operations.fir import FIR
from amtcore.kernels.operations.lif import LIF
from amtcore.kernels.operations.lower_skirt import LOWER_SKIRT
from amtcore.kernels.operators import operator
from amtcore.kernels.pooling import POOLS
from amtcore.models.frame_module import FrameModule
from amtcore.units import Calibration

from ..short import but, spread
from .loudness_golden import one_thread  # noqa: F401
from .model_cases import CASES as MODELS
from .model_cases import FEW_CHANNELS, leaves, use_plain_loops, whole
from .plain_frames import pool_frames
from .test_loudness_skirts import _case as skirt_case
from .test_recurrences import CASES

attack_release = operator(ATTACK_RELEASE)
fir = operator(FIR)
lif = operator(LIF)
lower_skirt = operator(LOWER_SKIRT)
hilbert_envelope = operator(HILBERT_ENVELOPE)

STRANGE = (math.nan, math.inf, -math.inf)
DTYPES = {"float32": torch.float32, "float64": torch.float64}
#: More than one block of the kernels.
TIME = 132
PLACES = (0, TIME // 2, TIME - 1)
#: One for each value at each place.
COMBINATIONS = [(value, at) for value in STRANGE for at in PLACES]


def _assert_same(got: Sequence[Any], plain: Sequence[Any], names: str, what: str = "") -> None:
    """NaN where the other has NaN, infinities of the same sign where it has those."""
    for name, a, b in zip(names.split(), got, plain, strict=True):
        for same in (torch.isnan, torch.isposinf, torch.isneginf):
            told = f"{what} {name}: {same.__name__} elsewhere than in the loop"
            assert torch.equal(same(a.detach()), same(b.detach())), told


def _planted(case: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor, Any]:
    """Inputs and upstream gradients; every combination in a channel of its own, and one NaN each in
    a state, in a coefficient and in both upstream gradients."""
    torch.manual_seed(0)
    is_bank = "bank" in case  # whose plain loop takes its time
    x, coef, state, run = CASES[case](dtype, **({"channels": 16} if is_bank else {}))
    x = x[..., : 20 if is_bank else TIME].expand(-1, -1 if is_bank else len(coef), -1).clone()
    y, last = run(x, coef, state)
    gy, glast = torch.randn_like(y), torch.randn_like(last)
    for channel, (value, at) in enumerate(COMBINATIONS):
        x[:, channel, at * (x.shape[-1] - 1) // PLACES[-1]] = value
    n = len(COMBINATIONS)
    state[:, n, 0] = coef[n + 1, 1] = gy[:, n + 2, 15] = glast[:, n + 3, 0] = math.nan
    return [x, coef, state], gy, glast, run


@pytest.mark.parametrize(("case", "dtype"), spread(2, CASES, DTYPES))
def test_recurrences_carry_what_the_loops_carry(case: str, dtype: str) -> None:
    inputs, gy, glast, run = _planted(case, DTYPES[dtype])
    results = []
    for backend in ("cpu", "reference"):
        leaves_ = [value.clone().requires_grad_() for value in inputs]
        y, last = run(*leaves_, backend=backend)
        gradients = torch.autograd.grad((y, last), leaves_, (gy, glast))
        results.append((y, last, *gradients))
    _assert_same(*results, "y state gx gcoef gstate", case)
    y = results[0][0]
    assert torch.isnan(y[:, 0, 0]).all() and torch.isfinite(y[:, -1]).all()


@pytest.mark.parametrize("case", CASES)
def test_chunks_carry_what_the_whole_carries(case: str) -> None:
    (x, coef, state), _, _, run = _planted(case, torch.float32)
    whole_y, last = run(x, coef, state)
    first, middle = run(x[..., :15], coef, state)
    second, after = run(x[..., 15:], coef, middle)
    np.testing.assert_array_equal(torch.cat((first, second), -1), whole_y)
    np.testing.assert_array_equal(after, last)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("taps", "stride"), [(17, 1), (17, 3), (64, 2)])
def test_fir_reaches_no_further_than_its_taps(taps: int, stride: int, dtype: str) -> None:
    kind = DTYPES[dtype]
    x = torch.randn(len(COMBINATIONS), 3 * TIME, dtype=kind)
    for row, (value, at) in enumerate(COMBINATIONS):
        x[row, 3 * at] = value
    results = []
    for backend in ("cpu", "reference"):
        inputs = x.clone().requires_grad_()
        y = fir(inputs, torch.rand(taps, dtype=kind), stride, backend=backend)
        gy = torch.ones_like(y)
        gy[:, 5] = math.nan
        results.append((y, *torch.autograd.grad(y, inputs, gy)))
    _assert_same(*results, "y gx")


@pytest.mark.parametrize("dtype", DTYPES)
def test_gain_controls(dtype: str) -> None:
    kind = DTYPES[dtype]
    x = torch.rand(2, TIME, 12, dtype=kind)
    for channel, (value, at) in enumerate(COMBINATIONS):
        x[:, at, channel] = value
    coef, state = torch.rand(12, 2, dtype=kind), torch.rand(2, 12, dtype=kind)
    state[:, 10] = math.nan
    results = []
    for backend in ("cpu", "reference"):
        inputs = [value.clone().requires_grad_() for value in (x, coef, state)]
        y, last = attack_release(*inputs, backend=backend)
        results.append((y, last, *torch.autograd.grad(y.sum() + last.sum(), inputs)))
    _assert_same(*results, "y state gx gcoef gstate")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", ["intensity", "slope", "rate"])
def test_lower_skirts(where: str, dtype: str) -> None:
    case = [values.clone() for values in skirt_case(DTYPES[dtype])]
    if where == "rate":
        case[2][3] = math.nan
    else:
        for frame, (value, at) in enumerate(COMBINATIONS):
            case[where == "slope"][2 * frame, min(at, 100)] = value
    results = []
    for backend in ("cpu", "reference"):
        inputs = [values.clone().requires_grad_() for values in case[:3]]
        y = lower_skirt(*inputs, *case[3:], backend=backend)
        gradients = torch.autograd.grad(y.square().sum(), inputs)
        results.append((y, *gradients))
    # Components of zero intensity get no gradient from the kernel in frames of finite numbers.
    there = case[0] != 0
    for y_and_gradients in results:
        for gradient in y_and_gradients[1:3] if where != "rate" else ():
            gradient[~there] = 0.0
    _assert_same(*results, "y gintensity gslope grate")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("samples", [TIME, 139])
def test_envelopes_share_transforms_but_no_nan(samples: int, dtype: str) -> None:
    x = torch.randn(len(COMBINATIONS) + 2, samples, dtype=DTYPES[dtype])
    for row, (value, at) in enumerate(COMBINATIONS):
        x[1 + row, min(at, samples - 1)] = value
    for backend in ("cpu", "reference"):
        y = hilbert_envelope(x, backend)
        assert torch.isnan(y[1:-1]).all() and torch.isfinite(y[[0, -1]]).all()
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(hilbert_envelope(x).sum(), x)
    assert torch.isnan(gradient[1:-1]).all() and torch.isfinite(gradient[[0, -1]]).all()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(("value", "at"), COMBINATIONS)
def test_neurons_refuse_it(value: float, at: int, backend: str) -> None:
    """Spike counts have no NaN to show it by, so the layer says so."""
    x = torch.zeros(1, TIME, 3)
    x[0, at, 1] = value
    coef = torch.tensor([[0.9, 0.0, 1.0, 0.5, 0.8]]).repeat(3, 1)
    with pytest.raises(NonFiniteError, match=rf"data must be finite, got .* at index \(0, {at}, 1"):
        lif(x, coef, torch.zeros(1, 3, 2), math.inf, backend=backend)


def test_neurons_keep_an_upstream_nan_where_the_loop_has_it() -> None:
    torch.manual_seed(0)
    x = torch.rand(1, 40, 35, dtype=torch.float64)
    coef = torch.tensor([[0.9, 0.0, 1.0, 0.05, 0.8]], dtype=torch.float64).repeat(35, 1)
    state = torch.zeros(1, 35, 2, dtype=torch.float64)
    results = []
    for backend in ("cpu", "reference"):
        inputs = x.clone().requires_grad_()
        y = lif(inputs, coef, state, math.inf, backend=backend)[0]
        gy = torch.ones_like(y)
        gy[0, torch.arange(35), torch.arange(35)] = math.nan
        results.append(torch.autograd.grad(y, inputs, gy))
    _assert_same(*results, "gx")
    assert torch.isfinite(results[0][0]).any() and torch.isnan(results[0][0]).any()


# --- models ---


def test_every_model_is_looked_at() -> None:
    every = {kind for kind in vars(amtcore).values() if hasattr(kind, "input_unit")}
    # Models of frames are tested by `ModelConformance`.
    every = {kind for kind in every if not issubclass(kind, FrameModule)}
    assert every <= {case.kind for case in MODELS.values()}


#: Models whose kernels carry NaN to the outputs; their own tests look at that.
CARRIED = ("carfac", "sai", "stoi")
#: Other models of frames, with parameters.
FRAMES: dict[str, Any] = {
    name: {}
    for name in sorted(registrations())
    if isinstance(get_model(name), FrameModuleModel) and name not in CARRIED
} | {"auditory_nerve": {"envelope_mode": False}}


@pytest.mark.parametrize("name", FRAMES)
def test_models_of_frames_refuse_what_is_no_number(name: str) -> None:
    """Comparisons such as `power > 0` would turn NaN into silence."""
    model = get_model(name)
    assert isinstance(model, FrameModuleModel)
    module = model.module(model.default_fs_hz, FRAMES[name], "float32")
    ears = min(module.input_channels)
    for value in (*STRANGE, 1e39):
        x = torch.zeros(*([ears] if ears > 1 else []), round(module.fs), dtype=torch.float64)
        x[..., 1000] = value
        with pytest.raises(NonFiniteError, match=r"finite in torch\.float"):
            module.outputs(x)
        if module.can_stream:
            with pytest.raises(NonFiniteError):
                module.stream(x, None, True, tuple(module.grids))


SLOW = ("dau1997", "king2019_hilbert", "osses2021", "jepsen2008", "king2019_resampled")


def _bad_signals(name: str, samples: int) -> Tensor:
    """One signal a combination, and a good one at the end; fewer for models of loudness, which
    take a whole block of frames for anything."""
    chosen = COMBINATIONS if MODELS[name].exact else COMBINATIONS[::4]
    x = MODELS[name].signal(len(chosen) + 1, samples=samples)
    for row, (value, at) in enumerate(chosen):
        x[row, ..., at * (samples - 1) // (TIME - 1)] = value
    return x


@pytest.mark.parametrize("name", but(SLOW, [name for name in MODELS if name != "lif_exodus"]))
def test_models_carry_what_the_loops_carry(name: str) -> None:
    samples = 60 if MODELS[name].exact else 1200
    options = {"return_stages": True, **FEW_CHANNELS.get(name, {})}
    build = functools.partial(MODELS[name].build, **options)
    x = _bad_signals(name, samples)
    with torch.no_grad():
        got, plain = leaves(build()(x)), leaves(use_plain_loops(build())(x))
    _assert_same(got, plain, " ".join(f"y{i}" for i in range(len(got))), name)
    for y in got:
        if len(y) == len(x):  # frequencies have no batch
            assert torch.isfinite(y[-1]).all()
    outputs = got[: len(leaves(MODELS[name].build()(x[:1])))]  # before the stages
    assert any(bool(torch.isnan(y[0]).any()) for y in outputs)


#: Models that are streamed as another one is.
SAME_STREAM = ("dau1997", "king2019_none", "jepsen2008", "moore2016")
STREAMED = [name for name, case in MODELS.items() if case.streams and name != "lif_exodus"]


@pytest.mark.parametrize("name", but(SAME_STREAM, STREAMED))
def test_streams_of_models_carry_what_the_whole_carries(name: str) -> None:
    model, x = MODELS[name].build(), _bad_signals(name, 1200)
    with torch.no_grad():
        expected = leaves(model(x))
        first, state = model.stream(x[..., :601])
        second, _ = model.stream(x[..., 601:], state, last=True)
    axis = MODELS[name].output_axis
    for a, b, wanted in zip(leaves(first), leaves(second), expected, strict=True):
        got = b if wanted.ndim == 1 else torch.cat((a, b), axis)
        np.testing.assert_array_equal(torch.isnan(got), torch.isnan(wanted))
        np.testing.assert_array_equal(torch.isinf(got), torch.isinf(wanted))


@pytest.mark.parametrize("name", but(SLOW, [name for name in MODELS if name != "lif_exodus"]))
def test_gradients_of_models_are_no_numbers(name: str) -> None:
    """The loss is NaN, and so is the gradient of some parameter: an optimiser's check sees it."""
    model = MODELS[name].build(learnable=True)
    x = MODELS[name].signal(1, samples=200 if MODELS[name].exact else 600)
    x[..., 100] = math.nan
    loss = sum((y.square().sum() for y in leaves(whole(model)(x))), torch.zeros(()))
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    assert torch.isnan(loss)
    assert not all(bool(torch.isfinite(g).all()) for g in gradients if g is not None)


# --- extraction ---

FS = 16000
PARAMS = {"king2019": {"basef": 1000.0, "phase_insens": "none"}}


@functools.cache
def _extractor(name: str) -> Any:
    """Return an extractor that tests only call."""
    return build_extractor(name, params=PARAMS.get(name))


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extractors without their look at clips, as for tensors on a GPU, where there is none."""
    for module in (features_base, features_loudness):
        monkeypatch.setattr(module, "check_finite", lambda signal, dtype: None)


@pytest.mark.parametrize("name", [*BUILT_IN, "mfcc"])
@pytest.mark.parametrize("value", STRANGE)
def test_extractors_refuse_it(name: str, value: float) -> None:
    """Arrays and tensors, whole or in chunks; the message names the sample."""
    extractor = _extractor(name)
    clip = np.full(round(0.1 * extractor.fs_hz), 0.01, np.float32)
    clip[300] = value
    given: list[Any] = [clip, clip.astype(np.float64)]
    if max(extractor.input_channels) == 2:
        given.append(np.stack((np.zeros_like(clip), clip)))
    if name != "mfcc":
        given.append(torch.from_numpy(clip))
    for each in given:
        with pytest.raises(NonFiniteError, match=r"finite in float32, got .* at sample 300;"):
            extractor.extract([np.zeros(500, np.float32), each])
    if extractor.can_stream:
        stream = extractor.open_stream()
        stream.push(clip[:250])
        with pytest.raises(NonFiniteError, match=r"at sample 50;"):
            stream.push(clip[250:])


@pytest.mark.parametrize("name", [*BUILT_IN, "mfcc"])
def test_extractors_refuse_samples_beyond_their_type(name: str) -> None:
    """In float32 they would become infinite."""
    extractor = _extractor(name)
    clip = np.full(500, 0.01)
    clip[300] = 1e300
    with pytest.raises(NonFiniteError, match=r"finite in float32, got 1e\+300 at sample 300;"):
        extractor.extract([clip])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("value", STRANGE)
def test_pooled_frames_carry_what_full_rate_carries(pool: str, value: float) -> None:
    names = ("modulation", "adaptation", "envelope")
    extractor = build_extractor("dau1997", fs_hz=FS, streams={n: {"pool": pool} for n in names})
    clip = MODELS["dau1997"].signal(samples=1000).numpy()
    clip[500] = value
    (got,) = extractor.extract([clip])
    out, stages = amtcore.Dau1997(FS, return_stages=True)(torch.from_numpy(clip))
    full = {"modulation": torch.cat(out), "adaptation": stages["adaptation"],
            "envelope": stages["ihc"]}  # fmt: skip
    for name in names:
        expected = pool_frames(full[name].detach(), (160, 1), pool).T
        _assert_same([torch.from_numpy(got[name])], [expected], name)
        assert np.isfinite(got[name][:3]).all()
    assert np.isnan(got["envelope"][4:]).all()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", BUILT_IN)
def test_extractors_never_hide_it(name: str) -> None:
    """Every stream of every registered model, whole and chunk by chunk, neighbours unharmed."""
    info = get_model(name)
    fs = info.default_fs_hz
    streams = {stream: {} for stream in info.streams if stream != "spikes"}
    extractor = build_extractor(name, fs_hz=fs, streams=streams, params=PARAMS.get(name))
    rng = np.random.default_rng(0)
    bad, good = (0.02 * rng.standard_normal((2, round(0.06 * fs)))).astype(np.float32)
    bad[len(bad) // 2] = math.nan
    found, unharmed = extractor.extract([bad, good])
    for stream in streams:
        assert np.isnan(found[stream]).any(), stream
        assert np.isfinite(unharmed[stream]).all(), stream
    chunks = extractor.open_stream()
    parts = [chunks.push(bad[: len(bad) // 3]), chunks.push(bad[len(bad) // 3 :]), chunks.finish()]
    for stream in streams:
        np.testing.assert_array_equal(
            np.isnan(np.concatenate([part[stream] for part in parts])), np.isnan(found[stream])
        )


@pytest.mark.usefixtures("unchecked")
def test_a_summary_of_a_clip_is_nan_as_a_whole() -> None:
    extractor = build_extractor("moore2016", streams={"loudness_summary": {}})
    clip = np.full(3200, 0.01, np.float32)
    clip[1600] = math.nan
    assert np.isnan(extractor.extract([clip])[0]["loudness_summary"]).all()


def test_a_level_of_no_number_is_no_gain() -> None:
    assert math.isnan(Calibration(level_db_spl=65.0).gain(np.array([0.1, math.nan]), "pa"))
    assert Calibration(level_db_spl=65.0).gain(np.zeros(3), "pa") == 0.0
