"""`earmill init`: ask some questions, write a commented job file, and estimate the job. Answers may
be quoted, begin with `~`, have spaces at the ends, or be escaped for a shell. A wrong answer is
explained with a message that says what to do."""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from earmill.jobs.commands import options
from earmill.jobs.console.job_texts import print_estimate
from earmill.jobs.console.terminal import say, say_json
from earmill.pipeline.common.errors import EarmillError, OutputError, SourceError, SpecError
from earmill.pipeline.common.text import nearest, one_line
from earmill.pipeline.storage.backend import is_local

POOLS = ("mean", "rms", "max", "subsample")
DTYPES = ("float16", "float32", "int8")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
# Needs a class that a user has written, so no default job can name it.
NEEDS_CODE = "torch_module"
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
        str | None, typer.Option(help="Kind of source; else found from the source.")
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
    as_json: options.AsJson = False,
) -> None:
    """Write a commented job file from your answers, and estimate the job.

    Asks for each answer that no option gives. Without a terminal nothing is asked: --source and
    --output are needed, the rest has defaults.
    """
    from earmill.jobs.commands.models import listed_models

    if os.path.lexists(file) and not force:
        raise OutputError(f"{file}: is there already; give another name, or --force to replace it")
    asks = sys.stdin.isatty() and not as_json
    if not asks and (source is None or output is None):
        missing = [n for n, value in (("--source", source), ("--output", output)) if value is None]
        raise SpecError(f"nothing can be asked without a terminal: give {' and '.join(missing)}")

    def ask(question: str, option: str | None, default: str, parse: Callable[[str], T]) -> T:
        """Return the parsed value of an option or an answer; a wrong answer is asked for again."""
        if option is not None or not asks:
            return parse(default if option is None else option)
        while True:
            try:
                answer = input(f"{question} [{default}]: " if default else f"{question}: ").strip()
            except EOFError:
                raise SpecError("no more answers; nothing was written") from None
            try:
                return parse(answer or default)
            except EarmillError as error:
                say(f"       {error}")

    place, kind = ask(
        "1/5  Where is the audio? A folder, bucket, table, tars, or id of a Hugging Face dataset",
        source,
        "",
        lambda answer: _source(answer, kind),
    )
    listed = [one for one in listed_models() if one["error"] is None and one["name"] != NEEDS_CODE]
    if asks and model is None:
        for one in listed:
            say(f"       {one['name']}: {one['summary']}")
    streams = {str(one["name"]): next(iter(one["streams"]), "") for one in listed}
    model = ask("2/5  Which model?", model, "dau1997", lambda answer: _model(answer, [*streams]))
    if _has_frame_rate(model, streams[model]):
        stated = None if frame_rate is None else str(frame_rate)
        frame_rate = ask("3/5  Frames per second?", stated, "100", _rate)
        how = "     How do samples become a frame?"
        pool = ask(how, pool, POOLS[0], partial(_word, POOLS))
    elif frame_rate is not None or pool is not None:
        raise SpecError(
            f"--frame-rate, --pool: the frame rate of {model} follows from its parameters, see "
            f"`earmill models {model}`; leave them out"
        )
    output = ask(
        "4/5  Where do the features go? A folder or bucket",
        output,
        f"features-{model}",
        lambda answer: _output(answer, place),
    )
    chosen_formats = ask("5/5  Stored as?", formats, "parquet,zarr", _formats)
    dtype = ask("     Type of the stored numbers?", dtype, DTYPES[0], partial(_word, DTYPES))
    licenses = {
        "source": ask(
            "     Licence of the audio, e.g. CC-BY-4.0, or nothing", source_license, "", _license
        ),
        "features": ask("     Licence of the features, or nothing", features_license, "", _license),
    }
    # The job is called by the last part of the source, and the model.
    last = re.split(r"[/\\]", place.rstrip("/\\*."))[-1]
    words = re.findall(r"[A-Za-z0-9]+", unicodedata.normalize("NFKD", last))
    text = options.job_text(
        "init.yaml.jinja",
        name="-".join([*words, model]),
        kind=kind,
        source=place,
        models=[*streams],
        model=model,
        stream=streams[model],
        rate=frame_rate,
        pool=pool,
        output=output,
        formats=chosen_formats,
        dtype=dtype,
        licenses={of: license for of, license in licenses.items() if license},
    )
    _write_and_estimate(file, text, force, as_json, is_remote=kind == "hf" or not is_local(place))


