"""`earmill init`: five questions, a commented job file and what it would take."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from earmill.jobs.commands.options import AsJson
from earmill.jobs.console.terminal import say, say_json
from earmill.pipeline.common.errors import EarmillError, OutputError, SourceError, SpecError
from earmill.pipeline.common.text import one_line

if TYPE_CHECKING:
    from earmill.jobs.first_job import Answers

POOLS = ("mean", "rms", "max", "subsample")
DTYPES = ("float16", "float32", "int8")
FRAME_RATE = "100"
SOURCE_QUESTION = (
    "Where is the audio? A folder, bucket, table, tars, or id of a Hugging Face dataset"
)
T = TypeVar("T")


def init(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The job file to write.")
    ] = "job.yaml",
    source: Annotated[
        str | None,
        typer.Option(
            help="Where the audio is: a folder, a bucket, a table (csv, tsv, jsonl, parquet), "
            "tars, or the id of a Hugging Face dataset."
        ),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="Kind of source; else as the source looks.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model; else dau1997.")] = None,
    frame_rate: Annotated[
        float | None, typer.Option(metavar="HZ", help="Frames per second; else 100.")
    ] = None,
    pool: Annotated[
        str | None, typer.Option(help=f"How samples become a frame: {', '.join(POOLS)}.")
    ] = None,
    output: Annotated[str | None, typer.Option(help="Where the features go.")] = None,
    formats: Annotated[
        str | None, typer.Option(help="Formats, with commas between; else parquet,zarr.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = None,
    source_license: Annotated[
        str | None, typer.Option(metavar="ID", help="Licence of the audio, e.g. CC-BY-4.0.")
    ] = None,
    features_license: Annotated[
        str | None, typer.Option(metavar="ID", help="Licence of the features.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a commented job file out of five answers, and show what the job would take.

    Asks for what no option says. Without a terminal nothing is asked: --source and --output are
    needed, the rest has defaults.
    """
    from earmill.jobs.first_job import Answers, stream_of, usable
    from earmill.jobs.model_list import listed_models

    if os.path.lexists(file) and not force:
        raise OutputError(f"{file}: is there already; give another name, or --force to replace it")
    asks = sys.stdin.isatty() and not as_json
    if not asks and (source is None or output is None):
        missing = [n for n, said in (("--source", source), ("--output", output)) if said is None]
        raise SpecError(f"nothing can be asked without a terminal: give {' and '.join(missing)}")
    ask = _Asker(asks)
    place, found = ask(f"1/5  {SOURCE_QUESTION}", source, None, lambda said: _source(said, kind))
    listed = usable(listed_models())
    if asks and model is None:
        for one in listed:
            say(f"       {one['name']}: {one['summary']}")
    chosen, stream = ask(
        "2/5  Which model?", model, "dau1997", lambda said: (said, stream_of(said, listed))
    )
    folder = f"features-{chosen}"
    answers = Answers(
        source=place,
        kind=found,
        model=chosen,
        stream=stream,
        options=_pooling(ask, chosen, stream, frame_rate, pool),
        output=ask(
            "4/5  Where do the features go? A folder or bucket",
            output,
            folder,
            lambda said: _output(said, place),
        ),
        formats=ask("5/5  Stored as?", formats, "parquet,zarr", _formats),
        dtype=ask("     In numbers of?", dtype, DTYPES[0], _one_of(DTYPES)),
        licenses=_licenses(ask, source_license, features_license),
    )
    _finish(file, answers, [one["name"] for one in listed], as_json=as_json, force=force)


class _Asker:
    """Takes what an option says, else asks; a wrong answer is explained and asked for again."""

    def __init__(self, asks: bool) -> None:
        self._asks = asks

    def __call__(
        self, question: str, said: str | None, default: str | None, meant: Callable[[str], T]
    ) -> T:
        """What an answer means.

        Args:
            said: By an option. default: None where there is none.
        """
        if said is not None or not self._asks:
            return meant(said if said is not None else default or "")
        shown = f" [{default}]" if default else ""
        while True:
            try:
                answer = input(f"{question}{shown}: ").strip()
            except EOFError:
                raise SpecError("no more answers; nothing was written") from None
            try:
                return meant(answer or default or "")
            except EarmillError as error:
                say(f"       {error}")


