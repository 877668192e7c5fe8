"""Kernels and their parts: what is compiled, how often, and what the code on disk is kept for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.codegen import JITCodeLibrary

from amtcore.kernels.vector import jit
from amtcore.kernels.vector.jit import kernel, part


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


def test_code_on_disk_is_of_these_sources(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel(_sum)(np.array([5.0]), 3)
    again = kernel(_sum)
    assert again(np.array([6.0]), 3) == 14 + 8 + 9
    assert sum(again.stats.cache_hits.values()) == 1
    with pytest.raises(ValueError, match="a step of 10 or more"):
        again(np.array([5.0]), 10)
    monkeypatch.setattr(jit, "sources_digest", lambda: "another")
    stale = kernel(_sum)
    stale(np.array([5.0]), 3)
    assert not stale.stats.cache_hits and sum(stale.stats.cache_misses.values()) == 1
