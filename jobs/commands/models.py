"""`earmill models`: names, parameters with their defaults, streams."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from earmill.jobs.commands.options import AsJson
from earmill.jobs.terminal import console
from earmill.pipeline.common.errors import SpecError


def models(
    name: Annotated[str | None, typer.Argument(help="Show only this model.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the models with their parameters and streams."""
    from amtcore.features.build import list_models

    found = [model for model in list_models() if name in (None, model.name)]
    if not found:
        known = ", ".join(model.name for model in list_models())
        raise SpecError(f"no model {name!r}; known: {known}")
    if as_json:
        print(json.dumps([asdict(model) for model in found], default=str))
        return
    from rich.table import Table

    out = console()
    for model in found:
        table = Table(title=model.name, caption=model.summary, show_header=True)
        table.add_column("", style="bold")
        table.add_column("name")
        table.add_column("default, or what it is")
        table.add_row("input", "unit", model.input_unit)
        table.add_row("", "rate", f"{model.default_fs_hz:g} Hz")
        for index, (parameter, default) in enumerate(model.params.items()):
            table.add_row(
                "params" if index == 0 else "", parameter, json.dumps(default, default=str)
            )
        for index, (stream, summary) in enumerate(model.streams.items()):
            table.add_row("streams" if index == 0 else "", stream, str(summary))
        out.print(table)
