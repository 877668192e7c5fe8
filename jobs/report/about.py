"""Where a dataset came from: its job, versions and machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from earmill.jobs.report.stored import Stored
from earmill.pipeline.dataset.description import DatasetFile

# Characters of a job file that are shown.
MOST_SPEC = 20_000


@dataclass(frozen=True)
class About:
    """What is said of the making of a dataset.

    Args:
        facts: Name and value. spec: The job as YAML. packages: Name and version.
    """

    facts: Sequence[tuple[str, str]]
    spec: str
    packages: Sequence[tuple[str, str]]
    models: Sequence[tuple[str, str]]


def about(stored: Stored) -> About:
    """Of an opened dataset."""
    dataset = stored.features.dataset
    versions = dataset.provenance.get("versions", {})
    return About(
        facts=_facts(stored, dataset),
        spec=spec_text(dataset),
        packages=[(str(name), str(version)) for name, version in versions.items()],
        models=_models(dataset),
    )


def spec_text(dataset: DatasetFile) -> str:
    """The job as a file would have it."""
    text: str = yaml.safe_dump(_plain(dataset.spec), sort_keys=False, allow_unicode=True, width=88)
    return text if len(text) <= MOST_SPEC else text[:MOST_SPEC] + "\n... (cut)"


def _facts(stored: Stored, dataset: DatasetFile) -> list[tuple[str, str]]:
    made = dataset.provenance
    host, git = made.get("host") or {}, made.get("git") or {}
    found = [
        ("place", stored.layout.url()),
        ("begun", dataset.created),
        ("snapshot", _snapshot(stored)),
        ("spec", dataset.spec_sha256),
        ("plan", dataset.plan_id),
        ("earmill", str(made.get("versions", {}).get("earmill", ""))),
        ("git commit", _git(git)),
        ("code", str(made.get("code_sha256", ""))),
        ("host", str(host.get("name", ""))),
        ("system", str(host.get("system", ""))),
        ("processor", _processor(host)),
        ("Python", str(host.get("python", ""))),
        *((f"licence of the {what}", text) for what, text in _licenses(dataset)),
        ("additions", ", ".join(stored.additions)),
    ]
    return [(name, value) for name, value in found if value]


def _snapshot(stored: Stored) -> str:
    entry = stored.entry
    if entry is None:
        return "none yet: the job has not been closed"
    return f"{entry.number}, {entry.why}, {entry.created}"


def _git(git: Mapping[str, Any]) -> str:
    changed = ", with changes" if git.get("dirty") else ""
    return f"{git['commit']}{changed}" if git.get("commit") else ""


def _licenses(dataset: DatasetFile) -> list[tuple[str, str]]:
    """Of the source and of the features, as far as the job states them."""
    return [
        (what, ", ".join(str(value) for value in stated.values()))
        for what, stated in dataset.licenses.items()
    ]


def _processor(host: Mapping[str, Any]) -> str:
    return f"{host['processor']}, {host.get('cores')} cores" if host.get("processor") else ""


def _models(dataset: DatasetFile) -> list[tuple[str, str]]:
    """Each model with its parameters, rate and unit, and the hash of its coefficients."""
    found = []
    for model in dataset.provenance.get("models", []):
        parameters = ", ".join(f"{k} = {v}" for k, v in model.get("params", {}).items())
        rate, unit = model.get("fs_hz"), model.get("input_unit")
        said = [f"{rate:g} Hz" if rate else "", f"input in {unit}" if unit else ""]
        said += [parameters or "parameters as they are by default"]
        said += [f"coefficients {dataset.buffers_sha256.get(model.get('model', ''), '')[:16]}"]
        found.append((str(model.get("model")), "; ".join(part for part in said if part)))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
