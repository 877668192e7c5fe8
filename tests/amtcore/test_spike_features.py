"""The spikes stream of every chain model: whole equals chunks equals its source through neurons."""

from __future__ import annotations

import functools
import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amtcore.errors import ParameterError
from amtcore.features import spike_encoder as spike_features
from amtcore.features.feature_model import Extractor
from amtcore.features.registry import build_extractor, get_model, list_models
from amtcore.features.spike_encoder import SpikeEncoder, SpikeOptions, join
from amtcore.features.spike_events import SpikeEvents
from amtcore.features.stream_info import StreamInfo
from tests.short import drawn

FS = 16000
# Few channels, and a gain where the source's unit has no usual one.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dau1997": ({"flow": 200.0, "fhigh": 4000.0}, {}),
    "osses2021": ({"fhigh": 500.0}, {"step_rate_hz": 250.0}),
    "king2019": ({"basef": 1000.0}, {"gain": 1e6, "pool": "rms"}),
    "paulick2024": ({"flow": 500.0, "fhigh": 1200.0}, {"source": "envelope", "gain": 2e5}),
}


@functools.cache
def built(model: str) -> Extractor:
    params, options = MODELS[model]
    return build_extractor(model, fs_hz=FS, params=params, streams={"spikes": options})


def noise(samples: int, seed: int = 0) -> np.ndarray:
    return (0.05 * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


def assert_same(got: SpikeEvents, expected: SpikeEvents) -> None:
    assert np.array_equal(got.to_columns(), expected.to_columns())
    for name in ("first_frame", "n_frames", "n_channels"):
        assert getattr(got, name) == getattr(expected, name), name


@pytest.mark.parametrize("model", MODELS)
def test_events_are_the_sources_frames_through_the_neurons(model: str) -> None:
    """A second route: frames of the source stream, then the encoder, by hand."""
    params, given_options = MODELS[model]
    options = SpikeOptions(**given_options)
    frames = build_extractor(model, fs_hz=FS, params=params, streams=options.source_streams())
    (source,) = frames.streams
    encoder = SpikeEncoder(options, source.width, source.unit)
    clip = noise(4000)
    expected = encoder.encode(frames.extract([clip])[0][options.source])
    got = built(model).extract([clip])[0]["spikes"]
    assert_same(got, expected)
    assert len(got) > 0 and got.n_frames == built(model).n_frames(len(clip))["spikes"]


@pytest.mark.parametrize("model", MODELS)
@drawn(8, derandomize=True)
@given(cuts=st.lists(st.integers(0, 3000), max_size=6))
def test_chunks_equal_the_whole(model: str, cuts: list[int]) -> None:
    clip, extractor = noise(3000), built(model)
    stream = extractor.open_stream()
    edges = [0, *sorted(cuts), len(clip)]
    parts = [stream.push(clip[begin:end])["spikes"] for begin, end in pairwise(edges)]
    parts.append(stream.finish()["spikes"])
    assert_same(join(parts), extractor.extract([clip])[0]["spikes"])


@drawn(8, derandomize=True)
@given(lengths=st.lists(st.integers(0, 3000), max_size=5))
def test_neighbours_and_stretches_change_nothing(lengths: list[int]) -> None:
    """Also when the frames held at a time are few."""
    clips = [noise(n, seed) for seed, n in enumerate(lengths)]
    extractor = built("osses2021")
    alone = [extractor.extract([clip])[0]["spikes"] for clip in clips]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spike_features, "STRETCH_BYTES", 500)
        together = extractor.extract(clips)
    for one, other in zip(alone, together, strict=True):
        assert_same(other["spikes"], one)


def test_spikes_beside_frames_leave_both_as_they_are() -> None:
    params, options = MODELS["dau1997"]
    both = build_extractor(
        "dau1997", fs_hz=FS, params=params, streams={"modulation": {}, "spikes": options}
    )
    alone = build_extractor("dau1997", fs_hz=FS, params=params)
    clip = noise(4000)
    got = both.extract([clip])[0]
    assert np.array_equal(got["modulation"], alone.extract([clip])[0]["modulation"])
    assert_same(got["spikes"], built("dau1997").extract([clip])[0]["spikes"])
    assert both.n_frames(len(clip)) == {"modulation": 25, "spikes": 250}


