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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import yaml

from earmill.jobs.commands import options
from earmill.jobs.console.terminal import say, say_json
from earmill.pipeline.common.errors import EarmillError, OutputError, SourceError, SpecError
from earmill.pipeline.common.text import one_line

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
    listed = usable(listed_models())
    if asks and model is None:
        for one in listed:
            say(f"       {one['name']}: {one['summary']}")
    chosen, stream = ask(
        "2/5  Which model?", model, "dau1997", lambda text: (text, stream_of(text, listed))
    )
    folder = f"features-{chosen}"
    answers = Answers(
        source=place,
        kind=kind,
        model=chosen,
        stream=stream,
        options=_pooling(ask, chosen, stream, frame_rate, pool),
        output=ask(
            "4/5  Where do the features go? A folder or bucket",
            output,
            folder,
            lambda text: _output(text, place),
        ),
        formats=ask("5/5  Stored as?", formats, "parquet,zarr", _formats),
        dtype=ask("     In numbers of?", dtype, DTYPES[0], _one_of(DTYPES)),
        licenses=_licenses(ask, source_license, features_license),
    )
    _finish(file, answers, [one["name"] for one in listed], as_json=as_json, force=force)


class _Asker:
    """Takes the value of an option, or asks; explains a wrong answer and asks again."""

    def __init__(self, asks: bool) -> None:
        self._asks = asks

    def __call__(
        self, question: str, option: str | None, default: str | None, parse: Callable[[str], T]
    ) -> T:
        """Return the parsed answer.

        Args:
            question: Question to ask.
            option: Value of the option; None asks.
            default: Answer for an empty line; None if there is none.
            parse: Turns the answer into a value, or raises an error that explains it.
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
    from earmill.pipeline.storage.backend import is_local

    return is_local(place)


def _source(answer: str, kind: str | None) -> tuple[str, str]:
    from earmill.pipeline.common.extension_points import SOURCES

    place = cleaned_place(answer)
    if kind is not None and kind not in SOURCES.names():
        raise SpecError(f"--kind: expected one of {', '.join(SOURCES.names())}, got {kind!r}")
    kind = kind or kind_of(place)
    if problem := place_problem(place, kind):
        raise SourceError(problem)
    return place, kind


def _output(answer: str, source: str) -> str:
    place = cleaned_place(answer)
    check_output(place, source)
    return place


def _pooling(
    ask: _Asker, model: str, stream: str, frame_rate: float | None, pool: str | None
) -> dict[str, Any]:
    """Return frame rate and pooling of a stream; nothing if the model sets its frame rate."""
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


def _formats(answer: str) -> list[str]:
    from earmill.pipeline.common.extension_points import FORMATS

    words = answer.replace(",", " ").split()
    known = _one_of(FORMATS.names())
    if not words:
        raise SpecError(f"expected at least one of {', '.join(FORMATS.names())}")
    return sorted({known(word) for word in words})


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


def _finish(
    file: str, answers: Answers, models: Sequence[str], *, as_json: bool, force: bool
) -> None:
    """Check the job, print its estimate, and write the file."""
    from earmill.jobs.console.estimate import print_estimate
    from earmill.pipeline.planning.estimate import job_cost
    from earmill.pipeline.spec.job import JobSpec
    from earmill.pipeline.spec.yaml_overrides import load_yaml

    text = commented(answers, models, POOLS)
    spec = JobSpec.load(load_yaml(text, name=file))
    cost, trouble = None, ""
    try:
        cost = job_cost(spec).to_dict()
    except EarmillError as error:
        # A remote source may need credentials, or a network that is not available now.
        if isinstance(error, SpecError) or not (
            answers.kind == "hf" or not _is_local(answers.source)
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


HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
# Needs a class that a user has written, so no default job can name it.
NEEDS_CODE = "torch_module"
RELATIVE = "\n  # Relative to the folder in which earmill is run."


@dataclass(frozen=True)
class Answers:
    """The answers from which a job file is written.

    Args:
        source: Place of the audio.
        kind: Kind of the source.
        model: Name of the model.
        stream: Name of its stream.
        options: frame_rate_hz and pool of the stream; empty if the model sets its own rate.
        output: Place of the features.
        formats: Formats of the features.
        dtype: Numbers of the features.
        licenses: Licences of `source` and `features`, if stated.
    """

    source: str
    kind: str
    model: str
    stream: str
    options: Mapping[str, Any]
    output: str
    formats: Sequence[str]
    dtype: str
    licenses: Mapping[str, str]

    @property
    def name(self) -> str:
        """Name of the job: the last part of the source, and the model."""
        last = re.split(r"[/\\]", self.source.rstrip("/\\*."))[-1]
        words = re.findall(r"[A-Za-z0-9]+", unicodedata.normalize("NFKD", last))
        return "-".join([*words, self.model])


def cleaned_place(answer: str) -> str:
    """Return a path or address without quotes, escapes and `~`.

    Raises:
        SourceError: The answer is empty.
    """
    text = answer.strip()
    if not text:
        raise SourceError("expected a folder, file or address, got nothing")
    if not _is_local(text):
        return text
    for path in (text, _unquoted(text)):
        if os.path.exists(os.path.expanduser(path)):
            return os.path.expanduser(path)
    return os.path.expanduser(_unquoted(text))


def _unquoted(text: str) -> str:
    """Remove quotes around a text and backslashes before spaces, as a shell does."""
    try:
        words = shlex.split(text)
    except ValueError:  # an apostrophe in a name
        return text
    return words[0] if len(words) == 1 else text


def kind_of(source: str) -> str:
    """Return the kind of source by the name of a place.

    Raises:
        SourceError: A local place does not exist.
    """
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


def place_problem(source: str, kind: str) -> str | None:
    """Return why a local folder holds no audio, with a suggestion; None if it holds audio."""
    from earmill.pipeline.spec.source import AUDIO_EXTENSIONS

    if kind != "files" or not os.path.isdir(source):
        return None
    endings: dict[str, int] = {}
    for folder, _, names in os.walk(source):
        for name in names:
            ending = Path(name).suffix.lower().lstrip(".")
            if ending in AUDIO_EXTENSIONS:
                return None
            endings[ending] = endings.get(ending, 0) + 1
            if ending in ("tar", "csv", "tsv", "jsonl", "parquet"):
                table = os.path.join(folder, name)
                return (
                    f"{one_line(source)}: no audio in this folder; if {one_line(table)} says where "
                    "it is or holds it, give that file instead"
                )
    if not endings:
        return f"{one_line(source)}: an empty folder; give the one with the recordings"
    most = sorted(endings, key=endings.__getitem__, reverse=True)[:3]
    held = ", ".join(f"{endings[e]} {'.' + e if e else 'without an ending'}" for e in most)
    return (
        f"{one_line(source)}: no audio in this folder (it holds {held}); give the one with the "
        "recordings, or name their endings in source.extensions of a job file of your own"
    )


def check_output(output: str, source: str) -> None:
    """Check that features can be written to a place.

    Raises:
        OutputError: It is a file, the folder of the audio, or holds features already.
    """
    if not _is_local(output):
        return
    if os.path.exists(output) and not os.path.isdir(output):
        raise OutputError(f"{one_line(output)}: a file; give a folder, which is made if it is new")
    if _is_local(source) and os.path.realpath(output) == os.path.realpath(source):
        raise OutputError(f"{one_line(output)}: the folder of the audio; give another one")
    if os.path.exists(os.path.join(output, "dataset.json")):
        raise OutputError(f"{one_line(output)}: holds features already; give another folder")


def usable(listed: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the listed models that need only their name."""
    return [one for one in listed if one["error"] is None and one["name"] != NEEDS_CODE]


