"""Sections of RESULTS.md: every script replaces its own section."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from pathlib import Path

import numba
import torch

from earmill.jobs.doctor import processor

RESULTS = Path(__file__).parent / "RESULTS.md"
_TITLE = (
    "# Measured speed\n\n"
    "Written by the scripts of this folder: `make bench` runs all of them but `gpu` and `gpu_job`, "
    "which need a CUDA device. Every section is one run on one machine; compare figures inside a "
    "section, not between machines.\n"
)


def peak_mb() -> float:
    """Return the peak resident memory of this program in MB; `ru_maxrss` includes its parent's."""
    status = Path("/proc/self/status").read_text()
    return float(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) / 1024


def reset_peak_mb() -> float:
    """Reset the peak of `peak_mb` to the memory held now, and return it."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_mb()


def write_section(name: str, command: str, body: str) -> None:
    """Replace a section, or append a new one."""
    text = RESULTS.read_text() if RESULTS.exists() else _TITLE
    section = f"## {name}\n\n`{command}` on {_machine()}\n\n{body.strip()}\n"
    pattern = re.compile(rf"^## {re.escape(name)}\n.*?(?=^## |\Z)", re.M | re.S)
    if pattern.search(text):
        text = pattern.sub(lambda _: section + "\n", text)
    else:
        text = text.rstrip("\n") + "\n\n" + section
    RESULTS.write_text(text.rstrip("\n") + "\n")
    print(section)


def _machine() -> str:
    """Return processor, cores, and the versions that decide speed."""
    python = platform.python_version()
    return f"{processor()}; Python {python}, torch {torch.__version__}, numba {numba.__version__}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
