"""Moore2016: the reference program's loudness, anchors of the standard, chunks, gradients."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from amtcore import Moore2016
from amtcore.errors import ShapeError
from amtcore.models.frame_blocks import BLOCK_FRAMES
from tests.short import only, spread

from ..compare import Tolerance, assert_close
from .loudness_golden import FILES, load, noise, one_thread, tone  # noqa: F401

DTYPES = {"float64": torch.float64, "float32": torch.float32}
CONDITIONS = ("diotic", "leftonly", "diffuse", "dichotic")
_FIR = "the authors' ear filter is up to 0.4 dB off its table below 60 Hz"
TOLERANCES = {
    ("float64", False): Tolerance(1e-3, _FIR),
    ("float64", True): Tolerance(1e-2, _FIR),
    ("float32", False): Tolerance(5e-3, f"single precision, and {_FIR}"),
    ("float32", True): Tolerance(1.5e-2, f"single precision, and {_FIR}"),
}
SINGLE = Tolerance(1e-4, "single-precision spectra")


@functools.cache
def _model(dtype: str = "float64", field: str = "free") -> Moore2016:
    return Moore2016(dtype=DTYPES[dtype], outer_middle_ear_kwargs={"field_type": field})


@functools.cache
def _loudness(name: str, condition: str, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    golden = load(name)
    signal = torch.from_numpy(golden["input"])
    if condition == "leftonly":
        signal = torch.stack((signal, torch.zeros_like(signal)))
    elif condition == "dichotic":
        signal = torch.stack((signal, torch.from_numpy(golden["input_right_dichotic"])))
    model = _model(dtype, "diffuse" if condition == "diffuse" else "free")
    return model(signal)


def test_files_are_there() -> None:
    assert len(FILES) == 9 and "tone1k_40" in FILES


@pytest.mark.parametrize(("name", "condition", "dtype"), spread(4, FILES, CONDITIONS, DTYPES))
def test_stored_loudness(name: str, condition: str, dtype: str) -> None:
    golden = load(name)
    short, long, loudest = _loudness(name, condition, dtype)
    tolerance = TOLERANCES[dtype, name.startswith("tone100")]
    assert_close(short, golden[f"moore_{condition}_stl"], tolerance, f"{name} {condition} stl")
    assert_close(long, golden[f"moore_{condition}_ltl"], tolerance, f"{name} {condition} ltl")
    assert float(loudest) == float(long.max())
    if condition == "diotic":
        assert float(loudest) == pytest.approx(
            float(golden["moore_diotic_max"]), rel=tolerance.relative
        )


def test_one_sone_is_1_khz_at_40_db() -> None:
    short, _, _ = _model()(tone(1000.0, 40.0))
    assert float(short[300:450].mean()) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("level", [20, 60, 80])
def test_levels_of_1_khz(level: int) -> None:
    short, _, _ = _model()(tone(1000.0, level))
    stored = load(f"tone1k_{level}")["moore_diotic_stl"]
    assert float(short[300:450].mean()) == pytest.approx(stored[300:450].mean(), rel=0.02)


@pytest.mark.parametrize(
    ("f_hz", "level_db", "sone", "tolerance"),
    [
        (100.0, 64.37, 1.375, 0.015),
        (200.0, 53.41, 1.267, 0.01),
        (500.0, 43.05, 1.114, 0.01),
        (2000.0, 39.23, 1.250, 0.01),
        (4000.0, 36.65, 1.535, 0.01),
        (8000.0, 51.80, 1.138, 0.01),
    ],
)
def test_40_phon_contour(f_hz: float, level_db: float, sone: float, tolerance: float) -> None:
    """Short-term loudness on the contour of ISO 226:2003, as the reference program has it."""
    short, _, _ = _model()(tone(f_hz, level_db))
    assert float(short[300:450].mean()) == pytest.approx(sone, rel=tolerance)


@pytest.mark.parametrize("dtype", only(["float32"], DTYPES))
def test_two_ears_are_one_and_a_half_times_one_ear(dtype: str) -> None:
    x = noise(1, 2, 16000)
    x[:, 1] = x[:, 0]
    both = _model(dtype)(x)[0]
    x[:, 1] = 0
    one = _model(dtype)(x)[0]
    assert float((both / one)[0, 200:].mean()) == pytest.approx(1.5, abs=0.005)


def test_one_signal_is_the_same_at_both_ears() -> None:
    x = noise(8000)
    twice = _model("float32")(torch.stack((x, x)))
    for got, expected in zip(_model("float32")(x), twice, strict=True):
        assert_close(got, expected, SINGLE)


def test_ears_can_be_exchanged() -> None:
    x = noise(2, 8000)
    x[1] *= 0.3
    for got, expected in zip(_model()(x), _model()(x.flip(0)), strict=True):
        assert_close(got, expected, Tolerance(1e-12, "sums in another order"))


def test_phon_of_a_1_khz_tone_is_its_level() -> None:
    model = _model()
    for level in (5.0, 40.0, 72.5):
        loudness = model(tone(1000.0, level))[0][300:450].mean()
        assert float(model.compute_loudness_level(loudness)) == pytest.approx(level, abs=0.01)
    ends = model.compute_loudness_level(torch.tensor([0.0, 1e9]))
    assert ends.tolist() == [-10.0, 130.0]
    assert float(model.compute_loudness_level(torch.tensor(2.0), "power")) == 50.0


def test_a_stream_holds_back_no_more_than_it_needs() -> None:
    needed = (BLOCK_FRAMES - 1) * 32 + 1024 + 2048
    for samples, frames in ((needed - 1, 0), (needed, BLOCK_FRAMES)):
        (short, _, _), state = _model("float32").stream(noise(2, samples))
        assert short.shape == (frames,)
        assert state.blocks.tail.shape[-1] < needed + 3072


def test_samples_outside_its_reach_do_not_change_a_frame() -> None:
    x = noise(2, 16000).double()
    y = x.clone()
    y[:, 10000:] = 0.0
    settled = (10000 - 1024 - 2048) // 32 + 1
    short, changed = _model()(x)[0], _model()(y)[0]
    assert_close(changed[:settled], short[:settled], Tolerance(1e-12, "rounding of the transforms"))
    assert not torch.allclose(short[settled + 64 :], changed[settled + 64 :])


@pytest.mark.parametrize("hop", [7, 512, 5000])
def test_chunks_equal_the_whole_at_any_hop(hop: int) -> None:
    model, state, parts = Moore2016(spectrum_kwargs={"hop_length": hop}), None, []
    x = noise(2, 4 * hop + 3000)
    for chunk in (*x.split(1777, -1), x[:, :0]):
        out, state = model.stream(chunk, state, last=chunk.shape[-1] == 0)
        parts.append(out)
    whole = model(x)
    assert len(whole[0]) == x.shape[-1] // hop + 1
    for i in range(2):
        assert torch.equal(torch.cat([part[i] for part in parts], -1), whole[i])


@pytest.mark.parametrize("hop", only([64], [16, 64]))
def test_hop_changes_frames_not_loudness(hop: int) -> None:
    x = torch.from_numpy(load("burst100ms_70")["input"])
    model = Moore2016(dtype=torch.float64, spectrum_kwargs={"hop_length": hop})
    fine, coarse = (16, 32) if hop == 16 else (32, 64)
    short, default = model(x)[0], _loudness("burst100ms_70", "diotic", "float64")[0]
    assert len(short) == len(x) // hop + 1 and model.frame_rate_hz == 32000 / hop
    step = coarse // fine
    pair = (short[::step], default) if hop < 32 else (short, default[::step])
    # Attacks see a rising input in finer or coarser steps.
    assert_close(*pair, Tolerance(0.03, "hop of the gain control"))


@pytest.mark.parametrize(
    "signal",
    [
        torch.zeros(2, 6000),
        torch.full((2, 6000), 1e-40),
        torch.sign(torch.sin(torch.arange(6000.0) / 20)).repeat(2, 1) * 200.0,
        torch.full((2, 6000), 1.0),
        torch.tensor([1.0, 0.0, 0.0, 0.0]).repeat(2, 1),
        torch.zeros(2, 0),
    ],
    ids=["silence", "denormal", "clipped at 140 dB", "constant", "4 samples", "no samples"],
)
def test_extremes_are_finite_with_finite_gradients(signal: Tensor) -> None:
    model = Moore2016(learnable=True)
    x = signal.clone().requires_grad_()
    outputs = model(x)
    assert all(torch.isfinite(values).all() for values in outputs)
    sum(values.sum() for values in outputs).backward()
    assert torch.isfinite(x.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    if signal.numel() and signal.abs().max() < 1e-30:
        assert float(outputs[0].detach().max()) < 1e-12


def test_stages_are_those_of_the_interface() -> None:
    x = noise(1, 2, 1000)
    x[:, 1] = 0
    model = Moore2016(return_stages=True)
    (short, long, _), stages = model(x)
    frames = 1000 // 32 + 1
    shapes = {
        "filtered": (1, 1000), "freqs": (1, frames, 959), "levels": (1, frames, 959),
        "excitation": (1, frames, 150), "inst_spec_loud": (1, frames, 150),
        "stl_spec_loud": (1, frames, 150), "stl_loud": (1, frames), "ltl_loud": (1, frames),
    }  # fmt: skip
    expected = {f"{k}_{ear}": shape for ear in ("left", "right") for k, shape in shapes.items()}
    assert {name: tuple(values.shape) for name, values in stages.items()} == expected
    assert torch.equal(short, stages["stl_loud_left"] + stages["stl_loud_right"])
    assert torch.equal(long, stages["ltl_loud_left"] + stages["ltl_loud_right"])
    assert_close(stages["filtered_left"], model.outer_middle_ear(x[:, 0]), SINGLE)
    assert_close(
        stages["inst_spec_loud_left"], model.specific_loudness(stages["excitation_left"]), SINGLE
    )
    assert stages["levels_right"].max() == -100.0 and stages["ltl_loud_right"].max() < 1e-12
    # The whole signal through the spectrum's own forward: frames end where the signal does.
    components = model.spectrum(stages["filtered_left"].unsqueeze(1))[:, 0].clamp(min=1e-10)
    assert_close(stages["levels_left"], 10 * components.log10(), SINGLE)


def test_parameters_and_repr() -> None:
    model = _model("float32")
    assert model.get_parameters() == {"fs": 32000.0, "learnable": False, "return_stages": False}
    assert model.reset_state() is None
    assert len(model.get_erb_frequencies()) == 150
    text = repr(model)
    assert "hop_length=32" in text and "sigma=0.08" in text and "attack_alpha=0.045" in text


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: _model()(torch.zeros(3, 100)), ShapeError, "expected 2 ears"),
        (
            lambda: _model().stream(torch.zeros(1, 2, 9), _model().stream(torch.zeros(9))[1]),
            ShapeError,
            "as before",
        ),
    ],
)
def test_wrong_input_is_named(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
