"""Arguments and options that several commands share, declared once."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.resources import files
from itertools import pairwise
from typing import Annotated, Any, Literal

import typer

from earmill.pipeline.common.untrusted import loads_json
from earmill.pipeline.storage.backend import is_local


def parse_storage_options(text: str) -> dict[str, Any]:
    """Parse `--storage-options`; anything but a JSON object is a usage error."""
    try:
        options = loads_json(text)
    except ValueError as error:
        raise typer.BadParameter(f"expected JSON: {error}") from error
    if not isinstance(options, dict):
        raise typer.BadParameter(f"expected a JSON object, got {type(options).__name__}")
    return options


JobFile = Annotated[
    str, typer.Argument(metavar="JOB.yaml", help="Job file: a local path or any fsspec URI.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="A.B=C",
        help="Override one value of the job file, as YAML: --set output.dtype=float32. Repeatable.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output, for machines.")]
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Join this running Ray cluster ('auto' finds one here), as RAY_ADDRESS does. Same as "
        "--set run.ray_address=...",
    ),
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Worker processes. Same as --set run.workers=...")
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    typer.Option(help="Where the models run. Same as --set run.device=..."),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Show no progress: only the result, and errors.")
]
LOG_FORMAT = "--log-format"
LogFormat = Annotated[
    Literal["text", "json"] | None,
    typer.Option(
        LOG_FORMAT,
        help="What is printed of the run: text, or json, one structured log line an event. Same as "
        "--set run.log_format=...",
    ),
]
Metrics = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Show metrics to Prometheus here, or write them to a text file that ends in .prom. "
        "Same as --set run.metrics=...",
    ),
]
DatasetUri = Annotated[
    str, typer.Argument(metavar="URI", help="Output of a job: a folder or any fsspec URI.")
]
StorageOptions = Annotated[
    dict[str, Any] | None,
    typer.Option(
        metavar="JSON",
        parser=parse_storage_options,
        help="fsspec storage options, e.g. '{\"anon\": true}'.",
    ),
]
JobOfDataset = Annotated[
    str | None,
    typer.Option(
        "--job",
        metavar="JOB.yaml",
        help="The job file, for credentials of the source and the `run` section, which "
        "dataset.json does not hold.",
    ),
]


def run_overrides(set_: Sequence[str] | None, **named: str | int | None) -> list[str]:
    """Return the overrides of a job file, with the options that set a key of `run`."""
    stated = [f"run.{key}={json.dumps(value)}" for key, value in named.items() if value is not None]
    return [*(set_ or ()), *stated]


def wants_log_lines(arguments: Sequence[str]) -> bool:
    """Return True if a command line asks for log lines, even if it is wrong otherwise."""
    return f"{LOG_FORMAT}=json" in arguments or (LOG_FORMAT, "json") in pairwise(arguments)


def job_text(template: str, **values: Any) -> str:
    """Return a job file from a template of this package. Its filter `scalar` writes a text as YAML;
    its test `relative` is true for a relative path of this machine."""
    import yaml
    from jinja2 import Environment, StrictUndefined

    def scalar(text: str) -> str:
        dumped: str = yaml.safe_dump(text, allow_unicode=True, width=10**9, default_flow_style=True)
        return dumped.removesuffix("\n").removesuffix("\n...")

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    environment.filters["scalar"] = scalar
    environment.tests["relative"] = lambda place: is_local(place) and not os.path.isabs(place)
    text = (files("earmill.jobs") / template).read_text("utf-8")
    return environment.from_string(text).render(values)
