"""Spike streams: rates follow the source, chunks equal the whole, events equal dense counts."""

from __future__ import annotations

import functools
import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from amtcore.errors import ParameterError, ShapeError
from amtcore.features.feature_model import Extractor
from amtcore.features.registry import build_extractor
from amtcore.features.spike_encoder import SpikeEncoder, SpikeOptions
from amtcore.features.spike_events import SpikeEvents
from tests.short import drawn

FS = 16000
PARAMS = {"flow": 200.0, "fhigh": 5000.0}


@functools.cache
def _extractor(options: SpikeOptions) -> Extractor:
    return build_extractor(
        "dau1997", fs_hz=FS, params=PARAMS, streams=options.source_streams()
    )  # fmt: skip


def _built(options: SpikeOptions) -> tuple[Extractor, SpikeEncoder]:
    extractor = _extractor(options)
    (info,) = extractor.streams
    return extractor, SpikeEncoder(options, info.width, info.unit)


def _tone(level_db: float, f_hz: float = 1000.0, seconds: float = 1.0) -> np.ndarray:
    """A tone in the model's unit, RMS 1 at 100 dB SPL."""
    t = np.arange(int(FS * seconds)) / FS
    return 10 ** ((level_db - 100) / 20) * np.sqrt(2) * np.sin(2 * np.pi * f_hz * t)


def _assert_same(got: SpikeEvents, expected: SpikeEvents) -> None:
    for name in ("frame", "channel", "count"):
        assert np.array_equal(getattr(got, name), getattr(expected, name)), name
        assert getattr(got, name).dtype == getattr(expected, name).dtype, name
    for name in ("first_frame", "n_frames", "n_channels"):
        assert getattr(got, name) == getattr(expected, name), name


@pytest.mark.parametrize("step_rate_hz", [200.0, 1000.0, 8000.0])
@pytest.mark.parametrize("tau_syn", [0.001, 0.02])
def test_without_a_leak_the_rate_is_gain_times_source(step_rate_hz: float, tau_syn: float) -> None:
    options = SpikeOptions(step_rate_hz=step_rate_hz, gain=2.0, tau_mem=1e6, tau_syn=tau_syn)
    levels = np.array([0.0, 10.0, 50.0, 100.0])
    frames = np.tile(levels, (int(3 * step_rate_hz), 1))
    counts = SpikeEncoder(options, 4, dtype=torch.float64).encode(frames).dense()
    rates = counts[int(step_rate_hz) :].sum(0) / 2
    np.testing.assert_allclose(rates, 2 * levels, atol=0.5)


def test_a_leak_sets_the_lowest_source_that_fires() -> None:
    """v settles at gain s step / (1 - alpha), which a source must bring to the threshold."""
    options = SpikeOptions(gain=2.0, tau_mem=0.02)
    least = (1 - np.exp(-1 / 20)) / (2.0 * 1e-3)
    frames = np.tile([0.99 * least, 1.01 * least], (1000, 1))
    fired = SpikeEncoder(options, 2, dtype=torch.float64).encode(frames).dense().any(0)
    assert fired.tolist() == [False, True]


@pytest.mark.parametrize("f_hz", [500.0, 2000.0])
def test_a_tone_fires_its_own_channel_most(f_hz: float) -> None:
    options = SpikeOptions()
    extractor, encoder = _built(options)
    counts = encoder.encode(extractor.extract([_tone(60, f_hz)])[0]["adaptation"]).dense()
    fc_hz = np.array(extractor.streams[0].fc_hz)
    loudest = fc_hz[counts[200:].sum(0).argmax()]
    assert abs(loudest - f_hz) == np.abs(fc_hz - f_hz).min()
    assert not encoder.encode(extractor.extract([0 * _tone(60)])[0]["adaptation"]).n_spikes


def test_louder_tones_fire_more_and_onsets_most() -> None:
    extractor, encoder = _built(SpikeOptions())
    totals = []
    for level_db in (40.0, 55.0, 70.0):
        counts = encoder.encode(extractor.extract([_tone(level_db)])[0]["adaptation"]).dense()
        totals.append(counts[200:].sum())
        assert counts[:50].sum() / 50 > 2 * counts[200:].sum() / 800
    assert 0 < totals[0] < totals[1] < totals[2]


