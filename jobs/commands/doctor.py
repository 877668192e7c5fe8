"""`earmill doctor`: check a machine and everything that jobs need on it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Annotated, Literal

import typer

from earmill.jobs.commands import options
from earmill.jobs.console.terminal import console, say_json


def doctor(
    uri: Annotated[
        str | None,
        typer.Option(metavar="URI", help="Write to this place as a job would, then clear up."),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"],  # as `run.device` of a job
        typer.Option(help="cuda: a missing GPU is a failure; cpu: skip the GPU."),
    ] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Skip the measurement of speed.")] = False,
    as_json: options.AsJson = False,
    storage_options: options.StorageOptions = None,
) -> None:
    """Check this machine: kernels, GPU, Ray, storage, speed. Exit code 1 if a check fails."""
    from rich.text import Text

    from earmill.jobs import doctor as machine
    from earmill.jobs.doctor import Check, State

    checks: list[Check] = []

    def all_checks() -> Iterator[Check]:
        yield from machine.machine_checks()
        registry = "amtcore.features.registry"
        imported = machine.checked("models", lambda: import_module(registry).__name__)
        has_models = imported.state is State.OK
        yield from machine.kernel_checks() if has_models else [imported]
        if has_models and device != "cpu":
            yield from machine.gpu_checks(wanted=device == "cuda")
        yield machine.ray_check()
        if has_models and not quick:
            yield from machine.speed_checks(gpu=machine.gpu_answers(checks))
        if uri is not None:
            yield machine.storage_check(uri, storage_options or {})

    out = console(soft_wrap=True)
    colors = {State.OK: "green", State.NO: "yellow", State.FAILED: "bold red"}
    for check in all_checks():
        checks.append(check)
        if not as_json:
            state = (f"{check.state:<7}", colors[check.state])
            out.print(Text.assemble(state, f"{check.what}: {check.text}"))
    failed = sum(check.state is State.FAILED for check in checks)
    if as_json:
        say_json({"ok": not failed, "checks": [vars(c) for c in checks]})
    else:
        verdict = f"{failed} of {len(checks)} checks failed" if failed else "all that is here works"
        out.print(verdict, style="bold red" if failed else "bold green")
    raise typer.Exit(1 if failed else 0)
