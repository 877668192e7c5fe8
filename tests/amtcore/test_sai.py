"""The stabilised auditory image against stored frames, a plain loop, and its properties."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from amtcore import CARFAC, SAI
from amtcore.errors import ParameterError, ShapeError, StateError
from amtcore.testing.models import ModelConformance

from ..compare import Tolerance, assert_close
from .golden_files import DTYPES, load, names

CASES = list(product(names("sai"), ("frames",)))
WIDTHS = ("sai_width", "future_lags", "trigger_window_width", "input_segment_width",
          "num_triggers_per_frame")  # fmt: skip
TOLERANCES = {
    "float64": Tolerance(1e-12, "order of the blend"),
    "float32": Tolerance(1e-6, "rounding of the pattern; the triggers are the same"),
}
SMALL = {"sai_width": 20, "future_lags": 6, "trigger_window_width": 31, "input_segment_width": 23}


def pattern(*shape: int, seed: int = 1) -> Tensor:
    """Random pattern with values of both signs."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).double() - 0.2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "key"), CASES)
def test_stored_array(name: str, key: str, dtype: str) -> None:
    stored = load(name)
    widths = {width: int(stored[width]) for width in WIDTHS}
    model = SAI(float(stored["fs"]), **widths, dtype=DTYPES[dtype])
    made = model(torch.tensor(stored["nap"]))["sai"]
    assert_close(made, stored[key], TOLERANCES[dtype], name)


def plain(nap: np.ndarray[Any, Any], triggers: np.ndarray[Any, Any], model: SAI) -> list[Any]:
    """Frames by a loop over channels and windows, from the equations alone."""
    lags, future, width = model.sai_width, model.future_lags, model.trigger_window_width
    hop, n = model.input_segment_width, model.num_triggers_per_frame
    size = lags + int((1 + (n - 1) / 2) * width)
    start = size - width - (n - 1) * (width // 2)
    window = np.array([math.sin(math.pi * (j + 1) / width) for j in range(width)])
    image, frames = np.zeros((len(nap), lags)), []
    for end in range(hop, nap.shape[1] + 1, hop):
        for channel, w in product(range(len(nap)), range(n)):
            buffers = []
            for each in (nap, triggers):
                buffer = np.zeros(size)
                newest = each[channel, max(0, end - size) : end]
                buffer[size - len(newest) :] = newest
                buffers.append(buffer)
            s = start - future + w * (width // 2)
            values = [buffers[1][s + j] * window[j] for j in range(width)]
            j = values.index(max(values))
            peak = values[j]
            if peak <= 0:
                j, peak = int(window.argmax()), window.max()
            alpha = (0.025 + peak) / (0.5 + peak)
            segment = buffers[0][s + j + future - lags + 1 : s + j + future + 1]
            image[channel] = (1 - alpha) * image[channel] + alpha * segment
        frames.append(image.copy())
    return frames


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("other", [False, True])
def test_as_the_plain_loop(n: int, other: bool) -> None:
    """Odd windows, any number of triggers, and triggers from another pattern."""
    model = SAI(8000, **SMALL, num_triggers_per_frame=n, dtype=torch.float64)
    nap = pattern(3, 400)
    nap[1] -= 2.0  # nothing to trigger on
    triggers = pattern(3, 400, seed=2) if other else nap
    made, _ = model.images(nap, None, triggers if other else None)
    wanted = np.array(plain(nap.numpy(), triggers.numpy(), model))
    assert_close(made, wanted, TOLERANCES["float64"])


def test_a_periodic_pattern_stands_still() -> None:
    """Pulses every 5 ms lie at the same lags in all late frames: the trigger and its neighbours."""
    fs, period = 8000, 40
    nap = torch.zeros(1, fs, dtype=torch.float64)
    nap[:, ::period] = 1.0
    model = SAI(fs, dtype=torch.float64)
    late = model(nap)["sai"][10:, 0]
    assert_close(late, late[:1].expand_as(late), Tolerance(1e-3, "the blend with first frames"))
    trigger = model.sai_width - 1 - model.future_lags
    assert [int(k) for k in late[-1].argsort(descending=True)[:4].sort().values] == [
        k for k in range(model.sai_width) if (k - trigger) % period == 0
    ]


def test_default_widths() -> None:
    model = SAI(22050)
    sizes = [getattr(model, width) for width in WIDTHS]
    assert sizes == [441, 220, 882, 441, 4]


def test_a_sound_is_the_pattern_of_its_cochlea() -> None:
    x = 0.02 * torch.randn(9000, generator=torch.Generator().manual_seed(0))
    model = SAI(8000, carfac_kwargs={"ihc": "one_cap"})
    nap = CARFAC(8000, ihc="one_cap")(x)["nap"]
    made = model.outputs(x)["sai"]
    assert torch.equal(made, model(nap)["sai"].flatten(-2))
    assert made.shape == (56, 53 * 160)


@pytest.mark.parametrize("cuts", [(0, 1, 9), (22, 23, 24, 300)])
def test_chunks_have_the_bits_of_the_whole(cuts: tuple[int, ...]) -> None:
    model, nap = SAI(8000, **SMALL), pattern(2, 3, 500).float()
    whole, state, parts = model(nap)["sai"], None, []
    for part in torch.tensor_split(nap, cuts, -1):
        made, state = model.images(part, state)
        parts.append(made)
    assert torch.equal(torch.cat(parts, -3), whole)


def test_a_batch_is_its_patterns() -> None:
    model, nap = SAI(8000, **SMALL), pattern(2, 3, 500).float()
    assert torch.equal(model(nap)["sai"][1], model(nap[1])["sai"])


@pytest.mark.parametrize("samples", [0, 1, 22, 23])
def test_short_patterns(samples: int) -> None:
    made = SAI(8000, **SMALL)(torch.zeros(3, samples))["sai"]
    assert made.shape == (samples // 23, 3, 20)
    assert not made.any()


def test_gradient_of_the_pattern() -> None:
    model = SAI(8000, **SMALL, num_triggers_per_frame=2, dtype=torch.float64)
    nap = pattern(2, 60).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: model(x)["sai"], (nap,), eps=1e-7)


def test_not_a_number_is_not_hidden() -> None:
    nap = pattern(2, 200).float()
    nap[0, 100] = torch.nan
    made = SAI(8000, **SMALL)(nap)["sai"]
    assert made[-1, 0].isnan().any() and made[:, 1].isfinite().all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sai_width": 400}, "below trigger_window_width"),
        ({"input_segment_width": 2000}, "input_segment_width below"),
        ({"future_lags": 400}, "future_lags at most"),
        ({"num_triggers_per_frame": 0}, "num_triggers_per_frame"),
        ({"carfac_kwargs": {"n_ears": 2}}, "one ear"),
    ],
)
def test_refused_arguments(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        SAI(8000, **wrong)


def test_refused_patterns_and_states() -> None:
    model = SAI(8000, **SMALL)
    with pytest.raises(ShapeError, match="channel, time"):
        model(torch.zeros(100))
    with pytest.raises(ShapeError, match="triggers of its shape"):
        model.images(torch.zeros(2, 100), None, torch.zeros(1, 100))
    _, state = model.images(torch.zeros(2, 100))
    with pytest.raises(StateError):
        model.images(torch.zeros(3, 100), state)


class TestSAI(ModelConformance):
    """The model as jobs run it, with few channels."""

    model, fs_hz = "sai", 8000
    params = {"carfac_kwargs": {"car_kwargs": {"erb_per_step": 2.0}}}  # noqa: RUF012
    other_params = {"sai_width": 100}  # noqa: RUF012
