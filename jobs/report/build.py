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
from earmill.jobs.report.corpus import Stored, bad_rows_of, corpus, quarantine, row_facts, rows_of
from earmill.jobs.report.examples import chosen, examples
from earmill.jobs.report.page import page
from earmill.jobs.report.work import work_of
from earmill.pipeline.common.errors import OutputError
from earmill.pipeline.common.text import quantity
from earmill.pipeline.dataset.description import DatasetFile
from earmill.pipeline.dataset.watch import count_reasons
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.local_store import write_local
from earmill.pipeline.storage.retrying import store_errors

# Type, least and most of the numbers among the options.
LIMITS: Mapping[str, tuple[type, float, float, str]] = {
    "rows": (Integral, 0, math.inf, "a whole number of 0 or more"),
    "examples": (Integral, 0, 50, "a whole number from 0 to 50"),
    "seconds": (Real, 0.1, 120, "a number from 0.1 to 120"),
}
MOST_SPEC = 20_000  # Characters of the job file that the page shows.


@dataclass(frozen=True)
class Options:
    rows: int = 1000  # of the table, at most
    examples: int = 4  # rows with features, chosen by length
    row_ids: Sequence[str] = ()  # rows with features, instead of the chosen ones
    seconds: float = 10.0  # of each, from its start
    audio: bool = True  # embed their sound

    def __post_init__(self) -> None:
        if isinstance(self.row_ids, str):
            raise ValueError(f"row_ids: expected a list of ids, got {self.row_ids!r}")
        for name, (kind, low, high, text) in LIMITS.items():
            value: Any = getattr(self, name)
            is_number = isinstance(value, kind) and not isinstance(value, bool)
            if not is_number or not low <= value <= high:
                raise ValueError(f"{name}: expected {text}, got {value!r}")


def write_report(uri: str, out: Path, **options: Any) -> Path:
    """Write the report of a dataset to a file of this machine; options are of `report_html`."""
    check_local(out)
    with store_errors(uri):
        text = report_html(uri, **options)
    try:
        write_local(str(out), text.encode())
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
    """Return the report of a dataset as one HTML page. `job` has credentials of the source."""
    on_begin("reading index and commits")
    stored = Stored.open(uri, storage_options)
    positions = chosen(stored.features, options.examples, options.row_ids)
    facts, bad = row_facts(stored), bad_rows_of(stored, options.rows)
    on_begin(f"drawing {quantity(len(positions), 'row')}")
    dataset = stored.features.dataset
    values = {
        "name": dataset.name,
        "place": stored.layout.url(),
        "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "closed": stored.snapshot is not None,
        "models": [str(entry.get("model")) for entry in dataset.spec["extract"]],
        "corpus": corpus(stored, facts),
        "quarantine": quarantine(count_reasons(stored.facts), bad),
        "work": work_of(stored.facts),
        "examples": examples(stored, positions, options.seconds, job, audio=options.audio),
        "rows": rows_of(stored, facts, bad, options.rows),
        "about": _about(stored),
    }
    return page("report.html", values)


def _about(stored: Stored) -> dict[str, Any]:
    dataset, provenance = stored.features.dataset, stored.features.dataset.provenance
    versions = provenance.get("versions", {})
    host, git = provenance.get("host") or {}, provenance.get("git") or {}
    snapshot, additions = "none yet: the job has not been closed", ""
    if stored.snapshot is not None:
        entry, additions = stored.snapshot.entry, ", ".join(sorted(stored.snapshot.additions))
        snapshot = f"{entry.number}, {entry.why}, {entry.created}"
    commit = git.get("commit") or ""
    processor = host.get("processor") or ""
    facts = {
        "address": stored.layout.url(),
        "started": dataset.created,
        "snapshot": snapshot,
        "job file, sha256": dataset.spec_sha256,
        "plan id": dataset.plan_id,
        "earmill": str(versions.get("earmill", "")),
        "git commit": f"{commit}, with changes" if commit and git.get("dirty") else commit,
        "code, sha256": str(provenance.get("code_sha256", "")),
        "host": str(host.get("name", "")),
        "system": str(host.get("system", "")),
        "processor": processor and f"{processor}, {host.get('cores')} cores",
        "Python": str(host.get("python", "")),
        **{
            f"licence of the {what}": ", ".join(str(value) for value in stated.values())
            for what, stated in dataset.licenses.items()
        },
        "additions": additions,
    }
    spec: str = yaml.safe_dump(dataset.spec, sort_keys=False, allow_unicode=True, width=88)
    return {
        "facts": [(name, value) for name, value in facts.items() if value],
        "spec": spec if len(spec) <= MOST_SPEC else spec[:MOST_SPEC] + "\n... (cut)",
        "packages": [(str(name), str(version)) for name, version in versions.items()],
        "models": _models(dataset),
    }


def _models(dataset: DatasetFile) -> list[tuple[str, str]]:
    models = []
    for model in dataset.provenance.get("models", []):
        name, rate, unit = model.get("model"), model.get("fs_hz"), model.get("input_unit")
        parameters = ", ".join(f"{k} = {v}" for k, v in model.get("params", {}).items())
        parts = [
            f"{rate:g} Hz" if rate else "",
            f"input in {unit}" if unit else "",
            parameters or "parameters as they are by default",
            f"coefficients {dataset.buffers_sha256.get(name or '', '')[:16]}",
        ]
        models.append((str(name), "; ".join(filter(None, parts))))
    return models
