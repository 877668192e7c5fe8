"""Listeners with a hearing loss: raised thresholds, less compression, and unchanged normal hearing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from amtcore import CARFAC, DRNLFilterbank, Paulick2024
from amtcore.errors import ParameterError
from amtcore.features.registry import build_extractor
from amtcore.listener import checked_audiogram, losses_db

MODERATE = {250: 10, 500: 15, 1000: 20, 2000: 35, 4000: 50, 8000: 60}
STEEP = {1000: 10, 2000: 60, 4000: 60, 6000: 20}
FLAT = {1000: 0, 4000: 0}
#: Octaves, and the level in dB SPL of the tone whose output is the fixed small value.
OCTAVES_HZ = (250, 500, 1000, 2000, 4000, 8000)
FS = 44100


def tones(fc_hz: float, levels_db: list[float], rms1_db: float, fs: float = FS) -> Tensor:
    """Return tones of 0.3 s, (level, time), with a ramp of 20 ms."""
    t = torch.arange(round(0.3 * fs), dtype=torch.float64) / fs
    rms = 10.0 ** ((torch.tensor(levels_db, dtype=torch.float64) - rms1_db) / 20.0)
    tone = torch.sin(2 * torch.pi * fc_hz * t) * (t / 0.02).clamp(max=1.0)
    return rms[:, None] * 2.0**0.5 * tone


def steady(output: Tensor, pool: str) -> Tensor:
    """Return the RMS or mean of the second half of each row."""
    half = output[..., output.shape[-1] // 2 :]
    return half.square().mean(-1).sqrt() if pool == "rms" else half.mean(-1)


def paulick(fc_hz: float, levels_db: list[float], audiogram: Mapping[Any, float] | None) -> Tensor:
    """Return the hair cell's RMS output for tones at the channel's frequency."""
    model = Paulick2024(
        FS, fc_hz, 1.001 * fc_hz, 2, return_stages=True, dtype=torch.float64, audiogram=audiogram
    )
    with torch.no_grad():
        return steady(model(tones(fc_hz, levels_db, 93.9794))[1]["ihc"][:, 0], "rms")


def carfac(
    fc_hz: float, levels_db: list[float], audiogram: Mapping[Any, float] | None, output: str = "nap"
) -> tuple[Tensor, float]:
    """Return a channel's output for tones at its frequency, and this frequency in Hz."""
    model = CARFAC(22050, dtype=torch.float64, audiogram=audiogram)
    k = int((model.fc - fc_hz).abs().argmin())
    own_hz = float(model.fc[k])
    made = model(tones(own_hz, levels_db, 104.0, 22050))[output][:, k]
    return steady(made, "rms" if output == "bm" else "mean"), own_hz


def shift_db(normal: Tensor, impaired: Tensor, levels_db: list[float], from_db: float) -> float:
    """Return by how much the level of the normal listener's output is raised."""
    logs = impaired.log().numpy()
    assert (np.diff(logs) > 0).all()
    assert logs[0] < float(normal.log()) < logs[-1], "the levels must enclose the threshold"
    return float(np.interp(float(normal.log()), logs, levels_db)) - from_db


@pytest.mark.parametrize("audiogram", [MODERATE, STEEP], ids=["moderate", "steep"])
@pytest.mark.parametrize("fc_hz", OCTAVES_HZ)
def test_paulicks_threshold_rises_by_the_loss(fc_hz: int, audiogram: dict[int, float]) -> None:
    """The low-level gain is solved exactly; the knee of the loss lies above that of the normal."""
    loss = float(losses_db(audiogram, np.array([float(fc_hz)]))[0])
    levels = [loss - 1.0, loss, loss + 1.0]
    normal, impaired = paulick(fc_hz, [0.0], None), paulick(fc_hz, levels, audiogram)
    assert shift_db(normal[0], impaired, levels, 0.0) == pytest.approx(loss, abs=0.05)


@pytest.mark.parametrize("fc_hz", OCTAVES_HZ)
def test_carfacs_threshold_rises_by_the_loss(fc_hz: int) -> None:
    """The gain control acts from low levels on, so the shift is not exact."""
    at_db = 20.0
    normal, own_hz = carfac(fc_hz, [at_db], None)
    loss = float(losses_db(MODERATE, np.array([own_hz]))[0])
    levels = [at_db + loss - 2.0, at_db + loss, at_db + loss + 2.0]
    impaired, _ = carfac(fc_hz, levels, MODERATE)
    found = shift_db(normal[0], impaired, levels, at_db)
    print(fc_hz, loss, found)
    assert found == pytest.approx(loss, abs=1.0)


@pytest.mark.parametrize("fc_hz", OCTAVES_HZ[2:])
def test_compression_is_reduced(fc_hz: int) -> None:
    """From 50 to 70 dB SPL the output of a normal cochlea grows by less than 0.5 dB per dB."""
    levels = [50.0, 70.0]
    for ours in (
        lambda audiogram: carfac(fc_hz, levels, audiogram, "bm")[0],
        lambda audiogram: paulick(fc_hz, levels, audiogram),
    ):
        normal, impaired = (
            float((20 * torch.log10(found[1] / found[0])) / 20)
            for found in (ours(None), ours(MODERATE))
        )
        print(fc_hz, normal, impaired)
        assert normal < impaired


@pytest.mark.parametrize("model", ["paulick2024", "carfac"])
def test_no_loss_is_normal_hearing_to_the_bit(model: str) -> None:
    noise = 0.1 * np.random.default_rng(3).standard_normal(8000).astype(np.float32)
    normal = build_extractor(model, fs_hz=22050).extract([noise])[0]
    flat = build_extractor(model, fs_hz=22050, listener={"audiogram": FLAT}).extract([noise])[0]
    deaf = build_extractor(model, fs_hz=22050, listener={"audiogram": {1: 40}}).extract([noise])[0]
    for name, frames in normal.items():
        assert np.array_equal(frames, flat[name]) and np.abs(frames).max() > 0
        assert not np.allclose(frames, deaf[name])