def test_events_are_those_of_the_plain_equations() -> None:
    """A second route: the neuron's equations in numpy, step by step, on the extractor's frames."""
    options = SpikeOptions(step_rate_hz=500.0, threshold=0.7, max_spikes_per_step=2)
    extractor = build_extractor(
        "dau1997", fs_hz=FS, params=PARAMS, streams=options.source_streams(), dtype="float64"
    )
    frames = extractor.extract([_tone(70, seconds=0.5)])[0]["adaptation"]
    alpha, beta = np.exp(-0.002 / 0.02), np.exp(-0.002 / 0.005)
    v, isyn, rows = np.zeros(frames.shape[1]), np.zeros(frames.shape[1]), []
    for frame in frames:
        isyn = beta * (isyn + frame * 2.0 * 0.002 * (1 - beta) / beta)
        v = alpha * v + isyn
        count = np.clip(np.floor(v / 0.7), 0, 2)
        v = v - 0.7 * count
        rows.append(count)
    events = SpikeEncoder(options, frames.shape[1], dtype=torch.float64).encode(frames)
    _assert_same(events, SpikeEvents.from_dense(np.array(rows)))
    assert events.count.max() == 2


@drawn(20, derandomize=True)
@given(cuts=st.lists(st.integers(0, 4000), max_size=8))
def test_chunks_equal_the_whole(cuts: list[int]) -> None:
    extractor, encoder = _built(SpikeOptions(step_rate_hz=330.0))
    clip = _tone(65, seconds=0.25)
    whole = encoder.encode(extractor.extract([clip])[0]["adaptation"])
    stream = encoder.open_stream(extractor.open_stream())
    edges = [0, *sorted(cuts), len(clip)]
    parts = [stream.push(clip[begin:end]) for begin, end in pairwise(edges)]
    _assert_same(SpikeEvents.concatenate([*parts, stream.finish()]), whole)
    assert len(whole) > 0


def test_a_model_that_looks_ahead_hands_the_rest_over_at_the_end() -> None:
    options = SpikeOptions(step_rate_hz=250.0)
    extractor = build_extractor("osses2021", fs_hz=FS, params={"fhigh": 500.0},
                                streams=options.source_streams())  # fmt: skip
    encoder = SpikeEncoder(options, extractor.streams[0].width)
    clip = _tone(70, 300.0, seconds=0.1)
    stream = encoder.open_stream(extractor.open_stream())
    pushed = stream.push(clip)
    rest = stream.finish()
    assert rest.n_frames > 0 and rest.first_frame == pushed.n_frames
    whole = encoder.encode(extractor.extract([clip])[0]["adaptation"])
    _assert_same(SpikeEvents.concatenate([pushed, rest]), whole)


def test_undecimated_steps_are_the_full_rate_stage() -> None:
    options = SpikeOptions(source="envelope", step_rate_hz=float(FS), gain=2e4)
    extractor, encoder = _built(options)
    frames = extractor.extract([_tone(60, seconds=0.1)])[0]["envelope"]
    assert frames.shape[0] == 1600
    assert encoder.encode(frames).n_frames == 1600 and encoder.encode(frames).n_spikes > 0


def test_neurons_of_a_channel_hear_it_alone() -> None:
    """Several neurons a channel are as many encoders side by side."""
    own = {"threshold": (0.5, 1.0, 2.0), "gain": (1.0, 2.0, 3.0), "tau_syn": (0.001, 0.01, 0.02)}
    frames = 60 * np.random.default_rng(0).random((200, 4))
    together = SpikeEncoder(SpikeOptions(neurons_per_channel=3, **own), 4)
    assert together.channel_offsets == (0, 3, 6, 9, 12)
    counts = together.encode(frames).dense()
    for j in range(3):
        alone = SpikeOptions(**{name: values[j] for name, values in own.items()})
        assert np.array_equal(counts[:, j::3], SpikeEncoder(alone, 4).encode(frames).dense())
    spread = SpikeOptions(neurons_per_channel=3, **{k: v * 4 for k, v in own.items()})
    assert np.array_equal(SpikeEncoder(spread, 4).encode(frames).dense(), counts)


