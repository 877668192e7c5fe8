"""Loudness streams: they equal the pooled traces of the models, whatever the chunks."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import pytest
import torch

from amtcore import Glasberg2002, Moore2016, get_num_threads, set_num_threads
from amtcore.errors import ParameterError, ShapeError
from amtcore.features import loudness_model as loudness_extract
from amtcore.features.feature_model import ClipFeatures, Extractor
from amtcore.features.loudness_pooling import SUMMARY_COLUMNS
from amtcore.features.registry import build_extractor, list_models
from amtcore.features.stream_info import StreamInfo
from amtcore.kernels.vector.threads import parallel_for
from amtcore.models.frame_blocks import can_share, map_blocks

from ..compare import Tolerance, assert_close
from ..short import only
from .loudness_golden import noise, one_thread, tone  # noqa: F401
from .plain_frames import pool_frames

STREAMS = {
    "short_term_loudness": {},
    "long_term_loudness": {"frame_rate_hz": 100, "pool": "max"},
    "specific_loudness": {"frame_rate_hz": 33.3},
    "loudness_summary": {},
}
CLIP = noise(2, 20007).numpy()
ON_CPU = torch.zeros(1)
POOLED = Tolerance(1e-6, "float32 means in another order")


@pytest.fixture(scope="module")
def moore() -> Extractor:
    return build_extractor("moore2016", streams=STREAMS)


@pytest.fixture(scope="module")
def glasberg() -> Extractor:
    return build_extractor("glasberg2002", streams=STREAMS)


def test_streams_equal_the_pooled_model(moore: Extractor) -> None:
    (got,) = moore.extract([CLIP])
    with torch.no_grad():
        loudness, _ = Moore2016().stream_loudness(torch.from_numpy(CLIP), None, True)
    short, long = loudness.short[0, :-1], loudness.long[0, :-1]
    assert len(short) == 20007 // 32 == len(got["short_term_loudness"])
    assert np.array_equal(got["short_term_loudness"][:, 0], short)
    expected = pool_frames(long, (10, 1), "max")
    assert np.array_equal(got["long_term_loudness"][:, 0], expected)
    pattern = pool_frames(loudness.specific[0, :-1].T, (10000, 333), "mean").T
    assert_close(got["specific_loudness"], pattern, POOLED)
    numbers = [short.max(), long.max(), *(short.quantile(q) for q in (0.95, 0.9, 0.5))]
    assert_close(got["loudness_summary"], np.array([numbers]), POOLED)


def test_specific_loudness_adds_up_to_short_term_loudness(moore: Extractor) -> None:
    streams = {
        "short_term_loudness": {"frame_rate_hz": 50},
        "specific_loudness": {"frame_rate_hz": 50},
    }
    (got,) = build_extractor("moore2016", streams=streams).extract([CLIP])
    assert_close(got["specific_loudness"].sum(1) / 4, got["short_term_loudness"][:, 0], POOLED)


@pytest.mark.parametrize("pool", only(["rms"], ["mean", "rms", "max", "subsample"]))
def test_pools(pool: str) -> None:
    extractor = build_extractor(
        "glasberg2002", streams={"short_term_loudness": {"frame_rate_hz": 90, "pool": pool}}
    )
    (got,) = extractor.extract([CLIP[0]])
    _, stages = Glasberg2002(return_stages=True)(torch.from_numpy(CLIP[0]))
    expected = pool_frames(stages["stl"][:-1], (100, 9), pool)
    assert_close(got["short_term_loudness"][:, 0], expected, POOLED)


@pytest.fixture(scope="module")
def moores_whole(moore: Extractor) -> ClipFeatures:
    return moore.extract([CLIP])[0]


@pytest.fixture(scope="module")
def glasbergs_whole(glasberg: Extractor) -> ClipFeatures:
    return glasberg.extract([CLIP[0]])[0]


@pytest.mark.parametrize("cuts", [[], [1, 2], [4096, 9000, 9001], [20000]])
@pytest.mark.parametrize("model", ["moore", "glasberg"])
def test_chunks_equal_the_whole(
    model: str,
    cuts: list[int],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    extractor: Extractor = request.getfixturevalue(model)
    whole: ClipFeatures = request.getfixturevalue(f"{model}s_whole")
    clip = CLIP if model == "moore" else CLIP[0]
    monkeypatch.setattr(loudness_extract, "_PIECE_S", 0.1)  # pushes of several pieces
    stream, parts = extractor.open_stream(), []
    for begin, end in pairwise([0, *cuts, clip.shape[-1]]):
        parts.append(stream.push(clip[..., begin:end]))
    parts.append(stream.finish())
    for name in STREAMS:
        assert np.array_equal(np.concatenate([part[name] for part in parts]), whole[name])
        assert len(whole[name]) == extractor.n_frames(clip.shape[-1])[name]


def test_a_clip_does_not_depend_on_its_neighbours_or_threads(moore: Extractor) -> None:
    clips = [CLIP, CLIP[0, :5000], CLIP[:, 3000:3001], CLIP[:, :12000]]
    together = moore.extract(clips)
    threads = get_num_threads()
    try:
        set_num_threads(2)
        with torch.no_grad():
            assert can_share(ON_CPU)
        shared = moore.extract(clips)
    finally:
        set_num_threads(threads)
        torch.set_num_threads(1)
    assert not can_share(ON_CPU), "gradients are recorded on one thread"
    for i, clip in enumerate(clips):
        (alone,) = moore.extract([clip])
        for name in STREAMS:
            assert np.array_equal(alone[name], together[i][name])
            assert np.array_equal(alone[name], shared[i][name])


def test_kernels_of_a_block_stay_on_its_thread() -> None:
    """They neither wait for threads that all have blocks, nor make a pool of one thread."""
    outer_inner = []

    def block(_: int) -> None:
        outer = threading.current_thread()
        parallel_for(lambda _: outer_inner.append((outer, threading.current_thread())), 3)

    parallel_for(block, 2)
    assert len(outer_inner) == 6 and all(outer is inner for outer, inner in outer_inner)
    assert threading.current_thread() not in outer_inner[0]
    with torch.no_grad():
        assert map_blocks(lambda x: 2 * x, [3, 1, 2], ON_CPU) == [6, 2, 4]
        with pytest.raises(ZeroDivisionError):
            map_blocks(lambda x: 1 / x, [1, 0], ON_CPU)


@pytest.mark.parametrize("samples", [0, 1, 31, 32])
def test_short_clips(samples: int, moore: Extractor) -> None:
    (got,) = moore.extract([CLIP[0, :samples]])
    frames = samples // 32
    assert len(got["short_term_loudness"]) == frames
    assert got["loudness_summary"].shape == (min(frames, 1), 5)
    assert {name: len(values) for name, values in got.items()} == moore.n_frames(samples)


def test_phon_streams_of_a_tone() -> None:
    streams = {name: {"unit": "phon"} for name in ("short_term_loudness", "loudness_summary")}
    extractor = build_extractor("moore2016", streams=streams, dtype="float64")
    (got,) = extractor.extract([tone(1000.0, 50.0).numpy()])
    assert extractor.streams[0].unit == extractor.streams[1].unit == "phon"
    np.testing.assert_allclose(got["short_term_loudness"][300:450], 50.0, atol=0.02)
    assert abs(float(got["loudness_summary"][0, 4]) - 50.0) < 0.05


def test_streams_describe_themselves(moore: Extractor, glasberg: Extractor) -> None:
    by_name = {info.name: info for info in moore.streams}
    assert by_name["short_term_loudness"].frame_rate_hz == 1000.0
    assert by_name["specific_loudness"].width == 150 == len(by_name["specific_loudness"].fc_hz)
    summary = by_name["loudness_summary"]
    assert summary.columns == SUMMARY_COLUMNS and summary.frame_rate_hz == 0.0
    for info in moore.streams:
        assert StreamInfo.from_dict(info.to_dict()) == info
        assert ("columns" in info.to_dict()) == (info is summary)
    assert moore.fs_hz == 32000 and moore.input_unit == "pa"
    assert moore.input_channels == (1, 2) and glasberg.input_channels == (1,)
    description = moore.describe()
    assert description["model"] == "moore2016" and description["dtype"] == "float32"
    other = build_extractor("moore2016", params={"binaural_loudness_kwargs": {"p": 1.0}})
    assert other.buffers_sha256() != moore.buffers_sha256()
    assert [info.name for info in other.streams] == ["short_term_loudness", "long_term_loudness"]


def test_models_are_listed() -> None:
    infos = {info.name: info for info in list_models()}
    for name in ("moore2016", "glasberg2002"):
        assert infos[name].default_fs_hz == 32000.0 and set(infos[name].streams) == set(STREAMS)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"streams": {"short_term_loudnes": {}}}, "did you mean 'short_term_loudness'"),
        ({"streams": {"short_term_loudness": {"units": "phon"}}}, "did you mean 'unit'"),
        ({"streams": {"short_term_loudness": {"unit": "dB"}}}, "unit must be one of"),
        ({"streams": {"short_term_loudness": {"pool": "median"}}}, "pool must be one of"),
        ({"streams": {"short_term_loudness": {"frame_rate_hz": 2000}}}, "frame rate"),
        ({"streams": {"loudness_summary": {"pool": "max"}}}, "no option 'pool'"),
        ({"streams": {"specific_loudness": {"unit": "phon"}}}, "no option 'unit'"),
        ({"fs_hz": 16000}, "works at 32000 Hz"),
        ({"params": {"binaural_kwargs": {}}}, "did you mean 'binaural_loudness_kwargs'"),
        ({"params": {"spectrum_kwargs": {"hop": 1}}}, "hop"),
    ],
)
def test_bad_requests(request_: dict, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        build_extractor("moore2016", **request_)


def test_bad_clips(moore: Extractor, glasberg: Extractor) -> None:
    with pytest.raises(ShapeError, match="with 1 or 2 ears"):
        moore.extract([np.zeros((3, 100), np.float32)])
    with pytest.raises(ShapeError, match="with 1 ears"):
        glasberg.extract([np.zeros((2, 100), np.float32)])
    with pytest.raises(ShapeError, match="floating-point"):
        moore.extract([np.zeros(100, np.int16)])