def _write_and_estimate(
    file: str, text: str, force: bool, as_json: bool, *, is_remote: bool
) -> None:
    # Imported after the questions, because it takes a while.
    from earmill.pipeline.planning.estimate import job_cost
    from earmill.pipeline.spec.job import JobSpec
    from earmill.pipeline.spec.yaml_overrides import load_yaml

    spec = JobSpec.load(load_yaml(text, name=file))
    cost, trouble = None, ""
    try:
        cost = job_cost(spec).to_dict()
    except EarmillError as error:
        # A remote source may need credentials, or a network that is not available now.
        if isinstance(error, SpecError) or not is_remote:
            raise
        trouble = one_line(error)
    try:
        with open(file, "w" if force else "x", encoding="utf-8") as job:
            job.write(text)
    except OSError as error:
        raise OutputError(f"{file}: cannot be written: {error.strerror or error}") from error
    next_step = f"wrote {file}; next: earmill extract {shlex.quote(file)}"
    if as_json:
        say_json({"event": "init", "file": file, "job": spec.name, "cost": cost, "note": trouble})
    elif cost is not None:
        print_estimate(cost)
        say(next_step)
    else:
        say(f"not looked into: {trouble}")
        say(f"{next_step}, or look again: earmill plan {shlex.quote(file)}")


def _source(answer: str, kind: str | None) -> tuple[str, str]:
    from earmill.pipeline.common.extension_points import SOURCES

    place = cleaned_place(answer)
    if kind is not None and kind not in SOURCES.names():
        raise SpecError(f"--kind: expected one of {', '.join(SOURCES.names())}, got {kind!r}")
    kind = kind or kind_of(place)
    if kind == "files" and os.path.isdir(place) and (problem := _folder_problem(place)):
        raise SourceError(f"{one_line(place)}: {problem}")
    return place, kind


def _model(answer: str, known: Sequence[str]) -> str:
    if answer == NEEDS_CODE:
        raise SpecError(f"{NEEDS_CODE} needs a class of yours: see `earmill models {NEEDS_CODE}`")
    if answer not in known:
        hint = nearest(answer.lower(), known)
        raise SpecError(f"no model {answer!r}; expected one of {', '.join(known)}{hint}")
    return answer


def _has_frame_rate(model: str, stream: str) -> bool:
    """Return False if the frame rate of a stream follows from the parameters of its model."""
    from earmill.pipeline.spec.job import JobSpec
    from earmill.pipeline.spec.models import describe_models

    asked = {"model": model, "streams": {stream: {"frame_rate_hz": 100, "pool": "mean"}}}
    job = {"source": {"kind": "files", "uri": "x"}, "extract": [asked], "output": {"uri": "y"}}
    try:
        describe_models(JobSpec.load(job))
    except SpecError:
        return False
    return True


def _rate(answer: str) -> float:
    with suppress(ValueError):
        if 0 < (rate := float(answer)) < math.inf:
            return rate
    raise SpecError(f"expected a number of frames per second above 0, got {answer!r}")


def _word(words: Sequence[str], answer: str) -> str:
    if answer not in words:
        raise SpecError(f"expected one of {', '.join(words)}, got {answer!r}")
    return answer


