"""Kernels compiled ahead: beside the start of Ray, or into a folder that jobs are given.

python -m earmill.pipeline.worker.kernels '{"model": "dau1997", ...}'    those of one model
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from earmill.pipeline.common.machine import Threads, cores
from earmill.pipeline.common.text import one_line

if TYPE_CHECKING:
    from amtcore.features.base import Extractor
    from earmill.pipeline.spec.job import JobSpec

#: What one spike a second of an input unit is does not change a kernel; some models need a value.
_OPTIONS: Mapping[str, dict[str, Any]] = {"spikes": {"gain": 1.0}}


@contextmanager
def compiling(extractors: Sequence[Extractor]) -> Iterator[None]:
    """Compile the models' kernels in a thread meanwhile: a worker that starts in the block finds
    them on disk, or waits for them. What goes wrong is the worker's to tell."""
    from earmill.pipeline.worker.models import exercised

    with Threads(1, "kernels") as thread:
        thread.submit(exercised, extractors)
        yield


def entries_of(spec: JobSpec) -> list[dict[str, Any]]:
    """What a job's models are built from."""
    return [
        {"model": each.model, "fs_hz": each.fs_hz, "params": each.params, "streams": each.streams}
        for each in spec.extract
    ]


def entries_of_all() -> list[dict[str, Any]]:
    """Every model of this package with all its streams."""
    from amtcore.features.registry import BUILT_IN, get_model

    return [
        {
            "model": name,
            "streams": {each: _OPTIONS.get(each, {}) for each in get_model(name).streams},
        }
        for name in BUILT_IN
    ]


def compile_into(
    folder: Path, entries: Sequence[Mapping[str, Any]], *, cpu: str | None, features: str | None
) -> list[str]:
    """Compile the kernels of models, and of how features are stored, into a folder, each model in a
    process of its own.

    Args:
        folder: For EARMILL_KERNELS; made where it is missing.
        entries: Arguments of `build_extractor`, one mapping a model.
        cpu: LLVM's name of a processor, this one's if None. features: As LLVM writes them:
            "+avx2,+fma,-avx512f".
    Returns:
        A line for each model that failed.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder.absolute())}
    environment.pop("EARMILL_KERNELS", None)
    if cpu is not None:
        environment |= {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features or ""}

    def run(entry: Mapping[str, Any]) -> str:
        done = subprocess.run(
            [sys.executable, "-m", __name__, json.dumps(entry)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if not done.returncode:
            return ""
        why = done.stderr.strip().splitlines()[-1:] or [f"ended with {done.returncode}"]
        return f"{entry['model']}: {one_line(why[0])}"

    with Threads(cores()) as threads:
        return [line for line in threads.map(run, entries) if line]


def _compile_one(entry: Mapping[str, Any]) -> None:
    from amtcore.features.build import build_extractor
    from earmill.pipeline.worker.models import exercise_casts, exercised

    logging.getLogger("amtcore").setLevel(logging.ERROR)
    exercised([build_extractor(**entry)])
    exercise_casts()


if __name__ == "__main__":
    _compile_one(json.loads(sys.argv[1]))