def _source(said: str, kind: str | None) -> tuple[str, str]:
    from earmill.jobs.first_job import cleaned_place, kind_of, place_problem
    from earmill.pipeline.common.extension_points import SOURCES

    place = cleaned_place(said)
    if kind is not None and kind not in SOURCES.names():
        raise SpecError(f"--kind: expected one of {', '.join(SOURCES.names())}, got {kind!r}")
    found = kind or kind_of(place)
    if problem := place_problem(place, found):
        raise SourceError(problem)
    return place, found


def _output(said: str, source: str) -> str:
    from earmill.jobs.first_job import check_output, cleaned_place

    place = cleaned_place(said)
    check_output(place, source)
    return place


def _pooling(
    ask: _Asker, model: str, stream: str, frame_rate: float | None, pool: str | None
) -> dict[str, Any]:
    """Frame rate and pooling of a stream, unless they are the model's affair."""
    from earmill.jobs.first_job import takes_pooling

    if takes_pooling(model, stream):
        rate = None if frame_rate is None else str(frame_rate)
        return {
            "frame_rate_hz": ask("3/5  Frames per second?", rate, FRAME_RATE, _rate),
            "pool": ask("     How do samples become a frame?", pool, POOLS[0], _one_of(POOLS)),
        }
    if frame_rate is not None or pool is not None:
        raise SpecError(
            f"--frame-rate, --pool: the frame rate of {model} follows from its parameters, see "
            f"`earmill models {model}`; leave them out"
        )
    return {}


def _rate(said: str) -> float:
    try:
        rate = float(said)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise SpecError(f"expected a number of frames per second above 0, got {said!r}")
    return rate


def _one_of(words: Sequence[str]) -> Callable[[str], str]:
    def meant(said: str) -> str:
        if said not in words:
            raise SpecError(f"expected one of {', '.join(words)}, got {said!r}")
        return said

    return meant


def _formats(said: str) -> list[str]:
    from earmill.pipeline.common.extension_points import FORMATS

    words = said.replace(",", " ").split()
    known = _one_of(FORMATS.names())
    if not words:
        raise SpecError(f"expected at least one of {', '.join(FORMATS.names())}")
    return sorted({known(word) for word in words})


def _licenses(ask: _Asker, source: str | None, features: str | None) -> dict[str, str]:
    from pydantic import ValidationError

    from earmill.pipeline.spec.licenses import License

    def meant(said: str) -> str:
        if not said:
            return ""
        try:
            return License(id=said).id
        except ValidationError as error:
            told = str(error.errors()[0].get("ctx", {}).get("error", error))
            raise SpecError(f"{told}; one with a name of its own: docs/hub.md") from None

    said = {
        "source": ask("     Licence of the audio, e.g. CC-BY-4.0, or nothing", source, "", meant),
        "features": ask("     Licence of the features, or nothing", features, "", meant),
    }
    return {of: value for of, value in said.items() if value}


def _finish(
    file: str, answers: Answers, models: Sequence[str], *, as_json: bool, force: bool
) -> None:
    """Check the job, show what it would take, write the file."""
    from earmill.jobs.console.estimate import print_estimate
    from earmill.jobs.first_job import commented
    from earmill.pipeline.planning.estimate import job_cost
    from earmill.pipeline.spec.job import JobSpec
    from earmill.pipeline.spec.yaml_overrides import load_yaml
    from earmill.pipeline.storage.filesystems import is_local

    text = commented(answers, models, POOLS)
    spec = JobSpec.load(load_yaml(text, name=file))
    cost, trouble = None, ""
    try:
        cost = job_cost(spec).to_dict()
    except EarmillError as error:
        # What is elsewhere may need credentials, or a network that is not here now.
        if isinstance(error, SpecError) or not (
            answers.kind == "hf" or not is_local(answers.source)
        ):
            raise
        trouble = one_line(error)
    _write(file, text, force)
    if as_json:
        say_json({"event": "init", "file": file, "job": spec.name, "cost": cost, "note": trouble})
        return
    if cost is not None:
        print_estimate(cost)
    else:
        say(f"not looked into: {trouble}")
    shown = shlex.quote(file)
    say(
        f"wrote {file}; next: earmill extract {shown}"
        + (f", or look again: earmill plan {shown}" if trouble else "")
    )


def _write(file: str, text: str, force: bool) -> None:
    try:
        with open(file, "w" if force else "x", encoding="utf-8") as job:
            job.write(text)
    except OSError as error:
        raise OutputError(f"{file}: cannot be written: {error.strerror or error}") from error
