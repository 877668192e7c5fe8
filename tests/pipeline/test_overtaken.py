"""A command that was stopped while others worked on its output: it says so, and harms nothing.

Each command is stopped before one of its calls to the output, in turn. Each time the others use
the output for themselves, or remove it.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import earmill
from earmill.pipeline.common.errors import EarmillError, OvertakenError
from earmill.pipeline.dataset import copied_rows
from earmill.pipeline.dataset.garbage import collect_garbage
from earmill.pipeline.dataset.revision import compact as merge
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.operations.update import start_update
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import CREW, DRIVER_FILE
from tests.pipeline.again_jobs import module_without_ray  # noqa: F401
from tests.pipeline.changing_corpus import (
    Changing,
    corpus_and_output,  # noqa: F401
    fresh,  # noqa: F401
    in_both_formats,
)
from tests.pipeline.outputs import s3_server
from tests.pipeline.stopped import Stop, stopped
from tests.short import but

MEL = {"name": "mel", "extract": [{"model": "melspectrogram", "fs_hz": 16000}]}


def change(job: Changing, name: str) -> None:
    """Another source: a row of the first shard goes, one has other audio, and one comes."""
    names = job.names()
    (job.corpus / names[0]).unlink()
    job.write(f"{name}.wav", 9)
    job.write(names[1], 11)


def finished(job: Changing) -> None:
    """Run the job to its end, from what is there."""
    run_job(job.spec(), resume=True)


# -- what is stopped ----------------------------------------------------------------------------


def extract(job: Changing) -> None:
    run_job(job.spec())


def extract_joining(job: Changing) -> None:
    run_job(job.spec(), join=True)


def update(job: Changing) -> None:
    start_update(job.spec())
    run_job(job.spec(), resume=True)


def repair(job: Changing) -> None:
    run_job(job.spec(), resume=True, again=lambda layout: {"00001": ()})


def compact(job: Changing) -> None:
    merge(job.layout, shard_rows=6)


def collect(job: Changing) -> None:
    collect_garbage(job.layout, keep=1, grace_s=0)


def add_features(job: Changing) -> None:
    output = job.spec().output
    earmill.add_features(output.uri, MEL, storage_options=output.storage_options)


# -- what the others do -------------------------------------------------------------------------


def others_update(job: Changing) -> None:
    finished(job)
    change(job, "meanwhile")
    update(job)
    collect(job)


def others_repair(job: Changing) -> None:
    finished(job)
    repair(job)
    collect(job)


def others_compact(job: Changing) -> None:
    finished(job)
    merge(job.layout, shard_rows=100)
    collect(job)


def others_add_features(job: Changing) -> None:
    finished(job)
    add_features(job)


def others_look_after_it(job: Changing) -> None:
    finished(job)
    collect(job)


def others_remove_it(job: Changing) -> None:
    empty(job.layout)


FROM_NOTHING = (extract, extract_joining)
# The short version stops the command before one of EACH calls: a stop costs 3 or 4 runs of a job.
EACH = 6
COMMANDS = (*FROM_NOTHING, update, repair, compact, collect, add_features)
CHANGES = ("write", "put", "_replace", "remove", "delete", "upload")
OTHERS = (
    *(others_update, others_repair, others_compact, others_add_features),
    *(others_look_after_it, others_remove_it),
)


class OnABucket(Changing):
    """A `Changing` whose output is in a bucket."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        super().__init__(folder, ("parquet", "zarr"))
        self.options, self.uri = options, "s3://out/set"

    def spec(self, out: Path | None = None) -> JobSpec:
        made = super().spec(out)
        place = {"uri": self.uri, "storage_options": self.options}
        return made.model_copy(update={"output": made.output.model_copy(update=place)})

    @property
    def layout(self) -> Layout:
        return Layout.open(self.uri, self.options)


def empty(layout: Layout) -> None:
    """Remove an output."""
    if layout.is_local:
        shutil.rmtree(layout.root, ignore_errors=True)
        return
    for name in layout.everything():
        layout.delete(name)


def contents(layout: Layout) -> dict[str, bytes]:
    """Every file, but signs of life and unfinished work."""
    if layout.is_local and not Path(layout.root).exists():
        return {}
    names = (one for one in layout.everything() if not re.search(r"(^|/)\.", one))
    return {name: layout.read_bytes(name) for name in names}


def holds(job: Changing) -> bool:
    """Return True if a command has a right to write to the output now."""
    return job.layout.exists(DRIVER_FILE) or bool(job.layout.list(CREW))


