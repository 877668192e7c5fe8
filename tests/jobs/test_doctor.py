"""`earmill doctor`: this machine is well, and what is not is told, with exit code 1."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import amtcore
from amtcore import AdaptLoop
from amtcore.features import registry
from amtcore.features.registry import BUILT_IN, build_extractor
from earmill.jobs import doctor
from earmill.jobs.cli import run
from earmill.jobs.doctor import (
    Check,
    State,
    UnequalError,
    checked,
    gpu_answers,
    gpu_rate,
    kernel_checks,
    storage_check,
    worst_error,
)
from earmill.pipeline.common.errors import OutputError
from earmill.pipeline.driver.executors import ray as ray_executor
from earmill.pipeline.driver.executors.ray import live_nodes
from earmill.pipeline.driver.placement import Node
from earmill.pipeline.storage.layout import Layout
from tests.listeners import LOOPBACK, listening_addresses
from tests.waiting import processes_end

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def test_this_machine_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the whole command without its timings: a line for each check, then the verdict.

    The check of Ray starts a private Ray. It listens on loopback and ends with the check.
    """
    listening: set[str] = set()
    started: list[psutil.Process] = []

    def nodes() -> list[Node]:
        started[:] = psutil.Process().children(recursive=True)
        listening.update(listening_addresses(started))
        return live_nodes()

    monkeypatch.setattr(ray_executor, "live_nodes", nodes)
    # Plain loops are slow; tests/amtcore has kernels beside them on longer signals.
    monkeypatch.setattr(doctor, "SAMPLES", 12)
    few = partial(amtcore.Moore2016, excitation_kwargs={"erb_step": 2.0})
    monkeypatch.setattr(amtcore, "Moore2016", few)
    code = run(["doctor", "--quick", "--device", "cpu", "--uri", str(tmp_path)])
    out = capsys.readouterr().out
    *checks, verdict = out.splitlines()
    assert (code, verdict) == (0, "all that is here works"), out
    assert {line.split()[0] for line in checks} == {"ok"}
    found = {line[7:].partition(": ")[0]: line for line in checks}
    assert {f"kernels of {name}" for name in BUILT_IN} < set(found)
    assert "Ray" in found and "processor" in found and "GPU" not in found
    assert "created, read back, not overwritten, listed, deleted" in found[f"storage {tmp_path}"]
    assert list(tmp_path.iterdir()) == []
    assert listening and listening <= LOOPBACK
    processes_end(started)


@pytest.fixture
def only_these(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[Check]], None]:
    """Replaces the checks that take seconds by given ones."""

    def replace(checks: Sequence[Check]) -> None:
        monkeypatch.setattr(doctor, "kernel_checks", lambda: iter(checks))
        monkeypatch.setattr(doctor, "ray_check", lambda: Check("Ray", State.OK, "runs"))

    return replace


