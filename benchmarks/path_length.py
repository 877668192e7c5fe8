"""Count the files and functions of earmill that one row, one opening and one batch run through.

Profile hooks in all threads record every Python function of earmill that is entered; `amtcore` is
not counted. The ways:

- row: from the order of a shard with one FLAC file to its commit, in a worker that ran one before
- opening: `open_features` of a dataset, after that of another one
- batch: the first batch of a `FeatureLoader`

A short way is easier to read and to change. `--list` prints the files and functions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import soundfile

import earmill
from benchmarks.report import table, write_section

FORMATS = ("zarr", "parquet")
FS_HZ = 44100
_TEXT = "Files and functions of earmill that run in one row's, one opening's, one batch's way."
# Written beside the worker's code path: Python imports a module of this name when it starts.
_WORKER_HOOK = "sitecustomize.py"
_WORKER_REPORT = "EARMILL_PATH_LENGTH"
# The worker's own method that answers the order of a shard.
_ORDER = "ShardWorker.run"
_ROOTS = tuple(
    os.path.realpath(folder) + os.sep
    for folder in (Path(earmill.__file__).parent, *Path(earmill.__file__).parent.iterdir())
    if os.path.isdir(folder)
)


class Functions:
    """The functions of earmill that were entered while `recording` was set."""

    def __init__(self) -> None:
        self.recording = False
        self._codes: set[CodeType] = set()

    def hook(self, frame: FrameType, event: str, argument: object) -> None:
        """Note the function of a call; a profile function for `sys` and `threading`."""
        if self.recording and event == "call":
            self._codes.add(frame.f_code)

    def names(self) -> list[str]:
        """`file:function` of each function, sorted; modules' own code is left out."""
        found = []
        for code in self._codes:
            path = os.path.realpath(code.co_filename)
            root = next((root for root in _ROOTS if path.startswith(root)), None)
            # Comprehensions, generator expressions and lambdas belong to their function.
            if root and not code.co_name.startswith("<"):
                found.append(f"{Path(root).name}/{path[len(root) :]}:{code.co_qualname}")
        return sorted(set(found))


@contextmanager
def recorded() -> Iterator[Functions]:
    """Record what this thread, and threads that begin meanwhile, enter."""
    functions = Functions()
    threading.setprofile(functions.hook)
    sys.setprofile(functions.hook)
    functions.recording = True
    try:
        yield functions
    finally:
        functions.recording = False
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # None ends it


def watch_worker() -> None:
    """Record the second shard of this worker process and write its functions to a file."""
    report = os.environ[_WORKER_REPORT]
    functions = Functions()
    orders = 0

    def hook(frame: FrameType, event: str, argument: object) -> None:
        nonlocal orders
        if frame.f_code.co_qualname == _ORDER and event == "call":
            orders += 1
            functions.recording = orders == 2
        functions.hook(frame, event, argument)
        if frame.f_code.co_qualname == _ORDER and event == "return" and functions.recording:
            functions.recording = False
            Path(report).write_text(json.dumps(functions.names()))

    threading.setprofile(hook)


def _clips(folder: Path, number: int) -> None:
    folder.mkdir()
    noise = np.random.default_rng(1)
    for index in range(number):
        samples = 0.1 * noise.standard_normal(FS_HZ)
        soundfile.write(folder / f"clip{index}.flac", samples, FS_HZ)


def _job(folder: Path, name: str, shard_seconds: float) -> dict[str, Any]:
    return {
        "source": {"kind": "files", "uri": str(folder / "clips")},
        "extract": [{"model": "dau1997", "fs_hz": FS_HZ}],
        "output": {
            "uri": str(folder / name),
            "formats": [name],
            "shard_seconds": shard_seconds,
        },
        "run": {"executor": "local", "workers": 1, "threads_per_worker": 1},
    }


def row_functions(folder: Path, name: str) -> list[str]:
    """Functions between the order of a shard and its commit, in a warm worker."""
    report, hooks = folder / "row.json", folder / "hooks"
    hooks.mkdir(exist_ok=True)
    (hooks / _WORKER_HOOK).write_text(
        "import sys\n"
        "if 'serve(int(' in ' '.join(sys.orig_argv):\n"
        f"    sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "    from benchmarks.path_length import watch_worker\n"
        "    watch_worker()\n"
    )
    job = folder / "job.json"
    job.write_text(json.dumps(_job(folder, name, shard_seconds=1.0)))
    environment = os.environ | {"PYTHONPATH": str(hooks), _WORKER_REPORT: str(report)}
    command = [sys.executable, "-m", "earmill.jobs.start", "extract", str(job)]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return list(json.loads(report.read_text()))


def opening_functions(uri: str, other: str) -> list[str]:
    """Functions that the first `open_features` of a dataset enters, after that of another one."""
    earmill.open_features(other)
    with recorded() as functions:
        earmill.open_features(uri)
    return functions.names()


def batch_functions(uri: str) -> list[str]:
    """Functions that a loader enters for its first batch, blocks read and decoded."""
    features = earmill.open_features(uri)
    loader = earmill.FeatureLoader(features.iterable(seed=1, epoch=0, batch_size=2))
    with recorded() as functions:
        next(iter(loader))
    return functions.names()


def main() -> None:
    """Measure the three ways for each format and write the table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--list", action="store_true", help="print files and functions too")
    options = arguments.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _clips(root / "clips", 8)
        row_ways = {name: row_functions(root, name) for name in FORMATS}
        for name, other in zip(FORMATS, reversed(FORMATS), strict=True):
            uri = str(root / name)
            ways = {
                "row": row_ways[name],
                "opening": opening_functions(uri, str(root / other)),
                "batch": batch_functions(uri),
            }
            for way, functions in ways.items():
                files = {function.split(":")[0] for function in functions}
                rows.append([way, name, str(len(files)), str(len(functions))])
                if options.list:
                    print(way, name, *functions, sep="\n  ")
    text = table(["way", "format", "files", "functions"], rows)
    write_section("Path lengths", "python -m benchmarks.path_length", f"{_TEXT}\n\n{text}")


if __name__ == "__main__":
    main()
