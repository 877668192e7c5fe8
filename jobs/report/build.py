"""Build the report of a dataset; where the dataset came from is part of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import yaml

from earmill.jobs.console.terminal import check_local
from earmill.jobs.report.corpus import bad_rows_of, corpus, quarantine, row_facts, rows_of
from earmill.jobs.report.examples import chosen, examples, shown_text
from earmill.jobs.report.page import report_page
from earmill.jobs.report.stored import Stored
from earmill.jobs.report.work import work_of
from earmill.pipeline.common.errors import EarmillError, OutputError
from earmill.pipeline.common.text import quantity
from earmill.pipeline.dataset.description import DatasetFile
from earmill.pipeline.dataset.watch import count_reasons
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.local_store import write_local
from earmill.pipeline.storage.retrying import store_errors

# Most rows with features; least and most seconds of each.
MOST_EXAMPLES = 50
SECONDS = (0.1, 120.0)
NO_SOUND = "the report was made without sound"
UNSAID = "not said by the record"


@dataclass(frozen=True)
class Options:
    """How much of a dataset its report shows.

    Args:
        rows: Most rows of the table.
        examples: Number of rows with features, chosen by length.
        row_ids: Rows with features, instead of the chosen ones.
        seconds: Seconds shown of each, from its start.
        audio: Embed their sound.
    Raises:
        ValueError: A number is out of its range, or `row_ids` is one id instead of a list.
    """

    rows: int = 1000
    examples: int = 4
    row_ids: Sequence[str] = ()
    seconds: float = 10.0
    audio: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.row_ids, str):
            raise ValueError(f"row_ids: expected a list of ids, got {self.row_ids!r}")
        _check_number("rows", self.rows, 0, math.inf, whole=True)
        _check_number("examples", self.examples, 0, MOST_EXAMPLES, whole=True)
        _check_number("seconds", self.seconds, *SECONDS, whole=False)


def write_report(
    uri: str,
    out: Path,
    *,
    options: Options,
    storage_options: Mapping[str, Any],
    job: JobSpec | None = None,
    on_begin: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write the report of a dataset; `report_html` documents the arguments and further errors.

    Raises:
        OutputError: The file cannot be written, or its path is a URI.
    """
    check_local(out)
    with store_errors(uri):
        page = report_html(
            uri, options=options, storage_options=storage_options, job=job, on_begin=on_begin
        )
    try:
        write_local(str(out), page.encode())
    except OSError as error:
        raise OutputError(f"cannot write {out}: {error}; choose another --out") from error
    return out


def report_html(
    uri: str,
    *,
    options: Options,
    storage_options: Mapping[str, Any],
    job: JobSpec | None = None,
    on_begin: Callable[[str], None] = lambda text: None,
) -> str:
    """Return the report of a dataset as one HTML page.

    Args:
        uri: Place of the dataset.
        options: How much the page shows.
        storage_options: fsspec storage options.
        job: The job, for credentials of the source, which dataset.json does not hold.
        on_begin: Called with the name of a step that begins.
    Raises:
        SourceError: No dataset there, nothing committed yet, or no row with a given id.
        CommitError: A file of the dataset is damaged.
    """
    on_begin("reading index and commits")
    stored = Stored.open(uri, storage_options)
    positions = chosen(stored.features, options.examples, options.row_ids)
    facts, bad = row_facts(stored), bad_rows_of(stored, options.rows)
    on_begin(f"drawing {quantity(len(positions), 'row')}")
    shown = examples(
        stored,
        positions,
        seconds=options.seconds,
        job=_job(stored, job) if options.audio else NO_SOUND,
    )
    dataset = stored.features.dataset
    return report_page(
        {
            "name": dataset.name,
            "place": stored.layout.url(),
            "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            "closed": stored.entry is not None,
            "models": [str(entry.get("model")) for entry in dataset.spec["extract"]],
            "corpus": corpus(stored, facts),
            "quarantine": quarantine(_reasons(stored), bad),
            "work": work_of(stored.facts),
            "examples": [(example, shown_text(example)) for example in shown],
            "rows": rows_of(stored, facts, bad, options.rows),
            "about": about(stored),
        }
    )


def _check_number(name: str, value: float, low: float, high: float, *, whole: bool) -> None:
    kind, called = (Integral, "a whole number") if whole else (Real, "a number")
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        limits = f"of {low:g} or more" if high == math.inf else f"from {low:g} to {high:g}"
        raise ValueError(f"{name}: expected {called} {limits}, got {value!r}")