def stream_of(model: str, listed: Sequence[Mapping[str, Any]]) -> str:
    """Return the first stream of a model.

    Raises:
        SpecError: No such model, or a model that needs a user's class.
    """
    names = [str(one["name"]) for one in listed]
    if model == NEEDS_CODE:
        raise SpecError(f"{NEEDS_CODE} needs a class of yours: see `earmill models {NEEDS_CODE}`")
    if model not in names:
        close = difflib.get_close_matches(model.lower(), names, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise SpecError(f"no model {model!r}; expected one of {', '.join(names)}{hint}")
    streams = next(one["streams"] for one in listed if one["name"] == model)
    return str(next(iter(streams)))


def takes_pooling(model: str, stream: str) -> bool:
    """Return True if the job sets the frame rate and pooling of a stream."""
    from earmill.pipeline.spec.job import JobSpec
    from earmill.pipeline.spec.models import describe_models

    asked = {"model": model, "streams": {stream: {"frame_rate_hz": 100, "pool": "mean"}}}
    job = {"source": {"kind": "files", "uri": "x"}, "extract": [asked], "output": {"uri": "y"}}
    try:
        describe_models(JobSpec.load(job))
    except SpecError:
        return False
    return True


def commented(answers: Answers, models: Sequence[str], pools: Sequence[str]) -> str:
    """Return the text of the job file."""
    a = answers
    here = RELATIVE if _is_local(a.source) and not os.path.isabs(a.source) else ""
    there = RELATIVE if _is_local(a.output) and not os.path.isabs(a.output) else ""
    return f"""\
# Written by `earmill init`. `earmill plan FILE` estimates the job, `earmill extract FILE` runs it,
# and continues it with --resume. All keys: `earmill spec`. For an editor that completes them:
#   earmill spec --json-schema > job.schema.json
# and as the first line here:  # yaml-language-server: $schema=job.schema.json
name: {_scalar(a.name)}

source:
  # files: a folder or bucket; manifest: a table; hf: a Hugging Face dataset; webdataset: tars.
  kind: {a.kind}{here}
  uri: {_scalar(a.source)}

audio:
  channels: mean  # or left, right, each, binaural, a channel index
  # What the samples mean: a digital RMS of 1 is so many dB SPL. 100 is a convention; if you know
  # the level of your recordings, say it, since auditory models are not linear.
  calibration: {{rms1_db_spl: 100}}

extract:
  # One or several of {", ".join(models)}.
  - model: {a.model}
    streams:
      {a.stream}:{_options(a.options, pools)}

output:{there}
  uri: {_scalar(a.output)}
  formats: [{", ".join(a.formats)}]
  dtype: {a.dtype}  # float16, float32, int8

{_stated(a.licenses)}

# run: {{workers: 2, threads_per_worker: 1}}   # all cores of this machine if you leave it out
"""


def _options(options: Mapping[str, Any], pools: Sequence[str]) -> str:
    if not options:
        return "  # its frame rate follows from the model's parameters"
    return f"""
        frame_rate_hz: {options["frame_rate_hz"]:g}  # rows of features per second
        pool: {options["pool"]}  # what a frame says of its samples: {", ".join(pools)}"""


def _stated(licenses: Mapping[str, str]) -> str:
    if licenses:
        lines = [f"  {of}: {_scalar(name)}" for of, name in licenses.items()]
        return "\n".join(["licenses:  # for the cards", *lines])
    return (
        '# For the cards, which say "not stated" without:\n'
        "# licenses: {source: CC-BY-4.0, features: CC-BY-4.0}"
    )


def _scalar(text: str) -> str:
    """Return a text as a YAML scalar on one line."""
    dumped: str = yaml.safe_dump(text, allow_unicode=True, width=10**9, default_flow_style=True)
    return dumped.removesuffix("\n").removesuffix("\n...")