def test_a_failure_is_exit_code_1(
    only_these: Callable[[Sequence[Check]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    only_these([Check("kernels of x", State.FAILED, "differ")])
    assert run(["doctor", "--quick"]) == 1
    out = capsys.readouterr().out
    assert "failed kernels of x: differ" in out and "1 of " in out and " checks failed" in out


@no_gpu
def test_a_missing_gpu_fails_only_where_it_is_asked_for(
    only_these: Callable[[Sequence[Check]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    only_these([])
    assert run(["doctor", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (gpu,) = [check for check in found["checks"] if check["what"] == "GPU"]
    assert found["ok"] and gpu["state"] == "no" and gpu["text"]
    assert run(["doctor", "--quick", "--device", "cuda", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (gpu,) = [check for check in found["checks"] if check["what"] == "GPU"]
    assert not found["ok"] and gpu["state"] == "failed"


def test_a_broken_storage_is_reported(
    only_these: Callable[[Sequence[Check]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    only_these([])
    arguments = ["doctor", "--quick", "--device", "cpu", "--uri", "/proc/nowhere"]
    assert run(arguments) == 1
    assert "failed storage /proc/nowhere: cannot write to /proc/now" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("s4://bucket/x", "fsspec URI"),
        ("ftp://127.0.0.1:1/x", "Connection refused"),
        ("/proc/x", "/proc/x"),
    ],
)
def test_what_is_no_place_to_write_to_is_told(uri: str, said: str) -> None:
    found = storage_check(uri, {})
    assert found.state is State.FAILED and said in found.text


@pytest.mark.parametrize(
    ("method", "answer", "said"),
    [
        ("put_if_absent", True, "overwrites a file although told"),
        ("read_bytes", b"other", "does not read back"),
        ("list", [], "does not list"),
        ("delete", None, "does not delete"),
    ],
)
def test_a_store_that_does_other_things_is_told(
    method: str, answer: object, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Layout, method, lambda *_: answer)
    found = storage_check(str(tmp_path), {})
    assert found.state is State.FAILED and said in found.text


def test_a_kernel_that_is_not_equal_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adaptation loops that are a little too loud, but not in the plain loop."""
    right = AdaptLoop.forward

    def wrong(self: AdaptLoop, *signals: Any) -> Any:
        return right(self, *signals) * (1.0 if self.backend == "reference" else 1.001)

    monkeypatch.setattr(AdaptLoop, "forward", wrong)
    monkeypatch.setattr(doctor, "SAMPLES", 12)
    found = next(kernel_checks())
    assert (found.what, found.state) == ("kernels of dau1997", State.FAILED)
    assert "float64 kernels differ from their plain loops by 1" in found.text


def test_what_is_not_finite_or_of_another_shape_is_no_small_error() -> None:
    one = torch.ones(3)
    assert worst_error([one], [one], 0.0) == 0.0
    assert worst_error([one, 1.5 * one], [one, one], 0.0) == pytest.approx(0.5)
    assert worst_error([one * torch.nan], [one], 1.0) == float("inf")
    assert worst_error([one], [one * torch.nan], 1.0) == float("inf")
    assert worst_error([one[:2]], [one], 1.0) == float("inf")


def test_a_check_that_breaks_is_a_finding() -> None:
    def broken() -> str:
        raise ZeroDivisionError("by\nzero")

    found = checked("sums", broken)
    assert found.state is State.FAILED
    assert found.text.startswith("ZeroDivisionError: by zero (test_doctor.py:")

    def told() -> str:
        raise OutputError("no room; make some")

    assert checked("room", told).text == "no room; make some"


def test_processors_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from llvmlite import binding

    for generation, features in (("znver3", {"avx2": True}), ("znver4", {"avx512f": True})):
        monkeypatch.setattr(binding, "get_host_cpu_name", lambda name=generation: name)
        monkeypatch.setattr(binding, "get_host_cpu_features", lambda has=features: has)
        assert f"({generation}; {next(iter(features))}), " in doctor.processor()


def test_the_processor_speed_of_a_model_is_measured() -> None:
    found = next(doctor.speed_checks(gpu=False))
    assert found.state is State.OK and found.what == "speed of dau1997"
    speed, _, unit = found.text.partition(" ")
    assert float(speed.replace(",", "")) > 0 and unit == "x real time on the CPU"


def test_a_launch_is_halved_until_memory_holds_it() -> None:
    seen = []

    class Extractor:
        fs_hz, input_channels = 100.0, (1,)

        def extract(self, clips: list[Any]) -> None:
            seen.append(len(clips))
            if len(clips) > 400:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    extractor: Any = Extractor()
    rate, clips = gpu_rate(extractor)
    assert clips == 375 and rate > 0
    assert seen[:3] == [1500, 750, 375]


def test_the_speed_of_a_gpu_counts_if_it_runs_kernels() -> None:
    checks = [Check("GPU", State.OK, "NVIDIA H100, sm_90"), Check("PTX", State.OK, "loaded")]
    assert gpu_answers(checks)
    assert not gpu_answers([Check("GPU", State.OK, "none: interpreted"), checks[1]])
    assert not gpu_answers([checks[0], Check("PTX", State.FAILED, "rejected")])


def test_a_cache_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert "every process compiles anew; set NUMBA_CACHE_DIR" in doctor._kernel_cache()


def test_clips_for_a_model_of_two_ears_have_two() -> None:
    both = doctor.noise(build_extractor("moore2016"), 0.1, 0)
    assert both.shape == (2, 3200) and both.dtype == np.float32


def test_the_gpu_is_compared_with_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PTX is interpreted: equal bit for bit, and a model that is not is a failure."""
    monkeypatch.setenv("AMTCORE_GPU", "interpreted")
    two = {name: BUILT_IN[name] for name in ("dau1997", "moore2016")}
    monkeypatch.setattr(registry, "BUILT_IN", two)
    found = {check.what: check for check in doctor.gpu_checks(wanted=True)}
    assert {check.state for check in found.values()} <= {State.OK, State.NO}, found
    assert "interpreter of PTX in its place" in found["GPU"].text
    assert "interpreted adds two vectors" in found["PTX"].text
    assert found["dau1997 on the GPU"].text.startswith("equal to the CPU bit for bit in ")
    here, there = build_extractor("dau1997"), build_extractor("dau1997", backend="interpreted")
    right = there.extract

    def wrong(clips: Any) -> Any:
        return [{name: frames * 1.0001 for name, frames in made.items()} for made in right(clips)]

    monkeypatch.setattr(there, "extract", wrong)
    with pytest.raises(UnequalError, match="differs from the CPU by 1"):
        doctor._against_cpu("dau1997", here, there)
