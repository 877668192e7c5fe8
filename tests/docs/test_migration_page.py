"""What the page on torch_amt says of arguments and defaults holds for our classes."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import amtcore

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migration" / "torch_amt.md"


def stated() -> dict[str, list[tuple[str, str]]]:
    """Class -> (argument, default) of the columns on what differs and what is added."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| [`")]
    return {
        name: re.findall(r"`(\w+)=([^`]+)`", "".join(line.split("|")[2:4]))
        for line in lines
        for name in re.findall(r"\[`(\w+)`\]", line.split("|")[1])
    }


def test_defaults_of_the_page_are_those_of_the_classes() -> None:
    found = stated()
    assert len(found) == 15 and sum(map(len, found.values())) == 6
    for name, arguments in found.items():
        signature = inspect.signature(getattr(amtcore, name)).parameters
        for argument, default in arguments:
            real = signature[argument].default
            said = default if default.startswith("torch.") else ast.literal_eval(default)
            assert (str(real) if isinstance(said, str) else real) == said, f"{name}({argument})"
