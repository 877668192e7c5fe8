"""Every model's streams by kernels for GPUs, interpreted, against the processor's: bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from amtcore.features import pooled_streams
from amtcore.features.feature_model import Extractor
from amtcore.features.registry import build_extractor, get_model
from amtcore.features.spike_encoder import join
from amtcore.features.spike_events import SpikeEvents
from amtcore.kernels.devices import get_backend, use_backend

from ..compare import Tolerance, assert_close
from .test_torch_module import ENCODED, _params

FS = 16000
#: Ragged; one makes no frame, one has no sample.
LENGTHS = (1200, 37, 0, 801, 160)
FEW = {"flow": 400.0, "fhigh": 900.0}
Streams = Mapping[str, Mapping[str, Any]]
CASES: dict[str, tuple[str, dict[str, Any], Streams]] = {
    "dau1997": (
        "dau1997",
        FEW,
        {"modulation": {}, "spikes": {"step_rate_hz": 500.0}},
    ),
    "osses2021": (
        "osses2021",
        {"fhigh": 300.0},
        {"adaptation": {"frame_rate_hz": 33.3, "pool": "subsample"}},
    ),
    "king2019": (
        "king2019",
        {"basef": 1000.0, "phase_insens": "none"},
        {"modulation": {"pool": "rms"}},
    ),
    "king2019-hilbert": (
        "king2019",
        {"basef": 1000.0, "phase_insens": "hilbert"},
        {"modulation": {}, "envelope": {}},
    ),
    "king2019-subfs": (
        "king2019",
        {"basef": 1000.0, "phase_insens": "none", "subfs": 1000.0},
        {"modulation": {}},
    ),
    "paulick2024": (
        "paulick2024",
        {"flow": 500.0, "fhigh": 700.0},
        {
            "modulation": {},
            "velocity": {"pool": "max"},
            "spikes": {"source": "envelope", "gain": 2e5},
        },
    ),
}
#: Whose streams need whole clips.
WHOLE = ("king2019-hilbert", "king2019-subfs")
#: The streams of these take longest; their reference data are run here as well.
LENGTHY = ("paulick2024", "osses2021", "king2019-hilbert", "king2019-subfs")
MARKED = [
    pytest.param(case, marks=[pytest.mark.long] * (case in LENGTHY), id=case) for case in CASES
]
SPECTRA = Tolerance(1e-6, "transforms of another library in single precision")


def clips() -> list[np.ndarray]:
    """Noise that begins and ends anywhere."""
    make = np.random.default_rng(0)
    return [(0.05 * make.standard_normal(n)).astype(np.float32) for n in LENGTHS]


@functools.cache
def built(case: str, backend: str, dtype: str = "float32") -> Extractor:
    model, params, streams = CASES[case]
    return build_extractor(
        model, fs_hz=FS, params=params, streams=streams, dtype=dtype, backend=backend
    )


@functools.cache
def made(case: str) -> list[dict[str, Any]]:
    """What the kernels for GPUs make of the clips."""
    with use_backend("interpreted"):
        return built(case, "interpreted").extract(clips())


def assert_same(
    got: Mapping[str, Any], expected: Mapping[str, Any], near: Tolerance | None = None
) -> None:
    """Stream by stream, every bit, or for frames nearly."""
    assert got.keys() == expected.keys()
    for name, wanted in expected.items():
        mine = got[name]
        if isinstance(wanted, SpikeEvents):
            assert mine.n_frames == wanted.n_frames, name
            mine, wanted = mine.to_columns(), wanted.to_columns()
        assert mine.dtype == wanted.dtype and mine.shape == wanted.shape, name
        if near is None:
            np.testing.assert_array_equal(mine, wanted, name)
        else:
            assert_close(mine, wanted, near, name)


@pytest.mark.parametrize("case", MARKED)
def test_features_are_those_of_the_processor(case: str) -> None:
    here = built(case, "cpu")
    for got, expected, clip in zip(made(case), here.extract(clips()), clips(), strict=True):
        assert_same(got, expected, SPECTRA if case == "king2019-hilbert" else None)
        for name, count in here.n_frames(len(clip)).items():
            wanted = got[name]
            assert (wanted.n_frames if isinstance(wanted, SpikeEvents) else len(wanted)) == count
    heard = [values for values in made(case)[0].values() if isinstance(values, np.ndarray)]
    assert all(map(np.any, heard))


@pytest.mark.parametrize("case", MARKED)
def test_company_and_tensors_change_nothing(case: str) -> None:
    there = built(case, "interpreted")
    tensors: list[Any] = [torch.from_numpy(clip) for clip in clips()]
    with use_backend("interpreted"):
        for clip, expected in zip(clips(), made(case), strict=True):
            assert_same(there.extract([clip])[0], expected)
        for given in (tensors, [*tensors[:1], *clips()[1:]]):
            for got, expected in zip(there.extract(given), made(case), strict=True):
                assert_same(got, expected)


@pytest.mark.parametrize("case", [case for case in MARKED if case.id not in WHOLE])
def test_chunks_equal_the_whole(case: str) -> None:
    there, clip = built(case, "interpreted"), clips()[0]
    with use_backend("interpreted"):
        for kind in (np.asarray, torch.from_numpy):
            stream: Any = there.open_stream()
            ends = (0, 0, 1, 700, 701, len(clip))
            parts = [stream.push(kind(clip[a:b])) for a, b in pairwise(ends)]
            parts.append(stream.finish())
            got = {name: join([part[name] for part in parts]) for name in parts[0]}
            assert_same(got, made(case)[0])


@pytest.mark.parametrize("case", WHOLE)
def test_bands_of_all_clips_are_made_and_come_to_the_host_in_one_go(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, taken = built(case, "interpreted"), []
    backend: Any = there.backend
    download, run_clips, launched = backend.download, backend.run_clips, []

    def counted(tables: Any, table: torch.Tensor, *rest: Any) -> None:
        launched.append(table.shape[1])
        run_clips(tables, table, *rest)

    monkeypatch.setattr(backend, "download", lambda f: taken.append(len(f)) or download(f))
    monkeypatch.setattr(backend, "run_clips", counted)
    with use_backend("interpreted"):
        together = there.extract(clips())
        assert len(taken) == len(there.streams), "one a stream, not one a band and clip"
        heard = sum(len(made_of["modulation"]) > 0 for made_of in together)
        assert heard > 1 and min(launched) == heard, "a launch for all"
        monkeypatch.setattr(pooled_streams, "_CHANNEL_BYTES", 0)  # one at a time
        apart = there.extract(clips())
    assert min(launched) == 1
    for one, other, expected in zip(together, apart, made(case), strict=True):
        assert_same(one, expected)
        assert_same(other, expected)


@pytest.mark.parametrize("name", ["osses2021", "paulick2024"])
def test_a_clip_is_filtered_as_if_it_were_alone(name: str) -> None:
    """The ear's filters ring beyond a clip's end, where the longest clip of a group goes on."""
    stages = get_model(name).module(44100, {}, "float32").front_end()  # type: ignore[attr-defined]
    backend = get_backend("interpreted")
    given = [clip for clip in clips() if len(clip)]
    given += [clip[: len(clip) * 4 // 5] for clip in given]
    with torch.no_grad():
        together = pooled_streams.filtered(stages, backend, given)
        alone = [pooled_streams.filtered(stages, get_backend("cpu"), [clip])[0] for clip in given]
    assert len(pooled_streams.alike([len(clip) for clip in given], 10**6)) < len(given)
    for got, expected in zip(together, alone, strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


def test_no_clips_give_no_features() -> None:
    streams: Streams = {"modulation": {}, "envelope": {}}
    assert build_extractor("dau1997", streams=streams, backend="interpreted").extract([]) == []


def test_memory_that_is_read_only_is_taken() -> None:
    there, clip = built("dau1997", "interpreted"), clips()[0]
    clip.setflags(write=False)
    assert_same(there.extract([clip])[0], made("dau1997")[0])


@pytest.mark.parametrize(
    "name", ["melspectrogram", "mfcc", "carfac", "cochleagram", "srmr", "zwicker"]
)
def test_models_of_frames_stay_on_the_processor(name: str) -> None:
    here, there = build_extractor(name), build_extractor(name, backend="interpreted")
    assert there.backend.name == "cpu" and there.describe()["backend"] == "cpu"
    for got, expected in zip(there.extract(clips()), here.extract(clips()), strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize("of_tensors", [False, True])
@pytest.mark.parametrize("batch", [None, 1])
def test_a_module_of_torch_computes_on_the_device(batch: int | None, of_tensors: bool) -> None:
    asked: dict[str, Any] = {
        "model": "torch_module",
        "fs_hz": FS,
        "params": _params("Stack", channel_axis=True, batch=batch),
        "streams": {
            "first": {**ENCODED, "width": 4, "output": "hidden_states.1"},
            "last": {**ENCODED, "width": 3},
        },
    }
    here, there = build_extractor(**asked), build_extractor(**asked, backend="interpreted")
    assert there.backend.name == "interpreted" and there.describe()["backend"] == "interpreted"
    given: Any = [torch.from_numpy(clip) for clip in clips()] if of_tensors else clips()
    for got, expected in zip(there.extract(given), here.extract(clips()), strict=True):
        assert_same(got, expected, SPECTRA)
    assert there.extract([]) == []
