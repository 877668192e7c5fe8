"""The resampler that GPUs can do: what passes, what dies, and one value whatever its company."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import torchaudio
from hypothesis import given
from hypothesis import strategies as st

from earmill.pipeline.audio.resample import ON_DEVICES, ResampleStream, resample
from earmill.pipeline.audio.sinc_resample import (
    BETA,
    MOST_COEFFICIENTS,
    ROLLOFF,
    ZEROS,
    DeviceResampler,
    sinc_filter,
)
from earmill.pipeline.audio.time_span import resampled_length
from earmill.pipeline.common.errors import ResampleRatioError
from tests.pipeline.test_resample import fit, rms_db, tone
from tests.short import drawn

PAIRS = [(16000, 44100), (44100, 16000), (48000, 44100), (22050, 44100)]
# Level of all that is not the tone: float32 sums over a hundred to eight hundred products.
RESIDUE_DB = -104.0
PHASE_RAD = 5e-6
# (fraction of the lower rate, dB): the preset rolls off late.
FLATNESS = [(0.01, 1e-4), (0.1, 1e-4), (0.3, 1e-3), (0.42, 1e-3), (0.46, 0.6)]
KILL_DB = -140.0


def noise(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


@pytest.mark.parametrize(("from_hz", "to_hz"), PAIRS)
def test_a_tone_in_the_pass_band_keeps_level_and_time(from_hz: float, to_hz: float) -> None:
    for fraction, flat_db in FLATNESS:
        hz = fraction * min(from_hz, to_hz)
        x = tone(hz, from_hz, int(from_hz)).astype(np.float32)
        y = resample(x, from_hz, to_hz, ON_DEVICES)
        amplitude, phase, residue = fit(y, hz, to_hz)
        assert abs(20 * np.log10(amplitude)) < flat_db
        assert abs(phase) < PHASE_RAD
        assert rms_db(residue) - rms_db(tone(hz, to_hz, len(y))) < RESIDUE_DB


@pytest.mark.parametrize("fraction", [0.52, 0.6, 1.2])
def test_a_tone_above_the_new_nyquist_dies(fraction: float) -> None:
    x = tone(fraction * 16000, 44100, 44100).astype(np.float32)
    y = resample(x, 44100, 16000, ON_DEVICES)
    assert rms_db(y[4000:-4000]) - rms_db(x) < KILL_DB


@pytest.mark.parametrize(("from_hz", "to_hz"), PAIRS)
def test_segments_are_what_one_call_of_torchaudio_gives(from_hz: int, to_hz: int) -> None:
    """Over more than one segment, so that their edges are among what is compared."""
    x = noise(2 * sinc_filter(from_hz, to_hz).segment_in + 77)
    ours = resample(x, from_hz, to_hz, ON_DEVICES)
    theirs = torchaudio.functional.resample(
        torch.from_numpy(x),
        from_hz,
        to_hz,
        resampling_method="sinc_interp_kaiser",
        lowpass_filter_width=ZEROS,
        rolloff=ROLLOFF,
        beta=BETA,
    ).numpy()
    # Another order of the same float32 sums; a sample that is off by one place differs by 1.
    np.testing.assert_allclose(ours, theirs[: len(ours)], rtol=0, atol=5e-5)
    assert len(theirs) - len(ours) in (0, 1)


@drawn(15)
@given(
    pair=st.sampled_from([*PAIRS, (8000, 8000)]),
    n=st.integers(0, 150_000),
    cuts=st.lists(st.integers(0, 150_000), max_size=5),
)
def test_chunked_equals_whole(pair: tuple[float, float], n: int, cuts: list[int]) -> None:
    x = noise(n, seed=n)
    stream = ResampleStream(*pair, ON_DEVICES)
    edges = [0, *sorted(min(cut, n) for cut in cuts), n]
    parts = [stream.push(x[a:b]) for a, b in pairwise(edges)]
    whole = resample(x, *pair, ON_DEVICES)
    np.testing.assert_array_equal(np.concatenate([*parts, stream.finish()]), whole)
    assert len(whole) == resampled_length(n, *pair)


@pytest.mark.parametrize("at_once", [1, 3])
def test_on_a_device_a_clip_does_not_depend_on_its_company(at_once: int) -> None:
    """With one segment a call, as on a CPU, the values are those of the decode threads' way."""
    on_device = DeviceResampler(torch.device("cpu"))
    on_device._at_once = at_once
    clips = [torch.from_numpy(noise(n, seed=n)) for n in (5000, 1, 90_000, 16_000)]
    ears = [clips[0][None], clips[1][None], clips[2].repeat(2, 1), clips[3][None]]
    together = on_device(ears, 16000, 44100)
    for clip, made in zip(ears, together, strict=True):
        if at_once == 1:
            for ear, row in zip(clip, made, strict=True):
                alone = resample(ear.numpy(), 16000, 44100, ON_DEVICES)
                np.testing.assert_array_equal(row.numpy(), alone)
        assert torch.equal(made, on_device([clip], 16000, 44100)[0])
    assert on_device(ears, 16000, 16000)[2] is ears[2]


def test_rates_without_a_small_ratio_are_refused_before_they_cost_memory() -> None:
    for from_hz, to_hz in [(44100, 44101), (8000, 16000.5)]:
        with pytest.raises(ResampleRatioError, match=r"44100:44101|16000:32001") as caught:
            ResampleStream(from_hz, to_hz, ON_DEVICES)
        assert "soxr_vhq" in str(caught.value) and caught.value.stage == "resample"
    # What is in use stays far below: the worst pair of usual rates.
    worst = sinc_filter(11025, 48000).kernel.kernel.numel()
    assert 10 * worst < MOST_COEFFICIENTS
