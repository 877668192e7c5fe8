"""`earmill spec`: the reference of the job file: keys, types, defaults, meanings."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def spec(
    as_schema: Annotated[
        bool, typer.Option("--json-schema", help="Print a JSON schema for editors instead.")
    ] = False,
) -> None:
    """Print the reference of the job file, as Markdown."""
    if as_schema:
        from earmill.pipeline.spec.reference import json_schema

        print(json.dumps(json_schema(), indent=1))
        return
    from earmill.pipeline.spec.reference import reference

    print(reference(), end="")