def _reasons(stored: Stored) -> dict[str, int]:
    reasons = count_reasons(stored.facts)
    unsaid = stored.rows_bad - sum(reasons.values())
    return {**reasons, UNSAID: unsaid} if unsaid > 0 else reasons


def _job(stored: Stored, job: JobSpec | None) -> JobSpec | str:
    """Return the job that names the source, or the reason why dataset.json holds no valid job."""
    if job is not None:
        return job
    dataset = stored.features.dataset
    output = {**dataset.spec["output"], "uri": stored.layout.url()}
    try:
        return JobSpec.load({**dataset.spec, "name": dataset.name, "output": output})
    except EarmillError as error:
        return f"the job in dataset.json cannot be read: {error}"


# Characters of the job file that the page shows.
MOST_SPEC = 20_000


@dataclass(frozen=True)
class About:
    """Provenance of a dataset.

    Args:
        facts: Names and values.
        spec: The job as YAML.
        packages: Names and versions.
        models: Names and descriptions.
    """

    facts: Sequence[tuple[str, str]]
    spec: str
    packages: Sequence[tuple[str, str]]
    models: Sequence[tuple[str, str]]


def about(stored: Stored) -> About:
    """Return the provenance of a dataset."""
    dataset = stored.features.dataset
    versions = dataset.provenance.get("versions", {})
    return About(
        facts=_facts(stored, dataset),
        spec=spec_text(dataset),
        packages=[(str(name), str(version)) for name, version in versions.items()],
        models=_models(dataset),
    )


def spec_text(dataset: DatasetFile) -> str:
    """Return the job as YAML."""
    text: str = yaml.safe_dump(_plain(dataset.spec), sort_keys=False, allow_unicode=True, width=88)
    return text if len(text) <= MOST_SPEC else text[:MOST_SPEC] + "\n... (cut)"


def _facts(stored: Stored, dataset: DatasetFile) -> list[tuple[str, str]]:
    provenance = dataset.provenance
    host, git = provenance.get("host") or {}, provenance.get("git") or {}
    facts = [
        ("place", stored.layout.url()),
        ("begun", dataset.created),
        ("snapshot", _snapshot(stored)),
        ("spec", dataset.spec_sha256),
        ("plan", dataset.plan_id),
        ("earmill", str(provenance.get("versions", {}).get("earmill", ""))),
        ("git commit", _git(git)),
        ("code", str(provenance.get("code_sha256", ""))),
        ("host", str(host.get("name", ""))),
        ("system", str(host.get("system", ""))),
        ("processor", _processor(host)),
        ("Python", str(host.get("python", ""))),
        *((f"licence of the {what}", text) for what, text in _licenses(dataset)),
        ("additions", ", ".join(stored.additions)),
    ]
    return [(name, value) for name, value in facts if value]


def _snapshot(stored: Stored) -> str:
    entry = stored.entry
    if entry is None:
        return "none yet: the job has not been closed"
    return f"{entry.number}, {entry.why}, {entry.created}"


def _git(git: Mapping[str, Any]) -> str:
    changed = ", with changes" if git.get("dirty") else ""
    return f"{git['commit']}{changed}" if git.get("commit") else ""


def _licenses(dataset: DatasetFile) -> list[tuple[str, str]]:
    """Return the licences of source and features that the job states."""
    return [
        (what, ", ".join(str(value) for value in stated.values()))
        for what, stated in dataset.licenses.items()
    ]


def _processor(host: Mapping[str, Any]) -> str:
    return f"{host['processor']}, {host.get('cores')} cores" if host.get("processor") else ""


def _models(dataset: DatasetFile) -> list[tuple[str, str]]:
    """Return each model with its parameters, rate and unit, and the hash of its coefficients."""
    models = []
    for model in dataset.provenance.get("models", []):
        parameters = ", ".join(f"{k} = {v}" for k, v in model.get("params", {}).items())
        rate, unit = model.get("fs_hz"), model.get("input_unit")
        parts = [f"{rate:g} Hz" if rate else "", f"input in {unit}" if unit else ""]
        parts += [parameters or "parameters as they are by default"]
        parts += [f"coefficients {dataset.buffers_sha256.get(model.get('model', ''), '')[:16]}"]
        models.append((str(model.get("model")), "; ".join(part for part in parts if part)))
    return models


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
