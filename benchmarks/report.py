"""Sections of RESULTS.md: every script owns one and replaces it when it runs."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "RESULTS.md"
_TITLE = (
    "# Measured speed\n\n"
    "Written by the scripts of this folder: `make bench` runs all of them. Every section is one "
    "run on one machine; compare figures inside a section, not between machines.\n"
)


def machine() -> str:
    """Processor, cores and versions, in one line."""
    import numba
    import torch

    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"model name\s*:\s*(.+)", info.read_text())
        model = found.group(1) if found else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{model}, {cores} cores; Python {platform.python_version()}, torch {torch.__version__}, "
        f"numba {numba.__version__}"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def peak_mb() -> float:
    """Highest resident memory of this program; `ru_maxrss` would begin at that of its parent."""
    status = Path("/proc/self/status").read_text()
    return float(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) / 1024


def reset_peak_mb() -> float:
    """Forget what was held before; from here on `peak_mb` starts at what is held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_mb()


def write_section(name: str, command: str, body: str) -> None:
    """Put a section in its place, or at the end when it is new."""
    text = RESULTS.read_text() if RESULTS.exists() else _TITLE
    section = f"## {name}\n\n`{command}` on {machine()}\n\n{body.strip()}\n"
    pattern = re.compile(rf"^## {re.escape(name)}\n.*?(?=^## |\Z)", re.M | re.S)
    if pattern.search(text):
        text = pattern.sub(lambda _: section + "\n", text)
    else:
        text = text.rstrip("\n") + "\n\n" + section
    RESULTS.write_text(text.rstrip("\n") + "\n")
    print(section)
