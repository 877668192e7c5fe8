"""Extraction on a GPU: every model's streams, ragged batches, tensors in, threads, and a job."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from amtcore.features.frame_module_model import FrameModuleModel
from amtcore.features.registry import BUILT_IN, build_extractor, get_model, registrations
from earmill.jobs.doctor import WITH_TRANSFORMS, as_array, noise
from earmill.pipeline.audio.resample import ON_DEVICES
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.worker.device import (
    DeviceInput,
    check_resampler,
    find_gpu,
)
from tests.amtcore.test_torch_module import ENCODED, HERE
from tests.chaos.jobs import assert_equal_datasets, write_corpus, write_job
from tests.compare import Tolerance, assert_close

pytestmark = pytest.mark.gpu
SPECTRA = Tolerance(1e-4, "single-precision transforms of another library", 1e-6)
FRAMES = [name for name in sorted(registrations()) if isinstance(get_model(name), FrameModuleModel)]
SECONDS = (0.31, 1.2, 0.05, 0.0, 0.7, 0.002)


def assert_equal(name: str, got: list[Any], expected: list[Any]) -> None:
    """Clip by clip, stream by stream."""
    for mine, wanted in zip(got, expected, strict=True):
        assert mine.keys() == wanted.keys()
        for stream in wanted:
            a, b = as_array(mine[stream]), as_array(wanted[stream])
            assert a.shape == b.shape
            if name in WITH_TRANSFORMS:
                assert_close(a, b, SPECTRA, stream)
            else:
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", BUILT_IN)
def test_ragged_clips_give_what_the_cpu_gives(name: str) -> None:
    here, there = build_extractor(name), build_extractor(name, backend="cuda")
    clips = [noise(here, seconds, seed) for seed, seconds in enumerate(SECONDS)]
    expected = here.extract(clips)
    assert_equal(name, there.extract(clips), expected)
    tensors: Any = [torch.from_numpy(clip).cuda() for clip in clips]
    assert_equal(name, there.extract(tensors), expected)


@pytest.mark.parametrize("name", FRAMES)
def test_modules_of_frames_give_what_the_cpu_gives(name: str, device: torch.device) -> None:
    """A job leaves them on the CPU; the module itself computes where its tensors lie."""
    model = get_model(name)
    assert isinstance(model, FrameModuleModel)
    module = model.module(model.default_fs_hz, {}, "float32")
    ears = min(module.input_channels)
    samples = (ears, round(module.fs)) if ears > 1 else (round(module.fs),)
    x = 0.05 * torch.randn(samples, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = module.outputs(x)
        got = module.to(device).outputs(x.to(device))
    for stream, values in expected.items():
        if stream == "spikes":  # each device has its own random numbers
            continue
        made, finite = got[stream].cpu(), values.isfinite()  # a second has no loudness range
        assert torch.equal(made.isfinite(), finite)
        assert_close(made[finite], values[finite], SPECTRA, stream)


def test_a_module_of_torch_gives_what_the_cpu_gives() -> None:
    find_gpu()  # turns off convolutions that round to 10 bits
    grid = {**ENCODED, "frames_axis": 2}
    asked: dict[str, Any] = {
        "model": "torch_module",
        "params": {"module": f"{HERE}:Stack", "channel_axis": True},
        "streams": {
            "first": {**grid, "width": 4, "output": "hidden_states.1"},
            "last": {**grid, "width": 3},
        },
    }
    here, there = build_extractor(**asked), build_extractor(**asked, backend="cuda")
    assert there.backend.name == "cuda"
    clips = [noise(here, seconds, seed) for seed, seconds in enumerate(SECONDS)]
    for mine, wanted in zip(there.extract(clips), here.extract(clips), strict=True):
        for stream in wanted:
            assert_close(as_array(mine[stream]), as_array(wanted[stream]), SPECTRA, stream)


@pytest.mark.parametrize("name", BUILT_IN)
def test_more_clips_than_warps_that_fit_are_taken_from_the_queue(name: str) -> None:
    there = build_extractor(name, backend="cuda")
    lengths = np.random.default_rng(0).integers(1, 40, 4000) / 1000
    clips = [noise(there, float(seconds), seed) for seed, seconds in enumerate(lengths)]
    together = there.extract(clips)
    for k in range(0, len(clips), 997):
        assert_equal(name, there.extract([clips[k]]), [together[k]])


@pytest.mark.parametrize("name", ["dau1997", "king2019", "moore2016"])
def test_threads_share_an_extractor(name: str) -> None:
    there = build_extractor(name, backend="cuda")
    batches = [[noise(there, 0.2 + 0.1 * k, seed) for seed in range(20)] for k in range(6)]
    expected = [there.extract(batch) for batch in batches]

    def extract(batch: Any) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            return there.extract(batch)

    with ThreadPoolExecutor(3) as pool:
        for got, wanted in zip(pool.map(extract, batches), expected, strict=True):
            assert_equal(name, got, wanted)


@pytest.mark.parametrize("name", ["dau1997", "moore2016"])
def test_a_stream_gives_what_the_whole_gives(name: str) -> None:
    there = build_extractor(name, backend="cuda")
    clip = noise(there, 0.5, 0)
    stream = there.open_stream()
    parts = [stream.push(piece) for piece in np.array_split(clip, 7, axis=-1)]
    parts.append(stream.finish())
    (wanted,) = there.extract([clip])
    got = {
        each: np.concatenate([as_array(part[each]) for part in parts if each in part])
        for each in wanted
    }
    assert_equal(name, [got], [wanted])


@pytest.mark.parametrize("name", ["dau1997", "moore2016"])
def test_tensors_that_are_still_in_the_making_are_waited_for(name: str) -> None:
    there = build_extractor(name, backend="cuda")
    clip = noise(there, 0.2, 0)
    (expected,) = there.extract([clip])
    ready, given = torch.from_numpy(clip).cuda(), torch.zeros(clip.shape, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    given.copy_(ready)
    tensors: Any = [given]
    assert_equal(name, there.extract(tensors), [expected])


@pytest.mark.parametrize("name", ["glasberg2002", "moore2016"])
def test_company_and_chunks_change_no_bit_of_loudness(name: str) -> None:
    """Transforms and products of one shape, see `loudness_batches`."""
    there = build_extractor(name, backend="cuda")
    seconds = np.random.default_rng(0).uniform(0.01, 3.0, 150)
    clips = [noise(there, float(s), seed) for seed, s in enumerate(seconds)]
    together = there.extract(clips)
    backwards = there.extract(clips[::-1])[::-1]
    for k in range(0, len(clips), 7):
        stream = there.open_stream()
        parts = [*map(stream.push, np.array_split(clips[k], 3, axis=-1)), stream.finish()]
        (alone,) = there.extract([clips[k]])
        for each, values in together[k].items():
            chunked = np.concatenate([as_array(part[each]) for part in parts])
            for other in (backwards[k][each], alone[each], chunked):
                np.testing.assert_array_equal(as_array(other), as_array(values))


def test_a_job_on_the_gpu_equals_the_job_on_the_cpu(tmp_path: Path) -> None:
    """Byte for byte, as the resampler is soxr and so one of the CPU in both."""
    corpus = write_corpus(tmp_path / "corpus", 12, seconds=1.0)
    for device in ("cpu", "cuda"):
        job = write_job(tmp_path / f"{device}.yaml", corpus, tmp_path / device)
        overrides = (f"run.device={device}", "name=same")
        end = run_job(JobSpec.load(str(job), overrides=overrides))
        assert end.exit_code == 0 and end.rows_bad == 0, end.message
    assert_equal_datasets(tmp_path / "cuda", tmp_path / "cpu")


def test_the_resampler_on_the_gpu_is_that_of_the_cpu_whatever_the_company() -> None:
    resampler = DeviceInput(find_gpu()).resampler
    check_resampler(resampler)
    rng = np.random.default_rng(0)
    clips = [
        torch.from_numpy(rng.standard_normal((1, n)).astype(np.float32)).cuda()
        for n in (7, 16000, 90_000, 250_000, 16000)
    ]
    for rates in ((16000, 44100), (44100, 16000), (22050, 44100)):
        together = resampler(clips, *rates)
        for clip, made in zip(clips, together, strict=True):
            assert torch.equal(made, resampler([clip], *rates)[0])


def test_a_job_resampled_on_the_gpu_says_so_and_is_the_same_every_time(
    tmp_path: Path,
) -> None:
    corpus = write_corpus(tmp_path / "corpus", 12, seconds=1.0)
    for name in ("one", "two"):
        job = write_job(tmp_path / f"{name}.yaml", corpus, tmp_path / name)
        overrides = ("run.device=cuda", "name=same", f"audio.resampler={ON_DEVICES}")
        assert run_job(JobSpec.load(str(job), overrides=overrides)).rows_bad == 0
    assert_equal_datasets(tmp_path / "one", tmp_path / "two")
    for record in commits(Layout.open(str(tmp_path / "one"))).values():
        assert record.info["device"]["backends"] == {"dau1997": "cuda"}
        device = record.info["device"]
        assert device["driver"] and "resampler" in device["self_check"]
