"""`earmill models` and `earmill kernels`: list the models, and compile their kernels. The list is
cached as JSON, because making it imports torch and numba, which takes seconds."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from earmill.jobs.commands import options
from earmill.jobs.console.terminal import check_local, console, say
from earmill.pipeline.common.errors import SpecError
from earmill.pipeline.common.text import nearest, one_line
from earmill.pipeline.common.user_cache import keep, models_key, read_kept

if TYPE_CHECKING:
    from rich.table import Table


def models(
    name: Annotated[str | None, typer.Argument(help="Show only this model.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """List the models with their parameters and streams.

    Models of other installed packages are included; a model that cannot be loaded is listed with
    its error.
    """
    listed = listed_models()
    selected = [model for model in listed if name in (None, model["name"])]
    if not selected:
        known = [model["name"] for model in listed]
        hint = nearest(str(name), known)
        raise SpecError(f"no model {name!r}; known: {', '.join(known)}{hint}")
    if as_json:
        print(json.dumps(selected))
        return
    out = console()
    for model in selected:
        out.print(_table(model))


def _table(model: Mapping[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(model["name"]), caption=Text(model["summary"]), show_header=True)
    table.add_column("", style="bold")
    table.add_column("name")
    table.add_column("default, or what it is")

    def add(section: str, rows: Mapping[str, str]) -> None:
        for left, right in rows.items():
            table.add_row(section, Text(one_line(left)), Text(one_line(right)))
            section = ""

    if model["distribution"] is not None:
        add("from", {"distribution": model["distribution"]})
    if model["error"] is not None:
        add("error", {"": model["error"]})
        return table
    add("input", {"unit": model["input_unit"], "rate": f"{model['default_fs_hz']:g} Hz"})
    meanings = {}
    for name, parameter in model["params"].items():
        default = json.dumps(parameter["default"]) if "default" in parameter else "required"
        meanings[name] = f"{default} ({parameter['type']}): {parameter['doc']}".removesuffix(": ")
    add("params", meanings)
    add("streams", model["streams"])
    return table


def listed_models() -> list[dict[str, Any]]:
    """Return `ModelInfo.to_dict` of every model, from the cache if it is there."""
    key = models_key()
    kept = None if key is None else read_kept("models", key)
    if isinstance(kept, list):
        return kept
    from amtcore.features.registry import list_models

    # Through JSON, so that new and cached lists are equal: tuples become lists.
    text = json.dumps([model.to_dict() for model in list_models()], default=str)
    models: list[dict[str, Any]] = json.loads(text)
    if key is not None and not any(model["error"] for model in models):
        keep("models", key, models)
    return models


def kernels(
    folder: Annotated[Path, typer.Argument(help="Output folder; name it in AMTCORE_KERNELS.")],
    job: Annotated[
        str | None, typer.Option(metavar="JOB.yaml", help="Compile the kernels of this job alone.")
    ] = None,
    set_: options.Overrides = None,
    cpu: Annotated[
        str | None, typer.Option(help="Processor as LLVM names it; this machine's if left out.")
    ] = None,
    features: Annotated[
        str | None, typer.Option(help='Features of the processor, such as "+avx2,+fma,-avx512f".')
    ] = None,
) -> None:
    """Compile kernels into a folder that machines of one kind can share.

    Jobs on machines with AMTCORE_KERNELS=FOLDER load these kernels instead of compiling, if
    processor, features, sources and versions agree; otherwise they compile as usual.
    """
    from earmill.pipeline.spec.job import JobSpec
    from earmill.pipeline.spec.models import entries_of
    from earmill.pipeline.worker.models import compile_into, entries_of_all

    check_local(folder)
    if features is not None and cpu is None:
        raise SpecError("--features: expected --cpu beside it, got none; name the processor")
    entries = (
        entries_of_all() if job is None else entries_of(JobSpec.load(job, overrides=set_ or ()))
    )
    failed = compile_into(folder, entries, cpu=cpu, features=features)
    files = sorted(folder.rglob("*.kernel"))
    megabytes = sum(path.stat().st_size for path in files) / 1e6
    say(f"{len(files)} kernels, {megabytes:.1f} MB in {folder}")
    for line in failed:
        say(line, sys.stderr)
    if failed:
        raise typer.Exit(1)
