"""The page on GPUs: its example runs, and what it names is there."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gpu.md"


def test_its_example_runs() -> None:
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert tried > 0 and failed == 0


def test_the_files_it_names_are_there() -> None:
    named = re.findall(r"`(kernels/[\w/.]+\.py)`", PAGE.read_text())
    assert named and all((ROOT / "amtcore" / name).is_file() for name in named)
    linked = re.findall(r"\]\(([^)#]+)", PAGE.read_text())
    assert linked and all((PAGE.parent / target).exists() for target in linked)
