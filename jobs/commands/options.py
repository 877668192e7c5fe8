"""Arguments and options that several commands share, declared once."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from earmill.pipeline.common.untrusted import loads_json

JobFile = Annotated[
    str, typer.Argument(metavar="JOB.yaml", help="Job spec: a local path or any fsspec URI.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="A.B=C",
        help="Override one value of the spec, YAML syntax: --set output.dtype=float32. Repeatable.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output, for machines.")]
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Join this running Ray cluster ('auto' finds one here); RAY_ADDRESS does the same. "
        "Without either a private Ray is started and stopped.",
    ),
]
DatasetUri = Annotated[
    str, typer.Argument(metavar="URI", help="Output of a job: a folder or any fsspec URI.")
]
StorageOptions = Annotated[
    str | None,
    typer.Option(metavar="JSON", help="fsspec storage options, e.g. '{\"anon\": true}'."),
]


def parse_storage_options(text: str | None) -> dict[str, Any]:
    """The mapping in `--storage-options`; a usage error where it is none."""
    if text is None:
        return {}
    try:
        options = loads_json(text)
    except ValueError as error:
        raise typer.BadParameter(f"--storage-options is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise typer.BadParameter(
            f"--storage-options: expected a JSON object, got {type(options).__name__}"
        )
    return options
