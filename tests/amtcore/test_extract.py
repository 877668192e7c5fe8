"""Extraction: pooled frames equal pooled full-rate output, whatever the chunks and neighbours."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amtcore import Dau1997
from amtcore.errors import BackendError, ParameterError, ShapeError, UnknownModelError
from amtcore.features.registry import build_extractor, list_models
from amtcore.features.stream_info import StreamInfo
from amtcore.kernels.chain import frame_ratio
from amtcore.kernels.pooling import POOLS
from amtcore.kernels.vector.simd import LANES
from amtcore.units import Calibration
from tests.short import drawn

from ..compare import FLOAT32, KERNEL64, Tolerance, assert_close
from .plain_frames import pool_frames

FS = 16000
POOLING = Tolerance(1e-3, "float32 sums of a frame against float64")
ALL_STREAMS = ("modulation", "adaptation", "envelope")


def _clip(samples: int, seed: int = 0) -> np.ndarray:
    return (0.05 * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


@functools.cache
def _full_rate() -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Return a clip and the model's outputs of each stream at full rate, in float64."""
    clip = _clip(5003).astype(np.float64)
    model = Dau1997(FS, dtype=torch.float64, return_stages=True)
    out, stages = model(torch.from_numpy(clip))
    return clip, {
        "modulation": torch.cat(out), "adaptation": stages["adaptation"], "envelope": stages["ihc"],
    }  # fmt: skip


@pytest.mark.parametrize("rate", [100.0, 110.0, 33.3, 12.5])
@pytest.mark.parametrize("pool", POOLS)
def test_frames_equal_pooled_full_rate_output(pool: str, rate: float) -> None:
    options = {"pool": pool, "frame_rate_hz": rate}
    extractor = build_extractor(
        "dau1997", fs_hz=FS, streams=dict.fromkeys(ALL_STREAMS, options), dtype="float64"
    )
    clip, full = _full_rate()
    got = extractor.extract([clip])[0]
    for name in ALL_STREAMS:
        expected = pool_frames(full[name], frame_ratio(FS, rate), pool).T
        assert_close(got[name], expected, KERNEL64, f"{name} {pool}")
        assert got[name].shape[0] == extractor.n_frames(len(clip))[name]


@pytest.mark.parametrize("pool", POOLS)
def test_float32_pooling_equals_float64_pooling(pool: str) -> None:
    clip = _clip(FS)
    frames = [
        build_extractor(
            "dau1997", fs_hz=FS, streams={"modulation": {"pool": pool}}, dtype=dtype
        ).extract([clip])[0]["modulation"]
        for dtype in ("float32", "float64")
    ]
    assert_close(frames[0], frames[1], POOLING, pool)


EXTRACTOR = build_extractor("dau1997", fs_hz=FS, streams={name: {} for name in ALL_STREAMS})


@drawn(25, derandomize=True)
@given(sizes=st.lists(st.integers(1, 2000), min_size=1, max_size=12))
def test_chunks_equal_the_whole(sizes: list[int]) -> None:
    clip = _clip(sum(sizes))
    stream, at, parts = EXTRACTOR.open_stream(), 0, []
    for size in sizes:
        parts.append(stream.push(clip[at : at + size]))
        at += size
    whole = EXTRACTOR.extract([clip])[0]
    for name in ALL_STREAMS:
        assert np.array_equal(np.concatenate([part[name] for part in parts]), whole[name])


@drawn(10, derandomize=True)
@given(lengths=st.lists(st.integers(0, 4000), min_size=2, max_size=6))
def test_mixed_lengths_equal_one_at_a_time(lengths: list[int]) -> None:
    clips = [_clip(n, seed) for seed, n in enumerate(lengths)]
    for clip, together in zip(clips, EXTRACTOR.extract(clips), strict=True):
        alone = EXTRACTOR.extract([clip])[0]
        for name in ALL_STREAMS:
            assert np.array_equal(alone[name], together[name])


def test_more_channels_than_lanes() -> None:
    params = {"fhigh": 7800.0, "filterbank_kwargs": {"erb_scale": 0.5}}
    wide = build_extractor("dau1997", fs_hz=48000, params=params | {"fhigh": 20000.0})
    assert len(wide.streams[0].fc_hz) > LANES
    clip = _clip(4800)
    model = Dau1997(48000, fhigh=20000.0, filterbank_kwargs={"erb_scale": 0.5})
    expected = pool_frames(torch.cat(model(torch.from_numpy(clip))), (480, 1), "mean").T
    assert_close(wide.extract([clip])[0]["modulation"], expected, FLOAT32)


