"""The reference of the command line, from the commands themselves."""

from __future__ import annotations

import inspect
from typing import Any

import typer.main

HEAD = """# Command line

Made from the commands: `earmill COMMAND --help` says the same. Exit codes: 0 done; 1 failed or
stopped; 2 bad usage, spec, source or output, found before any work; 3 done, but more rows in
quarantine than `run.max_bad_fraction`. With `--json` the last line is the summary, or an `error`
event with `exit_code`, `message` and `help`, the page below docs/ that helps."""


def page() -> str:
    """Every command with its arguments and options, as Markdown."""
    from earmill.jobs.cli import app

    group: Any = typer.main.get_command(app)
    context = group.make_context("earmill", [], resilient_parsing=True)
    parts = [HEAD, _table(group.get_params(context))]
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        inner = command.make_context(name, [], parent=context, resilient_parsing=True)
        usage = " ".join(command.collect_usage_pieces(inner))
        parts += [
            f"## earmill {name}",
            f"```text\nearmill {name} {usage}\n```",
            inspect.cleandoc((command.help or "").replace("\f", "")),
            _table(command.get_params(inner)),
        ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(params: list[Any]) -> str:
    """Names, default and meaning of the parameters; nothing where there are none but --help."""
    shown = [param for param in params if param.name != "help" and not param.hidden]
    rows = [f"| {_names(param)} | {_default(param)} | {_cell(param.help)} |" for param in shown]
    head = ["| name | default | meaning |", "| --- | --- | --- |"]
    return "\n".join(head + rows) if rows else ""


def _names(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{param.metavar or param.name.upper()}`"
    value = "" if param.is_flag else f" {param.metavar or param.name.upper()}"
    return ", ".join(f"`{name}{value}`" for name in [*param.opts, *param.secondary_opts])


def _default(param: Any) -> str:
    if param.required:
        return "required"
    flag = getattr(param, "is_flag", False)
    return "" if flag or param.default in (None, (), []) else f"`{param.default}`"


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", r"\|")
