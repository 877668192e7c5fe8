"""Small jobs to disturb, and the comparison of a disturbed result with an undisturbed one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil
import yaml

from earmill import compute_statistics, open_features
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.storage.layout import Layout
from tests.pipeline import audio_factory

ATTEMPT = re.compile(r"-[0-9a-f]{8}(?=\.)")
ROOT = Path(__file__).resolve().parents[2]
# A few channels of Dau1997: each is computed as the others are.
FEW = {"flow": 400.0, "fhigh": 1000.0}


def write_corpus(folder: Path, clips: int, seconds: float = 1.0) -> Path:
    """Good clips of several formats."""
    folder.mkdir(parents=True)
    kinds = list(audio_factory.FORMATS)
    for index in range(clips):
        kind = kinds[index % len(kinds)]
        data = audio_factory.clip(kind, seconds, seed=index)
        (folder / f"{index:03d}.{kind.split('-')[0]}").write_bytes(data)
    return folder


def write_job(
    path: Path,
    corpus: Path,
    output: Path,
    *,
    params: dict[str, float] | None = None,
    **output_options: Any,
) -> Path:
    """Write a job file: Dau1997 at 16 kHz, one clip a shard unless told otherwise.

    Args:
        path: The job file.
        corpus: Folder of the clips.
        output: Folder of the dataset.
        params: Parameters of the model, `FEW` for instance; None for its own.
        output_options: More of the job's section `output`.
    """
    job = {
        "name": path.stem,
        "source": {"kind": "files", "uri": str(corpus)},
        "extract": [{"model": "dau1997", "fs_hz": 16000, **({"params": params} if params else {})}],
        "output": {"uri": str(output), "shard_seconds": 1.2, **output_options},
        "run": {"threads_per_worker": 2},
    }
    path.write_text(yaml.safe_dump(job))
    return path


def start_extract(
    arguments: Sequence[str], environment: Mapping[str, str], errors: int | IO[bytes]
) -> subprocess.Popen[str]:
    """A process of `earmill extract` that prints its events as JSON lines."""
    return subprocess.Popen(
        [sys.executable, "-m", "earmill.jobs.start", "extract", "--json", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )


def run_script(module: str, *arguments: str) -> list[dict[str, Any]]:
    """The events that a script with a Ray of its own prints; it must end well."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


class Driver:
    """A real `earmill extract` process whose JSON lines are read as they come."""

    def __init__(self, *arguments: str, ray_address: str | None) -> None:
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        if ray_address is not None:
            environment["RAY_ADDRESS"] = ray_address
        self.process = start_extract(arguments, environment, subprocess.PIPE)

    def events(self) -> Iterator[dict[str, Any]]:
        """Events until the process closes its output."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield json.loads(line)

    def wait_for(self, kind: str, times: int = 1) -> dict[str, Any]:
        """The n-th event of a kind from now on."""
        for event in self.events():
            times -= event["event"] == kind
            if times == 0:
                return event
        raise AssertionError(f"no event {kind}: {self.errors()}")

    def finish(self) -> tuple[int, dict[str, Any]]:
        """Exit code and last event."""
        *_, last = self.events()
        return self.process.wait(), last

    def errors(self) -> str:
        """Standard error, once the process has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def close(self) -> None:
        """Make sure that the process and its pipes are gone."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@contextmanager
def driver(*arguments: str, ray_address: str | None) -> Iterator[Driver]:
    """A driver process that is gone when the block ends."""
    running = Driver(*arguments, ray_address=ray_address)
    try:
        yield running
    finally:
        running.close()


def session_address() -> str:
    """Address of the test session's own Ray."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


def worker_pids(root: psutil.Process | None = None) -> list[int]:
    """Shard workers among the descendants of a process, this one by default."""
    found = (root or psutil.Process()).children(recursive=True)
    return [process.pid for process in found if _name(process).startswith("ray::ShardWorker")]


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def committed_files(output: Path) -> dict[str, tuple[int, str]]:
    """Bytes and sha256 of every file that commits name, attempts taken out of the names."""
    records = commits(Layout.open(str(output)))
    return {
        ATTEMPT.sub("", file.path): (file.bytes, file.sha256)
        for record in records.values()
        for file in record.files
    }


def assert_whole(output: Path) -> None:
    """The dataset verifies, every byte read."""
    report = verify(Layout.open(str(output)))
    assert report.problems == []
    assert report.shards == report.shards_planned


def assert_equal_datasets(disturbed: Path, undisturbed: Path) -> None:
    """Check that two datasets have equal rows in equal order, equal files and equal values.

    Their statistics are equal bit for bit, and are the statistics of the features.
    """
    assert_whole(disturbed)
    assert committed_files(disturbed) == committed_files(undisturbed)
    for format_ in open_features(str(undisturbed)).dataset.spec["output"]["formats"]:
        got = open_features(str(disturbed), format=format_)
        expected = open_features(str(undisturbed), format=format_)
        assert [row.row_id for row in got] == [row.row_id for row in expected]
        for one, other in zip(got, expected, strict=True):
            assert one.seconds == other.seconds
            for name, values in other.features.items():
                np.testing.assert_array_equal(one.features[name], values)
        assert got.moments == expected.moments and got.moments
        for name, found in compute_statistics(got).items():
            assert found.stored() == got.moments[name]
    assert _index_names(disturbed) == _index_names(undisturbed)


def _index_names(output: Path) -> Sequence[str]:
    # The name is the content's hash, so equal names are equal indexes.
    return sorted(path.name for path in (output / "index").iterdir())
