"""This checkout beside another one, measured by turns in one run.

    python -m benchmarks.turns ../before models reader

The other checkout has an environment of its own (`make setup`). Each measurement of `turn.py` runs
in a new process of each checkout by turns; a ratio is of the best of all turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import table, write_section
from benchmarks.turn import MEASURES

HERE = Path(__file__).parents[1]
ROUNDS = {"models": 5, "stages": 5, "reader": 2, "loader": 2, "short_clips": 2, "torch_module": 1}
# Measurements of which more is better; of times and memory less is better.
RATES = ("reader", "loader", "torch_module")


def measured(checkout: Path, name: str) -> dict[str, float]:
    """Return the figures of one measurement in a new process of a checkout."""
    script = Path(__file__).with_name("turn.py")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [checkout / ".venv/bin/python", "-P", script, name, folder],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout)},
            check=True,
            stdout=subprocess.PIPE,
        )
    return json.loads(done.stdout.splitlines()[-1])


def lines(name: str, other: Path) -> list[tuple[str, ...]]:
    """Return a line for each figure: the best there and here, and the ratio."""
    turns = [(measured(other, name), measured(HERE, name)) for _ in range(ROUNDS[name])]
    best = max if name in RATES else min
    found: list[tuple[str, ...]] = []
    for what in turns[0][0]:
        there, here = (best(each[side][what] for each in turns) for side in (0, 1))
        found.append((name, what, f"{there:.4g}", f"{here:.4g}", f"{here / there:.2f}"))
    return found


def main(other: Path, names: list[str]) -> None:
    """Measure and write a section for each of the names."""
    commit = _commit(other)
    for name in names or MEASURES:
        what = (MEASURES[name].__doc__ or "").splitlines()[0].rstrip(".")
        what = what.removeprefix("Return ")
        what = what[0].upper() + what[1:]
        note = f"{what}. By turns with {commit}, {ROUNDS[name]} each; the best of each."
        head = ("measurement", "what", commit, "here", "here / there")
        body = f"{note}\n\n{table(head, lines(name, other))}"
        command = f"python -m benchmarks.turns CHECKOUT {name}"
        write_section(f"By turns: {name.replace('_', ' ')}", command, body)


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