def _output(answer: str, source: str) -> str:
    """Return the place of the features, after a check that features can be written there."""
    place = cleaned_place(answer)
    if not is_local(place):
        return place
    if os.path.exists(place) and not os.path.isdir(place):
        raise OutputError(f"{one_line(place)}: a file; give a folder, which is made if it is new")
    if is_local(source) and os.path.realpath(place) == os.path.realpath(source):
        raise OutputError(f"{one_line(place)}: the folder of the audio; give another one")
    if os.path.exists(os.path.join(place, "dataset.json")):
        raise OutputError(f"{one_line(place)}: holds features already; give another folder")
    return place


def _formats(answer: str) -> list[str]:
    from earmill.pipeline.common.extension_points import FORMATS

    words = answer.replace(",", " ").split()
    if not words:
        raise SpecError(f"expected at least one of {', '.join(FORMATS.names())}")
    return sorted({_word(FORMATS.names(), word) for word in words})


def _license(answer: str) -> str:
    from pydantic import ValidationError

    from earmill.pipeline.spec.licenses import License

    try:
        return License(id=answer).id if answer else ""
    except ValidationError as error:
        message = str(error.errors()[0].get("ctx", {}).get("error", error))
        raise SpecError(f"{message}; one with a name of its own: docs/hub.md") from None


def cleaned_place(answer: str) -> str:
    """Return a path or address without quotes, escapes and `~`."""
    text = answer.strip()
    if not text:
        raise SourceError("expected a folder, file or address, got nothing")
    path = os.path.expanduser(text)
    if not is_local(text) or os.path.exists(path):
        return path
    try:
        words = shlex.split(text)
    except ValueError:  # an apostrophe in a name
        return path
    return os.path.expanduser(words[0]) if len(words) == 1 else path


def kind_of(source: str) -> str:
    """Return the kind of source by the name of a place; a local place must exist."""
    # Arrow is loaded here, not when the command starts.
    from earmill.pipeline.sources.tables import TABLE_ENDINGS

    is_remote = not is_local(source)
    bare = (source.split("?")[0] if is_remote else source).lower()
    if bare.endswith((".tar", ".tar.gz", ".tgz")):
        return "webdataset"
    if bare.endswith(TABLE_ENDINGS):
        return "manifest"
    if is_remote or any(c in source for c in "*?[") or os.path.exists(source):
        return "hf" if source.startswith("hf://datasets/") else "files"
    if HUB_ID.fullmatch(source) and not source.startswith("."):
        return "hf"
    raise SourceError(f"{one_line(source)}: not found; check the name{_nearby(Path(source))}")


def _nearby(path: Path) -> str:
    """Return a hint with the files beside a missing path."""
    try:
        there = next(folder for folder in path.parents if folder.is_dir())
        names = sorted(one.name for one in there.iterdir() if not one.name.startswith("."))
    except (StopIteration, OSError):
        return ""
    wanted = path.relative_to(there).parts[0]
    if close := difflib.get_close_matches(wanted, names, n=1, cutoff=0.5):
        return f"; did you mean {one_line(str(there / close[0]))}?"
    shown = ", ".join(map(one_line, names[:4])) + (", ..." if len(names) > 4 else "")
    return f"; in {one_line(str(there))} there is {shown or 'nothing'}"


def _folder_problem(folder: str) -> str:
    """Return why a local folder holds no audio, with a suggestion; nothing if it holds audio."""
    from earmill.pipeline.spec.source import AUDIO_EXTENSIONS

    endings = Counter[str]()
    for path in (Path(inner, name) for inner, _, names in os.walk(folder) for name in names):
        ending = path.suffix.lower()
        if ending[1:] in AUDIO_EXTENSIONS:
            return ""
        if ending in (".tar", ".csv", ".tsv", ".jsonl", ".parquet"):
            return (
                f"no audio in this folder; if {one_line(str(path))} says where it is or holds it, "
                "give that file instead"
            )
        endings[ending or "without an ending"] += 1
    if not endings:
        return "an empty folder; give the one with the recordings"
    held = ", ".join(f"{count} {ending}" for ending, count in endings.most_common(3))
    return (
        f"no audio in this folder (it holds {held}); give the one with the recordings, or name "
        "their endings in source.extensions of a job file of your own"
    )