def test_the_stream_describes_itself() -> None:
    options = {"neurons_per_channel": 2, "threshold": [0.5, 1.0], "pool": "max"}
    extractor = build_extractor("dau1997", fs_hz=FS, streams={"spikes": options})
    (info,) = extractor.streams
    channels = len(info.fc_hz)
    assert info.width == 2 * channels
    assert info.channel_offsets == tuple(range(0, 2 * channels + 1, 2))
    assert (info.unit, info.pool, info.layout) == ("spikes", "max", "events")
    assert (info.frame_rate_hz, info.axes, info.mfc_hz) == (1000.0, ("time", "channel"), ())
    stored = json.loads(json.dumps(info.to_dict()))
    assert stored["layout"] == "events" and StreamInfo.from_dict(stored) == info
    (frames,) = build_extractor("dau1997", fs_hz=FS).streams
    assert "layout" not in frames.to_dict()
    (described,) = extractor.describe()["streams"]
    assert described["options"]["gain"] == 2.0
    assert SpikeOptions.from_dict(described["options"]).threshold == (0.5, 1.0)


@pytest.mark.parametrize(
    "change",
    [{"tau_mem": 0.03}, {"tau_syn": 0.01}, {"gain": 3.0}, {"threshold": 2.0}, {"bias": 0.1},
     {"step_rate_hz": 500.0}, {"max_spikes_per_step": 1}],
)  # fmt: skip
def test_hash_follows_the_neurons(change: dict[str, Any]) -> None:
    def hashed(options: dict[str, Any]) -> str:
        return build_extractor("dau1997", fs_hz=FS, streams={"spikes": options}).buffers_sha256()

    assert hashed({"gain": 2.0}) == hashed({}) != hashed(change)


def test_hash_without_neurons_is_the_models_own() -> None:
    frames = {"adaptation": {}, "modulation": {}}
    plain = build_extractor("dau1997", fs_hz=FS, streams=frames).buffers_sha256()
    assert plain == build_extractor("dau1997", fs_hz=FS).buffers_sha256()
    assert plain != build_extractor("dau1997", fs_hz=FS, streams={"spikes": {}}).buffers_sha256()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("dau1997", {"frame_rate_hz": 100}, "option 'frame_rate_hz': did you mean 'step_rate_hz'"),
        ("dau1997", {"tau": 0.1}, "no option 'tau'"),
        ("dau1997", {"source": "adaption"}, "source must be .*did you mean 'adaptation'"),
        ("dau1997", {"source": "modulation"}, "source must be .*got 'modulation'"),
        ("dau1997", {"source": "spikes"}, "source must be .*got 'spikes'"),
        ("dau1997", {"source": 3}, "source must be .*got 3"),
        ("dau1997", {"pool": "median"}, "pool must be one of"),
        ("dau1997", {"step_rate_hz": 32000}, "up to the output's rate 16000 Hz, got 32000"),
        ("dau1997", {"step_rate_hz": "fast"}, "step_rate_hz must be a number"),
        ("dau1997", {"gain": "loud"}, "gain must be a number or a list of numbers, got 'loud'"),
        ("dau1997", {"bias": [0.0, None]}, "bias must be a number or a list"),
        ("dau1997", {"threshold": True}, "threshold must be a number"),
        ("dau1997", {"tau_mem": -1}, "tau_mem must be finite and above 0, got -1"),
        ("dau1997", {"max_spikes_per_step": 1.5}, "max_spikes_per_step must be .*got 1.5"),
        ("king2019", {}, "source 'adaptation' in input unit has no usual gain"),
    ],
)
def test_bad_options_name_the_stream_and_themselves(
    model: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParameterError, match=f"^stream 'spikes': .*{message}"):
        build_extractor(model, fs_hz=FS, params=MODELS[model][0], streams={"spikes": options})


def test_every_chain_model_offers_spikes() -> None:
    offering = {
        info.name
        for info in list_models()
        if "spikes" in info.streams and get_model(info.name).streams["spikes"].layout == "events"
    }
    assert offering == set(MODELS)


def test_columns_are_the_events_and_back() -> None:
    counts = np.array([[0, 2], [0, 0], [1, 3]])
    events = SpikeEvents.from_dense(counts, first_frame=5)
    columns = events.to_columns()
    assert columns.dtype == np.int32
    assert columns.tolist() == [[5, 1, 2], [7, 0, 1], [7, 1, 3]]
    assert_same(SpikeEvents.from_columns(columns, 5, 3, 2), events)
    nothing = np.zeros(0, np.int32)
    endless = SpikeEvents(nothing, nothing, nothing, 0, 2**31, 2)
    with pytest.raises(ParameterError, match="up to 2147483647 steps, got 2147483648"):
        endless.to_columns()