def test_ragged_streams_describe_themselves() -> None:
    params = {"modulation_kwargs": {"preset": "jepsen2008"}}
    extractor = build_extractor("dau1997", fs_hz=FS, params=params)
    (info,) = extractor.streams
    counts = np.diff(info.channel_offsets)
    assert info.width == info.channel_offsets[-1] == len(info.mfc_hz) < 31 * 8
    assert len(info.fc_hz) == len(counts) == 31 and counts[0] == 4 and counts[-1] == 8
    assert all(info.mfc_hz[offset] == 0.0 for offset in info.channel_offsets[:-1])
    assert StreamInfo.from_dict(info.to_dict()) == info
    clip = _clip(4000)
    model = Dau1997(FS, **params)
    full = torch.cat(model(torch.from_numpy(clip)))
    got = extractor.extract([clip])[0]["modulation"]
    assert_close(got, pool_frames(full, (160, 1), "mean").T, FLOAT32)


def test_silence_and_full_scale_are_finite() -> None:
    clips = [np.zeros(FS, np.float32), np.ones(FS, np.float32), np.full(FS, 1e-40, np.float32)]
    for frames in EXTRACTOR.extract(clips):
        assert all(np.isfinite(values).all() for values in frames.values())
    assert np.abs(EXTRACTOR.extract(clips[:1])[0]["modulation"]).max() < 1e-3


def test_hash_follows_the_constants() -> None:
    same = build_extractor("dau1997", fs_hz=FS)
    other = build_extractor("dau1997", fs_hz=FS, params={"flow": 90.0})
    assert same.buffers_sha256() == EXTRACTOR.buffers_sha256() != other.buffers_sha256()
    description = same.describe()
    assert description["model"] == "dau1997" and description["input_unit"] == "rms1=100dB"


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        ({"model": "dau1996"}, UnknownModelError, "did you mean 'dau1997'"),
        ({"params": {"flo": 1}}, ParameterError, "did you mean 'flow'"),
        ({"params": {"fs": 1}}, ParameterError, "no parameter 'fs'"),
        ({"params": {"ihc_kwargs": {"foo": 1}}}, ParameterError, "foo"),
        ({"params": {"ihc_kwargs": {"method": "hilbert"}}}, ParameterError, "block by block"),
        ({"streams": {"modulatio": {}}}, ParameterError, "did you mean 'modulation'"),
        ({"streams": {"modulation": {"poll": "mean"}}}, ParameterError, "did you mean 'pool'"),
        ({"streams": {"modulation": {"pool": "median"}}}, ParameterError, "pool must be one of"),
        ({"streams": {"modulation": {"frame_rate_hz": 0}}}, ParameterError, "frame rate"),
        ({"streams": {"modulation": {"frame_rate_hz": 1e9}}}, ParameterError, "frame rate"),
        ({"streams": {"modulation": {"frame_rate_hz": 3.1234567}}}, ParameterError, "rounder"),
        ({"dtype": "float16"}, ParameterError, "dtype must be"),
        ({"backend": "tpu"}, BackendError, "backend of cpu, cuda, interpreted"),
        ({"fs_hz": 8000}, ParameterError, "half the sampling rate"),
    ],
)
def test_bad_requests(request_: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build_extractor(**({"model": "dau1997", "fs_hz": FS} | request_))


def test_bad_clips() -> None:
    with pytest.raises(ShapeError, match="1-D floating-point"):
        EXTRACTOR.extract([np.zeros((2, 100), np.float32)])
    with pytest.raises(ShapeError, match="1-D floating-point"):
        EXTRACTOR.extract([np.zeros(100, np.int16)])


def test_models_are_listed() -> None:
    (info,) = [info for info in list_models() if info.name == "dau1997"]
    assert set(info.streams) == {*ALL_STREAMS, "spikes"} and info.params["flow"].default == 80.0
    assert Calibration(rms1_db_spl=100).gain(_clip(3), info.input_unit) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("model", "streams"),
    [
        ("dau1997", {"modulation": {}, "envelope": {}, "spikes": {}}),
        ("osses2021", {"modulation": {}}),
        ("king2019", {"modulation": {}}),
    ],
)
def test_two_callers_at_once_get_what_each_gets_alone(
    model: str, streams: dict[str, dict[str, object]]
) -> None:
    extractor = build_extractor(model, fs_hz=FS, streams=streams, threads=2)
    assert extractor.takes_several_callers
    batches = [[_clip(3000 + 500 * i + j, i) for j in range(3)] for i in range(6)]
    alone = [extractor.extract(batch) for batch in batches]
    with ThreadPoolExecutor(2) as callers:
        together = list(callers.map(extractor.extract, batches))
    for expected, got in zip(alone, together, strict=True):
        for one, other in zip(expected, got, strict=True):
            for name in streams:
                values = [
                    x if isinstance(x, np.ndarray) else x.dense() for x in (one[name], other[name])
                ]
                np.testing.assert_array_equal(*values)
