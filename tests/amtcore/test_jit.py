"""Kernels and their parts: what is compiled, how often, and what the code on disk is kept for."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.codegen import JITCodeLibrary

from amtcore.errors import KernelCacheError
from amtcore.kernels.vector import kernel_cache
from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.kernel_cache import KernelFiles


@part
def _raised(x: Any, step: int, twice: bool) -> float:
    if step > 9:
        raise ValueError("a step of 10 or more", step)
    return min(x[0] + step, 100.0) * (2 if twice else 1)


def _sum(x: Any, wide: int) -> float:
    return _raised(x, 1, True) + _raised(x, 2, False) + _raised(x, wide, False)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what becomes machine code from here on; kernels have a cache of their own."""
    names: list[str] = []
    machine_code = JITCodeLibrary._finalize_specific
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        JITCodeLibrary,
        "_finalize_specific",
        lambda library: (names.append(library.name), machine_code(library)),
    )
    return names


def test_only_the_kernel_becomes_machine_code_and_a_part_is_compiled_once(made: list[str]) -> None:
    run, x = kernel(_sum), np.array([5.0])
    assert run(x, 3) == 12 + 7 + 8
    assert len(_raised.overloads) == 1  # for two constants and a variable
    assert [name for name in made if "nrt" not in name.lower()] == ["_sum"]
    with pytest.raises(ValueError, match="a step of 10 or more"):
        run(x, 10)


def _loaded(function: Any) -> bool:
    """Whether a fresh kernel of this function comes from disk; it computes either way."""
    run = kernel(function)
    assert run(np.array([6.0]), 3) == 14 + 8 + 9
    return bool(sum(run.stats.cache_hits.values()))


def test_code_on_disk_is_of_these_sources(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert [_loaded(_sum), _loaded(_sum)] == [False, True]
    with pytest.raises(ValueError, match="a step of 10 or more"):
        kernel(_sum)(np.array([5.0]), 10)
    monkeypatch.setattr(kernel_cache, "sources_digest", lambda *_: "another")
    assert not _loaded(_sum)


@pytest.mark.parametrize("damage", ["cut", "bit", "empty"])
def test_damaged_code_is_not_loaded(damage: str, made: list[str], tmp_path: Path) -> None:
    _loaded(_sum)
    (path,) = tmp_path.rglob("*.kernel")
    code = path.read_bytes()
    middle = len(code) // 2
    broken = {
        "cut": code[:-1],
        "bit": code[:middle] + bytes([code[middle] ^ 1]) + code[middle + 1 :],
        "empty": b"",
    }
    path.write_bytes(broken[damage])
    assert [_loaded(_sum), _loaded(_sum)] == [False, True]


def test_prebuilt_kernels_are_found_or_passed_over_with_one_line(
    made: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(shipped))
    _loaded(_sum)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(own))
    monkeypatch.setenv(kernel_cache.PREBUILT, str(shipped))
    assert _loaded(_sum) and not list(own.rglob("*.kernel")) and not caplog.messages
    (path,) = shipped.rglob("*.kernel")
    path.write_bytes(path.read_bytes()[:-1])
    assert not _loaded(_sum) and _loaded(_sum)
    (line,) = caplog.messages
    assert str(shipped) in line and "fill it again" in line
    monkeypatch.setenv(kernel_cache.PREBUILT, str(tmp_path / "nowhere"))
    assert _loaded(_sum)
    assert caplog.messages[1:] == [
        f"AMTCORE_KERNELS={tmp_path / 'nowhere'} holds no kernels: they are compiled here"
    ]


def test_prebuilt_kernels_that_others_can_write_are_refused(
    made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "shipped" / kernel_cache.FOLDER
    shipped.mkdir(parents=True)
    shipped.chmod(0o777)
    monkeypatch.setenv(kernel_cache.PREBUILT, str(shipped.parent))
    with pytest.raises(KernelCacheError, match="everybody can write to it"):
        kernel(_sum)(np.array([6.0]), 3)


def test_another_processor_has_kernels_of_its_own(made: list[str], tmp_path: Path) -> None:
    machines = [
        ("x86_64", "znver4", "+avx2"),
        ("x86_64", "znver3", "+avx2"),
        ("x86_64", "znver4", ""),
    ]
    files = KernelFiles(_sum)
    assert len({files._file_name("()", machine) for machine in machines}) == 3


def test_who_waits_for_a_kernel_finds_it(made: list[str]) -> None:
    """Two processes on a fresh machine do not compile the same twice."""
    files, order = KernelFiles(_sum), list[str]()

    def second() -> None:
        with KernelFiles(_sum).alone():
            order.append("second")

    with files.alone():
        waiting = threading.Thread(target=second)
        waiting.start()
        waiting.join(0.2)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]


_OF_ONE_KIND = """
import os, sys, numba, numpy as np
numba.config.CACHE_DIR = sys.argv[1]
from amtcore.kernels.vector.jit import kernel, part

def times(factor):
    lines = ["    for i in range(len(x)):", *["        x[i] = x[i] * factor + 1 / x[i]"] * 40]
    scope = {"factor": factor}
    exec("\\n".join(["def scaled(x):", *lines]), scope)
    scaled = part(scope["scaled"], key=str(factor))  # too large to become part of its caller
    @kernel(key=str(factor))
    def run(x):
        scaled(x[:3])
        scaled(x)
        return x[0]
    return run

for factors in sys.argv[2:]:
    child = os.fork()  # imports take longer than the rest
    if not child:
        print(*(times(float(each))(np.ones(9)) for each in factors.split()), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.long
def test_kernels_of_one_name_that_two_processes_compiled_are_told_apart(tmp_path: Path) -> None:
    """Each was the first that its process compiled, so numba gave both one number."""
    factors = ("0.5", "0.7", "0.5 0.7", "0.7 0.5")
    command = [sys.executable, "-c", _OF_ONE_KIND, str(tmp_path), *factors]
    made = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    first, other, *both = (each.split() for each in made.splitlines())
    assert first != other and both == [first + other, other + first]