class Trial:
    """One command, started again and again from the same state and stopped somewhere else."""

    def __init__(self, job: Changing, command: Callable[[Changing], None]) -> None:
        self.job, self.command = job, command
        if command in FROM_NOTHING:
            shutil.rmtree(job.out)
        if command is update:
            change(job, "before")
        self.before = job.folder.parent / f"{job.folder.name}-before"
        shutil.rmtree(self.before, ignore_errors=True)
        shutil.copytree(job.folder, self.before)

    def calls(self) -> list[str]:
        """Every call of the command to the output, undisturbed."""
        return self.run(0, others_remove_it)[0].calls

    def run(self, number: int, others: Callable[[Changing], None]) -> tuple[Stop, str]:
        """Stop before one call; what went wrong, in words."""
        self._restore()
        left, held = {}, []

        def work() -> None:
            held.append(holds(self.job))
            others(self.job)
            left.update(contents(self.job.layout))

        said: Exception | None = None
        with stopped(number, work) as stop:
            try:
                self.command(self.job)
            except Exception as error:
                said = error
        if not stop.came:
            return stop, ""
        return stop, self._problem(stop.calls[number - 1], said, left, any(held))

    def _restore(self) -> None:
        shutil.rmtree(self.job.folder)
        shutil.copytree(self.before, self.job.folder)
        layout = self.job.layout
        if not layout.is_local:
            empty(layout)
            for path in sorted(self.job.out.rglob("*")):
                if path.is_file():
                    layout.write_bytes(path.relative_to(self.job.out).as_posix(), path.read_bytes())

    def _problem(
        self, call: str, said: Exception | None, left: dict[str, bytes], held: bool
    ) -> str:
        if said is not None and not isinstance(said, EarmillError):
            return repr(said)
        now = contents(self.job.layout)
        other = {name for name in now.keys() | left.keys() if now.get(name) != left.get(name)}
        if held and not isinstance(said, OvertakenError) and other:
            return f"it ended with {said!r} and changed {other}"
        if held and not left:
            # The call under way cannot be called back; a plan does no harm.
            more = {
                name for name in other if name.split("/")[0] not in call and "plan/" not in name
            }
            return f"it wrote {more} to an output that was removed" if more else ""
        if "dataset.json" not in now:
            return ""
        for _ in range(2):
            if problems := verify(self.job.layout).problems:
                return f"{said!r}: {problems}"
            collect(self.job)
        return ""


def kind_of(call: str) -> str:
    """Calls that do the same to the same kind of file."""
    return re.sub(r"[0-9a-f]{5,}.*", "", call)


@pytest.fixture(scope="module", autouse=True)
def _two_shards() -> Iterator[None]:
    """Enough for calls of each kind; a command is run, and verified, dozens of times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Changing, "shard_rows", 3)
        yield


@pytest.fixture(autouse=True)
def _one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process stops as a whole; here only the thread of the call stops."""
    monkeypatch.setattr(copied_rows, "THREADS", 1)


@in_both_formats
@pytest.mark.timeout(1800)  # many runs of a job
@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["some", "every"]
)
@pytest.mark.parametrize(
    "command",
    but([extract_joining, add_features, repair], COMMANDS),
    ids=lambda one: one.__name__,
)
def test_a_stopped_command_says_so_and_harms_nothing(
    command: Callable[[Changing], None], every: bool, changing: Changing
) -> None:
    check(Trial(changing, command), every=every)


@in_both_formats
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", [extract_joining, update], ids=lambda one: one.__name__)
def test_in_a_bucket_it_is_the_same(
    command: Callable[[Changing], None], changing: Changing
) -> None:
    with s3_server() as options:
        check(Trial(OnABucket(changing.folder, options), command), only="commits|revis|current")


def check(trial: Trial, *, every: bool = False, only: str = "") -> None:
    """Stop a command before every call, with all that others may do; or before a few of the calls
    that change something, with one thing that others may do each.

    Args:
        only: Calls that are meant, as a regular expression.
    """
    calls, problems = trial.calls(), list[str]()
    chosen: list[tuple[int, Callable[[Changing], None]]]
    if every:
        chosen = [(number, others) for number, _ in enumerate(calls, 1) for others in OTHERS]
    else:
        chosen = list(zip(_first_of_each_kind(calls, only), itertools.cycle(OTHERS)))
        chosen = chosen[COMMANDS.index(trial.command) % min(EACH, len(chosen)) :: EACH]
    for number, others in chosen:
        if problem := trial.run(number, others)[1]:
            problems.append(f"{others.__name__} before {calls[number - 1]}: {problem}")
    assert chosen
    assert problems == []


def _first_of_each_kind(calls: list[str], only: str) -> list[int]:
    """Numbers, from 1, of the first call of each kind that changes something."""
    found: dict[str, int] = {}
    for number, call in enumerate(calls, 1):
        if call.startswith(CHANGES) and re.search(only, call):
            found.setdefault(kind_of(call), number)
    return list(found.values())
