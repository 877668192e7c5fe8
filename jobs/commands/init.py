"""`earmill init`: ask five questions, write a commented job file, and estimate the job.

Answers may be quoted, begin with `~`, have spaces at the ends, or be escaped for a shell. A wrong
answer is explained with a message that says what to do.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import yaml

from earmill.jobs.commands import options
from earmill.jobs.console.estimate import print_estimate
from earmill.jobs.console.terminal import say, say_json
from earmill.pipeline.common.errors import EarmillError, OutputError, SourceError, SpecError
from earmill.pipeline.common.text import one_line

POOLS = ("mean", "rms", "max", "subsample")
DTYPES = ("float16", "float32", "int8")
SOURCE_QUESTION = (
    "Where is the audio? A folder, bucket, table, tars, or id of a Hugging Face dataset"
)
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
    """Write a commented job file from five answers, and estimate the job.

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
    ask = _Asker(asks)
    place, kind = ask(f"1/5  {SOURCE_QUESTION}", source, None, lambda text: _source(text, kind))
    listed = [one for one in listed_models() if one["error"] is None and one["name"] != NEEDS_CODE]
    if asks and model is None:
        for one in listed:
            say(f"       {one['name']}: {one['summary']}")
    streams = {str(one["name"]): next(iter(one["streams"]), "") for one in listed}
    model = ask("2/5  Which model?", model, "dau1997", lambda text: _model(text, list(streams)))
    stream = streams[model]
    output_question = "4/5  Where do the features go? A folder or bucket"
    text = _job_text(
        source=place,
        kind=kind,
        model=model,
        models=list(streams),
        stream=stream,
        pooling=_pooling(ask, model, stream, frame_rate, pool),
        output=ask(output_question, output, f"features-{model}", lambda text: _output(text, place)),
        formats=ask("5/5  Stored as?", formats, "parquet,zarr", _formats),
        dtype=ask("     In numbers of?", dtype, DTYPES[0], _one_of(DTYPES)),
        licenses=_licenses(ask, source_license, features_license),
    )
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
        is_remote = kind == "hf" or not _is_local(place)
        if isinstance(error, SpecError) or not is_remote:
            raise
        trouble = one_line(error)
    try:
        with open(file, "w" if force else "x", encoding="utf-8") as job:
            job.write(text)
    except OSError as error:
        raise OutputError(f"{file}: cannot be written: {error.strerror or error}") from error
    if as_json:
        say_json({"event": "init", "file": file, "job": spec.name, "cost": cost, "note": trouble})
        return
    shown = shlex.quote(file)
    if cost is not None:
        print_estimate(cost)
        say(f"wrote {file}; next: earmill extract {shown}")
    else:
        say(f"not looked into: {trouble}")
        say(f"wrote {file}; next: earmill extract {shown}, or look again: earmill plan {shown}")


class _Asker:
    """Takes the value of an option, or asks; explains a wrong answer and asks again."""

    def __init__(self, asks: bool) -> None:
        self._asks = asks

    def __call__(
        self, question: str, option: str | None, default: str | None, parse: Callable[[str], T]
    ) -> T:
        """Return the parsed answer.

        `default` is the answer for an empty line; `parse` turns the answer into a value, or raises
        an error that explains it.
        """
        if option is not None or not self._asks:
            return parse(option if option is not None else default or "")
        shown = f" [{default}]" if default else ""
        while True:
            try:
                answer = input(f"{question}{shown}: ").strip()
            except EOFError:
                raise SpecError("no more answers; nothing was written") from None
            try:
                return parse(answer or default or "")
            except EarmillError as error:
                say(f"       {error}")


