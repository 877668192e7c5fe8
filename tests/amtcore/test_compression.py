"""Compression, expansion and Butterworth stages against their formulas and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.signal
import torch
from torch import Tensor

from amtcore.errors import ParameterError
from amtcore.stages.butterworth import ButterworthFilter
from amtcore.stages.compression import BrokenStickCompression, PowerCompression, SquaringExpansion
from amtcore.stages.stage import ChannelStage

from ..compare import FLOAT64, KERNEL64, Tolerance, assert_close

FS = 16000
KNEE = 10 ** ((30 - 100) / 20)
SINGLE = Tolerance(2e-4, "float32 at 3 Hz and 16 kHz")


def _noise(*shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def _power_law(y: Tensor, n: float) -> Tensor:
    return y.sign() * KNEE * (y.abs() / KNEE) ** n


@pytest.mark.parametrize("n", [0.2, 0.3, 1.0, 1.5])
def test_broken_stick_is_linear_below_the_knee_and_a_power_above(n: float) -> None:
    y = _noise(2, 3, 400, scale=2 * KNEE)
    got = BrokenStickCompression(n=n, dtype=torch.float64)(y)
    assert_close(got, torch.where(y.abs() > KNEE, _power_law(y, n), y), KERNEL64)
    assert (y.abs() > KNEE).any() and (y.abs() < KNEE).any()


def test_10_db_more_in_are_3_db_more_out_above_the_knee() -> None:
    stage = BrokenStickCompression(dtype=torch.float64)
    level_db = torch.arange(-20.0, 101.0, 10.0, dtype=torch.float64)
    out_db = 20 * torch.log10(stage((10 ** ((level_db - 100) / 20)).view(1, -1))) + 100
    steps = out_db.diff().flatten()
    assert torch.allclose(steps[level_db[1:] <= 30], torch.tensor(10.0, dtype=torch.float64))
    assert torch.allclose(steps[level_db[1:] > 30], torch.tensor(3.0, dtype=torch.float64))


def test_dboffset_moves_the_knee() -> None:
    y = _noise(1, 2, 100)
    shifted = BrokenStickCompression(dboffset=94.0, dtype=torch.float64)(y * 10 ** (6 / 20))
    assert_close(shifted, BrokenStickCompression(dtype=torch.float64)(y) * 10 ** (6 / 20), FLOAT64)


def test_power_law_holds_everywhere_and_silence_stays_silence() -> None:
    y = _noise(1, 2, 300, scale=3 * KNEE)
    y[..., :5] = 0.0
    stage = PowerCompression(n=0.4, dtype=torch.float64)
    assert_close(stage(y), _power_law(y, 0.4), KERNEL64)
    y.requires_grad_()
    stage(y).sum().backward()
    assert (y.grad[..., :5] == 0).all() and torch.isfinite(y.grad).all()


def test_one_exponent_per_channel() -> None:
    y = _noise(1, 2, 50)
    both = BrokenStickCompression(n=[0.2, 0.4], dtype=torch.float64)(y)
    for channel, n in enumerate((0.2, 0.4)):
        alone = BrokenStickCompression(n=n, dtype=torch.float64)(y[:, channel : channel + 1])
        assert torch.equal(both[:, channel : channel + 1], alone)
    with pytest.raises(ParameterError, match="2 exponents for 3 channels"):
        BrokenStickCompression(n=[0.2, 0.4])(torch.zeros(1, 3, 5))


def test_expansion_squares_the_amplified_signal() -> None:
    y = _noise(1, 2, 50)
    assert_close(SquaringExpansion(dtype=torch.float64)(y), (10**2.5 * y) ** 2, KERNEL64)


@pytest.mark.parametrize("btype", ["low", "high"])
@pytest.mark.parametrize("order", [1, 2, 3, 4, 7])
def test_butterworth_is_scipys(order: int, btype: str) -> None:
    x = _noise(2, 3, 900)
    stage = ButterworthFilter(FS, 150.0, order, btype, dtype=torch.float64)
    sos = scipy.signal.butter(order, 150.0, btype, fs=FS, output="sos")
    assert_close(stage(x), scipy.signal.sosfilt(sos, x.numpy()), FLOAT64)


def test_slow_high_pass_keeps_its_digits_in_single_precision() -> None:
    x = (_noise(1, 1, 4 * FS) + 1.0).float()
    expected = scipy.signal.sosfilt(
        scipy.signal.butter(2, 3.0, "high", fs=FS, output="sos"), x.double().numpy()
    )
    assert_close(ButterworthFilter(FS, 3.0, 2, "high")(x), expected, SINGLE)


@pytest.mark.parametrize("order", [1, 2, 5])
def test_cutoff_is_3_db_down(order: int) -> None:
    t = torch.arange(FS, dtype=torch.float64) / FS
    tone = torch.sin(2 * math.pi * 200.0 * t).unsqueeze(0)
    steady = ButterworthFilter(FS, 200.0, order, dtype=torch.float64)(tone)[0, FS // 2 :]
    assert float(steady.abs().max()) == pytest.approx(math.sqrt(0.5), rel=1e-3)


STAGES = {
    "broken_stick": lambda **k: BrokenStickCompression(n=0.4, knee_db=90.0, **k),
    "power": lambda **k: PowerCompression(n=0.6, knee_db=90.0, **k),
    "expansion": lambda **k: SquaringExpansion(3.0, **k),
    "low_3": lambda **k: ButterworthFilter(FS, 800.0, 3, **k),
    "high_2": lambda **k: ButterworthFilter(FS, 800.0, 2, "high", **k),
}


@pytest.mark.parametrize("name", STAGES)
def test_gradcheck_of_input_and_parameters(name: str) -> None:
    stage: ChannelStage = STAGES[name](learnable=True, dtype=torch.float64)
    x = _noise(1, 2, 9)
    x = torch.where(x.abs() < 0.05, 0.1, x).requires_grad_()
    names = [key for key, _ in stage.named_parameters()]
    values = tuple(p.detach().clone().requires_grad_() for p in stage.parameters())

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(stage, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, (x, *values), eps=1e-7, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", STAGES)
def test_chunks_equal_the_whole_exactly(name: str) -> None:
    stage, x = STAGES[name](), _noise(2, 3, 300).float()
    first, state = stage.stream(x[..., :131])
    second, _ = stage.stream(x[..., 131:], state)
    assert torch.equal(torch.cat((first, second), -1), stage(x))
    assert torch.equal(stage(x[0]), stage(x)[0])
    assert "learnable=True" in repr(STAGES[name](learnable=True))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: BrokenStickCompression(n=0.0), "n must be a finite number above 0"),
        (lambda: ButterworthFilter(FS, 100.0, 0), "order must be"),
        (lambda: ButterworthFilter(FS, 100.0, btype="band"), "btype must be"),
        (lambda: ButterworthFilter(FS, 0.0), "above 0 Hz"),
        (lambda: ButterworthFilter(FS, 8000.0), "half the sampling rate"),
    ],
)
def test_bad_arguments(build, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ParameterError, match=message):
        build()


def test_finite_at_any_amplitude() -> None:
    y = torch.tensor([[0.0, 1e-40, -1e-30, 1e30, -1.0]])
    for stage in (BrokenStickCompression(), PowerCompression()):
        assert np.isfinite(stage(y).numpy()).all()
