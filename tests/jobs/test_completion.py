"""Shells complete the commands."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from earmill.jobs.cli import run

# What a shell's own function sets when the tab key is pressed, and what it asks.
ASKED = {
    "bash": {"COMP_WORDS": "earmill ver", "COMP_CWORD": "1"},
    "zsh": {"_TYPER_COMPLETE_ARGS": "earmill ver"},
    "fish": {"_TYPER_COMPLETE_ARGS": "earmill ver", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
}


def test_a_command_is_completed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from earmill.jobs.start import main; main()"],
        env={**os.environ, **ASKED["bash"], "_EARMILL_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "verify" in done.stdout, done.stderr
    assert "extract" not in done.stdout


@pytest.mark.parametrize("shell", ASKED)
def test_every_shell_is_told(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (ASKED[shell] | {"_EARMILL_COMPLETE": f"complete_{shell}"}).items():
        monkeypatch.setenv(name, value)
    run([])
    told = capsys.readouterr().out
    assert "verify" in told and "extract" not in told