def _is_local(place: str) -> bool:
    from earmill.pipeline.storage.fsspec_store import is_local  # imports fsspec

    return is_local(place)


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
        close = difflib.get_close_matches(answer.lower(), known, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise SpecError(f"no model {answer!r}; expected one of {', '.join(known)}{hint}")
    return answer


def _pooling(
    ask: _Asker, model: str, stream: str, frame_rate: float | None, pool: str | None
) -> dict[str, Any]:
    """Return frame rate and pooling of a stream; nothing if the model sets its frame rate."""
    from earmill.pipeline.spec.job import JobSpec
    from earmill.pipeline.spec.models import describe_models

    asked = {"model": model, "streams": {stream: {"frame_rate_hz": 100, "pool": "mean"}}}
    job = {"source": {"kind": "files", "uri": "x"}, "extract": [asked], "output": {"uri": "y"}}
    try:
        describe_models(JobSpec.load(job))
    except SpecError:
        if frame_rate is None and pool is None:
            return {}
        raise SpecError(
            f"--frame-rate, --pool: the frame rate of {model} follows from its parameters, see "
            f"`earmill models {model}`; leave them out"
        ) from None
    rate = None if frame_rate is None else str(frame_rate)
    return {
        "frame_rate_hz": ask("3/5  Frames per second?", rate, "100", _rate),
        "pool": ask("     How do samples become a frame?", pool, POOLS[0], _one_of(POOLS)),
    }


def _rate(answer: str) -> float:
    try:
        rate = float(answer)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise SpecError(f"expected a number of frames per second above 0, got {answer!r}")
    return rate


def _one_of(words: Sequence[str]) -> Callable[[str], str]:
    def parse(answer: str) -> str:
        if answer not in words:
            raise SpecError(f"expected one of {', '.join(words)}, got {answer!r}")
        return answer

    return parse


def _output(answer: str, source: str) -> str:
    """Return the place of the features, after a check that features can be written there."""
    place = cleaned_place(answer)
    if not _is_local(place):
        return place
    if os.path.exists(place) and not os.path.isdir(place):
        raise OutputError(f"{one_line(place)}: a file; give a folder, which is made if it is new")
    if _is_local(source) and os.path.realpath(place) == os.path.realpath(source):
        raise OutputError(f"{one_line(place)}: the folder of the audio; give another one")
    if os.path.exists(os.path.join(place, "dataset.json")):
        raise OutputError(f"{one_line(place)}: holds features already; give another folder")
    return place


def _formats(answer: str) -> list[str]:
    from earmill.pipeline.common.extension_points import FORMATS

    words = answer.replace(",", " ").split()
    if not words:
        raise SpecError(f"expected at least one of {', '.join(FORMATS.names())}")
    return sorted(set(map(_one_of(FORMATS.names()), words)))


def _licenses(ask: _Asker, source: str | None, features: str | None) -> dict[str, str]:
    from pydantic import ValidationError

    from earmill.pipeline.spec.licenses import License

    def parse(answer: str) -> str:
        if not answer:
            return ""
        try:
            return License(id=answer).id
        except ValidationError as error:
            message = str(error.errors()[0].get("ctx", {}).get("error", error))
            raise SpecError(f"{message}; one with a name of its own: docs/hub.md") from None

    licenses = {
        "source": ask("     Licence of the audio, e.g. CC-BY-4.0, or nothing", source, "", parse),
        "features": ask("     Licence of the features, or nothing", features, "", parse),
    }
    return {of: value for of, value in licenses.items() if value}


def cleaned_place(answer: str) -> str:
    """Return a path or address without quotes, escapes and `~`."""
    text = answer.strip()
    if not text:
        raise SourceError("expected a folder, file or address, got nothing")
    if not _is_local(text):
        return text
    path = os.path.expanduser(text)
    if os.path.exists(path):
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

    is_remote = not _is_local(source)
    bare = (source.split("?")[0] if is_remote else source).lower()
    if bare.endswith((".tar", ".tar.gz", ".tgz")):
        return "webdataset"
    if bare.endswith(TABLE_ENDINGS):
        return "manifest"
    if is_remote or any(c in source for c in "*?[") or os.path.exists(source):
        return "hf" if source.startswith("hf://datasets/") else "files"
    if HUB_ID.fullmatch(source) and not source.startswith("."):
        return "hf"
    raise SourceError(f"{one_line(source)}: not found{_nearby(source)}; check the name")


def _nearby(source: str) -> str:
    """Return a hint with the files beside a missing path."""
    path = Path(source)
    there = next((folder for folder in path.parents if folder.is_dir()), None)
    if there is None:
        return ""
    try:
        names = sorted(one.name for one in there.iterdir() if not one.name.startswith("."))
    except OSError:
        return ""
    wanted = path.relative_to(there).parts[0]
    close = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {one_line(str(there / close[0]))}?"
    shown = ", ".join(map(one_line, names[:4])) + (", ..." if len(names) > 4 else "")
    return f"; in {one_line(str(there))} there is {shown or 'nothing'}"


def _folder_problem(folder: str) -> str:
    """Return why a local folder holds no audio, with a suggestion; nothing if it holds audio."""
    from earmill.pipeline.spec.source import AUDIO_EXTENSIONS

    endings = Counter[str]()
    for inner, _, names in os.walk(folder):
        for name in names:
            ending = Path(name).suffix.lower().lstrip(".")
            if ending in AUDIO_EXTENSIONS:
                return ""
            endings[ending] += 1
            if ending in ("tar", "csv", "tsv", "jsonl", "parquet"):
                return (
                    f"no audio in this folder; if {one_line(os.path.join(inner, name))} says where "
                    "it is or holds it, give that file instead"
                )
    if not endings:
        return "an empty folder; give the one with the recordings"
    held = ", ".join(
        f"{count} {'.' + ending if ending else 'without an ending'}"
        for ending, count in endings.most_common(3)
    )
    return (
        f"no audio in this folder (it holds {held}); give the one with the recordings, or name "
        "their endings in source.extensions of a job file of your own"
    )


def _job_text(
    *,
    source: str,
    kind: str,
    model: str,
    models: Sequence[str],
    stream: str,
    pooling: Mapping[str, Any],
    output: str,
    formats: Sequence[str],
    dtype: str,
    licenses: Mapping[str, str],
) -> str:
    """Return the text of the job file. `pooling` is empty if the model sets its frame rate."""
    # Name of the job: the last part of the source, and the model.
    last = re.split(r"[/\\]", source.rstrip("/\\*."))[-1]
    words = re.findall(r"[A-Za-z0-9]+", unicodedata.normalize("NFKD", last))
    relative = "\n  # Relative to the folder in which earmill is run."
    here = relative if _is_local(source) and not os.path.isabs(source) else ""
    there = relative if _is_local(output) and not os.path.isabs(output) else ""
    rate = "  # its frame rate follows from the model's parameters"
    if pooling:
        rate = f"""
        frame_rate_hz: {pooling["frame_rate_hz"]:g}  # rows of features per second
        pool: {pooling["pool"]}  # what a frame says of its samples: {", ".join(POOLS)}"""
    cards = (
        '# For the cards, which say "not stated" without:\n'
        "# licenses: {source: CC-BY-4.0, features: CC-BY-4.0}"
    )
    if licenses:
        lines = [f"  {of}: {_scalar(name)}" for of, name in licenses.items()]
        cards = "\n".join(["licenses:  # for the cards", *lines])
    return f"""\
# Written by `earmill init`. `earmill plan FILE` estimates the job, `earmill extract FILE` runs it,
# and continues it with --resume. All keys: `earmill spec`. For an editor that completes them:
#   earmill spec --json-schema > job.schema.json
# and as the first line here:  # yaml-language-server: $schema=job.schema.json
name: {_scalar("-".join([*words, model]))}

source:
  # files: a folder or bucket; manifest: a table; hf: a Hugging Face dataset; webdataset: tars.
  kind: {kind}{here}
  uri: {_scalar(source)}

audio:
  channels: mean  # or left, right, each, binaural, a channel index
  # What the samples mean: a digital RMS of 1 is so many dB SPL. 100 is a convention; if you know
  # the level of your recordings, say it, since auditory models are not linear.
  calibration: {{rms1_db_spl: 100}}

extract:
  # One or several of {", ".join(models)}.
  - model: {model}
    streams:
      {stream}:{rate}

output:{there}
  uri: {_scalar(output)}
  formats: [{", ".join(formats)}]
  dtype: {dtype}  # float16, float32, int8

{cards}

# run: {{workers: 2, threads_per_worker: 1}}   # all cores of this machine if you leave it out
"""


def _scalar(text: str) -> str:
    """Return a text as a YAML scalar on one line."""
    dumped: str = yaml.safe_dump(text, allow_unicode=True, width=10**9, default_flow_style=True)
    return dumped.removesuffix("\n").removesuffix("\n...")
