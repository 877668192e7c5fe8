"""A first job file out of a few answers: what they mean, and the commented YAML.

Answers come as people give them: quoted, with `~`, with spaces at the ends or escaped by a shell.
What cannot be meant is an error that says what to do.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from earmill.pipeline.common.errors import OutputError, SourceError, SpecError
from earmill.pipeline.common.text import one_line
from earmill.pipeline.storage.filesystems import is_local

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
# Its classes are named in the job file by somebody who wrote them.
NEEDS_CODE = "torch_module"
RELATIVE = "\n  # Relative to the folder in which earmill is run."


@dataclass(frozen=True)
class Answers:
    """What a job file is made of.

    Args:
        source, kind: Where the audio is. model, stream: What computes what.
        options: Of the stream: frame_rate_hz and pool, or none where the model sets its own rate.
        output: Where features go.
        formats, dtype: As they are stored. licenses: Of `source` and `features`, if stated.
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
        """Name of the job: of the source's last part, and the model."""
        last = re.split(r"[/\\]", self.source.rstrip("/\\*."))[-1]
        words = re.findall(r"[A-Za-z0-9]+", unicodedata.normalize("NFKD", last))
        return "-".join([*words, self.model])


def cleaned_place(answer: str) -> str:
    """A path or address as it was meant.

    Raises:
        SourceError: Nothing was said.
    """
    text = answer.strip()
    if not text:
        raise SourceError("expected a folder, file or address, got nothing")
    if not is_local(text):
        return text
    for meant in (text, _unquoted(text)):
        if os.path.exists(os.path.expanduser(meant)):
            return _expanded(meant)
    return _expanded(_unquoted(text))


def _expanded(path: str) -> str:
    """With the home folder; relative paths stay what they are."""
    return os.path.expanduser(path)


def _unquoted(text: str) -> str:
    """Without what a shell would take off: quotes around it, backslashes before spaces."""
    try:
        words = shlex.split(text)
    except ValueError:  # an apostrophe in a name
        return text
    return words[0] if len(words) == 1 else text


def kind_of(source: str) -> str:
    """The kind of source that a place looks like.

    Raises:
        SourceError: It is on this machine, and not there.
    """
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
    raise SourceError(f"{one_line(source)}: not found{_nearby(source)}; check the name")


def _nearby(source: str) -> str:
    """What is there instead, next to what is missing."""
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
    """Why a local folder holds no audio, and what may be meant; None where nothing is wrong."""
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
    """A place that features can go to.

    Raises:
        OutputError: It is a file, or the folder of the audio.
    """
    if not is_local(output):
        return
    if os.path.exists(output) and not os.path.isdir(output):
        raise OutputError(f"{one_line(output)}: a file; give a folder, which is made if it is new")
    if is_local(source) and os.path.realpath(output) == os.path.realpath(source):
        raise OutputError(f"{one_line(output)}: the folder of the audio; give another one")
    if os.path.exists(os.path.join(output, "dataset.json")):
        raise OutputError(f"{one_line(output)}: holds features already; give another folder")


def usable(listed: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Models that need nothing but their name, of `model_list.listed_models`."""
    return [one for one in listed if one["error"] is None and one["name"] != NEEDS_CODE]


def stream_of(model: str, listed: Sequence[Mapping[str, Any]]) -> str:
    """The first stream of a model.

    Raises:
        SpecError: No such model, or one that no question is enough for: `usable` left it out.
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
    """Whether a stream's frame rate and pooling are for the job to say."""
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
    """The job file."""
    a = answers
    here = RELATIVE if is_local(a.source) and not os.path.isabs(a.source) else ""
    there = RELATIVE if is_local(a.output) and not os.path.isabs(a.output) else ""
    return f"""\
# What `earmill init` was told. `earmill plan FILE` shows what it would do, `earmill extract FILE`
# does it, and goes on with --resume. All keys: `earmill spec`. For an editor that completes them:
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
        lines = [f"  {of}: {_scalar(said)}" for of, said in licenses.items()]
        return "\n".join(["licenses:  # for the cards", *lines])
    return (
        '# For the cards, which say "not stated" without:\n'
        "# licenses: {source: CC-BY-4.0, features: CC-BY-4.0}"
    )


def _scalar(text: str) -> str:
    """Text as a YAML scalar on one line."""
    dumped: str = yaml.safe_dump(text, allow_unicode=True, width=10**9, default_flow_style=True)
    return dumped.removesuffix("\n").removesuffix("\n...")