@drawn(30, derandomize=True)
@given(
    counts=arrays(np.int32, st.tuples(st.integers(0, 8), st.integers(1, 5)),
                  elements=st.sampled_from([0, 0, 0, 1, 7])),
    cut=st.integers(0, 8),
)  # fmt: skip
def test_the_three_forms_hold_the_same(counts: np.ndarray, cut: int) -> None:
    events = SpikeEvents.from_dense(counts)
    assert np.array_equal(events.dense(), counts) and events.n_spikes == counts.sum()
    sparse = events.sparse_tensor()
    assert sparse.is_coalesced() and sparse.dtype == torch.int32
    assert np.array_equal(sparse.to_dense().numpy(), counts)
    assert len(events) == np.count_nonzero(counts) and (events.count > 0).all()
    cut = min(cut, len(counts))
    parts = [SpikeEvents.from_dense(counts[:cut]), SpikeEvents.from_dense(counts[cut:], cut)]
    _assert_same(SpikeEvents.concatenate(parts), events)
    assert np.array_equal(parts[1].dense(), counts[cut:])
    order = events.frame * events.n_channels + events.channel
    assert (np.diff(order) > 0).all()


def test_options_survive_json() -> None:
    options = SpikeOptions(
        source="envelope", step_rate_hz=500, gain=[1, 2], threshold=(1.0, 2.0),
        neurons_per_channel=2, max_spikes_per_step=1,
    )  # fmt: skip
    stored = json.loads(json.dumps(options.to_dict()))
    assert SpikeOptions.from_dict(stored) == options
    assert options.source_streams() == {"envelope": {"frame_rate_hz": 500.0, "pool": "mean"}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_rate_hz": 0}, "step_rate_hz must be finite and above 0, got 0"),
        ({"neurons_per_channel": 0}, "neurons_per_channel must be .* got 0"),
        ({"neurons_per_channel": 1.0}, "neurons_per_channel must be .* got 1.0"),
        ({"tau": 0.1}, "no option 'tau'"),
        ({"tau_mem": 0.0}, "tau_mem must be finite and above 0"),
        ({"tau_syn": (-1.0,)}, "tau_syn must be finite and above 0"),
        ({"threshold": -1.0}, "threshold must be finite and above 0, got -1"),
        ({"threshold": (1.0, 2.0)}, r"threshold must be one number, 1 .* or 3 .* got 2"),
        ({"gain": float("nan")}, "gain must be finite"),
        ({"max_spikes_per_step": 0}, "whole number of 1 or more"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        SpikeEncoder(SpikeOptions.from_dict(options), 3)


def test_a_unit_without_a_usual_gain_needs_one() -> None:
    options = SpikeOptions(source="envelope")
    with pytest.raises(ParameterError, match="source 'envelope' in input unit has no usual gain"):
        SpikeEncoder(options, 3, "input unit")
    assert SpikeEncoder(SpikeOptions(), 3).options.gain == 2.0


def test_bad_frames_and_stretches() -> None:
    encoder = SpikeEncoder(SpikeOptions(), 3)
    with pytest.raises(ShapeError, match=r"\(step, 3 channels\), got \(5, 2\)"):
        encoder.encode(np.zeros((5, 2)))
    with pytest.raises(ParameterError, match="data must be finite, got nan"):
        encoder.encode(np.full((5, 3), np.nan))
    with pytest.raises(ParameterError, match="no source of frames"):
        encoder.open_stream().push(np.zeros(10))
    part = SpikeEvents.from_dense(np.ones((2, 3)))
    with pytest.raises(ParameterError, match="starts at step 2"):
        SpikeEvents.concatenate([part, part])
    with pytest.raises(ParameterError, match="at least one"):
        SpikeEvents.concatenate([])
