"""Listeners with a hearing loss: higher thresholds and less compression."""

from __future__ import annotations

import functools
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

from ..short import spread

MODERATE = {250: 10, 500: 15, 1000: 20, 2000: 35, 4000: 50, 8000: 60}
STEEP = {1000: 10, 2000: 60, 4000: 60, 6000: 20}
AUDIOGRAMS = {"moderate": MODERATE, "steep": STEEP}
FLAT = {1000: 0, 4000: 0}
OCTAVES_HZ = (250, 500, 1000, 2000, 4000, 8000)
FS = 44100
#: Level of tones through CARFAC, whose gain control acts from low levels on.
AT_DB = 20.0


def tones(fc_hz: float, levels_db: list[float], rms1_db: float, fs: float = FS) -> Tensor:
    """Return tones of 0.3 s, (level, time), with a ramp of 20 ms."""
    t = torch.arange(round(0.3 * fs), dtype=torch.float64) / fs
    rms = 10.0 ** ((torch.tensor(levels_db, dtype=torch.float64) - rms1_db) / 20.0)
    tone = torch.sin(2 * torch.pi * fc_hz * t) * (t / 0.02).clamp(max=1.0)
    return rms[:, None] * 2.0**0.5 * tone


def steady(output: Tensor, pool: str) -> Tensor:
    """Return the RMS or mean of the second half of each row.

    The mean has a Hann window: a part of a period would count for more than a quiet tone's mean.
    """
    half = output[..., output.shape[-1] // 2 :]
    if pool == "rms":
        return half.square().mean(-1).sqrt()
    window = torch.hann_window(half.shape[-1], dtype=torch.float64)
    return (half * window).sum(-1) / window.sum()


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


#: Outputs of the normal listener, with whom each audiogram is compared.
normal_paulick = functools.cache(lambda fc_hz: paulick(fc_hz, [0.0], None))
normal_carfac = functools.cache(lambda fc_hz: carfac(fc_hz, [AT_DB], None))


def shift_db(normal: Tensor, impaired: Tensor, levels_db: list[float], from_db: float) -> float:
    """Return by how much the level of the normal listener's output is raised."""
    logs = impaired.log().numpy()
    assert (np.diff(logs) > 0).all()
    assert logs[0] < float(normal.log()) < logs[-1], "the levels must enclose the threshold"
    return float(np.interp(float(normal.log()), logs, levels_db)) - from_db


@pytest.mark.parametrize(("fc_hz", "steepness"), spread(2, OCTAVES_HZ, AUDIOGRAMS))
def test_paulicks_threshold_rises_by_the_loss(fc_hz: int, steepness: str) -> None:
    """Quiet sound is below the knee with and without the loss, where the gain is solved exactly."""
    audiogram = AUDIOGRAMS[steepness]
    loss = float(losses_db(audiogram, np.array([float(fc_hz)]))[0])
    levels = [loss - 1.0, loss, loss + 1.0]
    normal, impaired = normal_paulick(fc_hz), paulick(fc_hz, levels, audiogram)
    assert shift_db(normal[0], impaired, levels, 0.0) == pytest.approx(loss, abs=0.05)


@pytest.mark.parametrize("loss", [3.0, 25.0, 60.0, 110.0])
def test_the_form_of_2008_loses_the_same(loss: float) -> None:
    """Its paths are in opposite phase at high frequencies."""
    fc_hz = [125.0, 500.0, 2000.0, 8000.0]
    banks = (
        DRNLFilterbank(fc_hz, FS, "jepsen2008", dtype=torch.float64, audiogram=audiogram)
        for audiogram in (None, {1000: loss})
    )
    quiet = torch.stack([tones(hz, [0.0], 180.0)[0] for hz in fc_hz])
    normal, impaired = (steady(bank(quiet), "rms").diagonal() for bank in banks)
    assert (20 * torch.log10(normal / impaired)).tolist() == pytest.approx([loss] * 4, abs=0.05)


@pytest.mark.parametrize(("fc_hz", "steepness"), spread(2, OCTAVES_HZ, AUDIOGRAMS))
def test_carfacs_threshold_rises_by_the_loss(fc_hz: int, steepness: str) -> None:
    """The gain control acts from low levels on, so the shift is not exact."""
    audiogram = AUDIOGRAMS[steepness]
    normal, own_hz = normal_carfac(fc_hz)
    loss = float(losses_db(audiogram, np.array([own_hz]))[0])
    levels = [AT_DB + loss - 2.0, AT_DB + loss, AT_DB + loss + 2.0]
    impaired, _ = carfac(fc_hz, levels, audiogram)
    found = shift_db(normal[0], impaired, levels, AT_DB)
    assert found == pytest.approx(loss, abs=0.6)


@pytest.mark.parametrize("fc_hz", [1000, 2000, 4000])
def test_compression_is_reduced(fc_hz: int) -> None:
    """From 50 to 70 dB SPL a normal cochlea grows by 0.28 to 0.51 dB per dB, ours by more."""
    levels = [50.0, 70.0]
    normal = carfac(fc_hz, levels, None, "bm")[0], paulick(fc_hz, levels, None)
    impaired = carfac(fc_hz, levels, MODERATE, "bm")[0], paulick(fc_hz, levels, MODERATE)
    for ours, theirs in zip(impaired, normal, strict=True):
        growth, of_normal = (float(torch.log10(each[1] / each[0])) for each in (ours, theirs))
        assert of_normal < 0.52
        assert growth > of_normal + (0.15 if fc_hz == 1000 else 0.35)


def test_shares_reach_the_constants() -> None:
    """Inner hair cells scale the output at all levels, outer hair cells only `a`, not below 0."""
    normal, outer, inner, most = (
        DRNLFilterbank([1000.0], FS, dtype=torch.float64, audiogram=audiogram, ohc_share=share)
        for audiogram, share in ((None, 0.5), ({1: 20}, 1.0), ({1: 20}, 0.0), ({1: 130}, 1.0))
    )
    for name in ("lin_gain", "b"):
        assert torch.equal(getattr(outer, name), getattr(normal, name))
        torch.testing.assert_close(getattr(inner, name), 0.1 * getattr(normal, name))
    torch.testing.assert_close(inner.a, 0.1 * normal.a)
    assert 0.0 < float(outer.a) < 0.2 * float(normal.a) and float(most.a) == 0.0
    rest = 130.0 + 20.0 * float(torch.log10(most.lin_gain / normal.lin_gain))
    assert rest == pytest.approx(34.3, abs=0.1)  # the gain of the nonlinear path at 1 kHz


def test_better_hearing_than_normal_raises_the_gain() -> None:
    normal, better = (
        DRNLFilterbank([1000.0], FS, dtype=torch.float64, audiogram=audiogram)
        for audiogram in (None, {1000: -15})
    )
    assert float(better.a) > float(normal.a) and float(better.b) > float(normal.b)
    tone = tones(1000, [20.0], 104.0, 22050)[0].float()
    ours, theirs = (CARFAC(open_loop=True, audiogram=each)(tone) for each in ({1: -15}, None))
    assert torch.equal(ours["bm"], theirs["bm"])  # health cannot rise above 1
    assert float(ours["nap"].abs().max()) > float(theirs["nap"].abs().max())


@pytest.mark.parametrize("model", ["paulick2024", "carfac"])
def test_no_loss_is_normal_hearing_to_the_bit(model: str) -> None:
    noise = 0.1 * np.random.default_rng(3).standard_normal(8000).astype(np.float32)
    normal = build_extractor(model, fs_hz=22050).extract([noise])[0]
    flat = build_extractor(model, fs_hz=22050, listener={"audiogram": FLAT}).extract([noise])[0]
    deaf = build_extractor(model, fs_hz=22050, listener={"audiogram": {1: 40}}).extract([noise])[0]
    for name, frames in normal.items():
        assert np.array_equal(frames, flat[name]) and np.abs(frames).max() > 0
        assert not np.allclose(frames, deaf[name])


def test_losses_between_and_beyond_the_frequencies() -> None:
    at = np.array([100.0, 1000.0, 2000.0, 4000.0, 9000.0])
    assert losses_db({4000: 50, "1000": 20.0}, at) == pytest.approx([20, 20, 35, 50, 50])
    assert checked_audiogram("audiogram", {4000.5: 50, "250": 1}) == {"250": 1.0, "4000.5": 50.0}


WRONG: list[Any] = [
    {}, [10], 3.0, {0: 10}, {-250: 10}, {"low": 10}, {250: 131}, {250: -21}, {250: None},
    {250: float("nan")}, {float("inf"): 10}, {250: 10, "250.0": 10}, {250: True},
]  # fmt: skip


@pytest.mark.parametrize("audiogram", WRONG, ids=str)
@pytest.mark.parametrize("constructor", [Paulick2024, CARFAC])
def test_wrong_audiograms_are_refused(constructor: Any, audiogram: Any) -> None:
    with pytest.raises(ParameterError, match="audiogram must be dB HL by frequency in Hz"):
        constructor(audiogram=audiogram)


def test_arguments_that_contradict_an_audiogram_are_refused() -> None:
    with pytest.raises(ParameterError, match="expected subject NH with an audiogram, got HIx"):
        Paulick2024(audiogram={1000: 20}, drnl_kwargs={"subject": "HIx"})
    with pytest.raises(ParameterError, match="expected no ohc_health"):
        CARFAC(audiogram={1000: 20}, ohc_health=0.5)
    with pytest.raises(ParameterError, match="no health_start 'healthy' with open_loop"):
        CARFAC(audiogram={1000: 20}, open_loop=True, health_start="healthy")
    with pytest.raises(ParameterError, match="ohc_share must be a finite number between 0 and 1"):
        CARFAC(audiogram={1000: 20}, ohc_share=1.5)


LISTENER: dict[str, Any] = {"name": "mild", "audiogram": MODERATE}


def test_a_name_renames_streams_and_nothing_else() -> None:
    noise = 0.1 * np.random.default_rng(3).standard_normal(8000).astype(np.float32)
    streams: dict[str, Any] = {
        "envelope": {"frame_rate_hz": 50},
        "spikes": {"source": "adaptation"},
    }
    asked: dict[str, Any] = {"fs_hz": 22050, "streams": streams}
    named = build_extractor("paulick2024", **asked, listener=LISTENER)
    plain = build_extractor("paulick2024", **asked, params={"audiogram": MODERATE})
    assert [info.name for info in named.streams] == ["envelope_mild", "spikes_mild"]
    assert named.n_frames(8000) == {f"{k}_mild": n for k, n in plain.n_frames(8000).items()}
    ours, theirs = named.extract([noise])[0], plain.extract([noise])[0]
    assert np.array_equal(ours["envelope_mild"], theirs["envelope"])
    assert np.array_equal(ours["spikes_mild"].to_columns(), theirs["spikes"].to_columns())
    chunks = named.open_stream()
    parts = [chunks.push(noise[:3000]), chunks.push(noise[3000:]), chunks.finish()]
    assert np.array_equal(
        np.concatenate([p["envelope_mild"] for p in parts]), ours["envelope_mild"]
    )
    record, other = named.describe(), plain.describe()
    assert record["buffers_sha256"] == other["buffers_sha256"]
    assert [each["name"] for each in record["streams"]] == ["envelope_mild", "spikes_mild"]
    assert record["streams"][1]["options"] == other["streams"][1]["options"]
    assert named.memory_s == plain.memory_s and named.grid_s == plain.grid_s


def test_refused_listeners() -> None:
    with pytest.raises(ParameterError, match="no listener: expected one of paulick2024, carfac"):
        build_extractor("dau1997", listener=LISTENER)
    with pytest.raises(ParameterError, match="a listener has no key 'age'"):
        build_extractor("carfac", listener=LISTENER | {"age": 70})
    with pytest.raises(ParameterError, match="expected a listener's name of letters"):
        build_extractor("carfac", listener=LISTENER | {"name": "a-b"})
    with pytest.raises(ParameterError, match="expected audiogram in the listener"):
        build_extractor("carfac", listener={"name": "mild"})
    with pytest.raises(ParameterError, match="neither audiogram nor ohc_share in params"):
        build_extractor("carfac", listener=LISTENER, params={"ohc_share": 0.5})
