"""The structure of the code, drawn from the import contracts of the linter.

The purpose of a package is the first clause of its docstring.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from docs.builder.figures.style import COLOURS

ROOT = Path(__file__).resolve().parents[3]
#: Sizes in units of the drawing: width, width of the boxes, line of text, gap between rows.
WIDTH, BOXES, LINE, GAP = 720, 250, 20, 9


def contracts() -> dict[str, list[list[str]]]:
    """Map the name of each contract of layers to its rows of modules, the uppermost first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return {c["name"]: _rows(c) for c in settings["contracts"] if c["type"] == "layers"}


def _rows(contract: Mapping[str, Any]) -> list[list[str]]:
    container = "".join(f"{name}." for name in contract.get("containers", ()))
    return [[container + room.strip() for room in layer.split("|")] for layer in contract["layers"]]


def purpose(module: str) -> str:
    """Return the first clause of a module's docstring."""
    source = "core/src" if module.startswith("amtcore") else "src"
    place = ROOT / source / module.replace(".", "/")
    package = place / "__init__.py"
    file = package if package.exists() else place.with_suffix(".py")
    said = ast.get_docstring(ast.parse(file.read_text())) or ""
    return re.split(r"[:.;,]\s", f"{said}. ", maxsplit=1)[0].replace("\n", " ").replace("`", "")


def layers(contract: str) -> str:
    """Draw layers as boxes; a box may import from the boxes below."""
    top, parts = 4, []
    for index, row in enumerate(contracts()[contract]):
        height = LINE * len(row) + 14
        if index:
            parts.append(_line(BOXES / 2, top - GAP, top))
        width = (BOXES - GAP * (len(row) - 1)) / len(row)
        for place, module in enumerate(row):
            label = module.rpartition(".")[2]
            parts.append(_box(place * (width + GAP), top, width, height, label))
            said = f"{label}: {purpose(module)}" if len(row) > 1 else purpose(module)
            parts.append(_text(BOXES + 14, top + 7 + LINE * (place + 0.5), said, "start"))
        top += height + GAP
    frame = f'<svg viewBox="0 0 {WIDTH} {top}" xmlns="http://www.w3.org/2000/svg">'
    return "".join([frame, *parts, "</svg>"])


def _box(left: float, top: float, width: float, height: float, label: str) -> str:
    frame = (
        f'<rect x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{height:.0f}" rx="4" '
        f'fill="{COLOURS[0]}" fill-opacity="0.14" stroke="{COLOURS[0]}"/>'
    )
    return frame + _text(left + width / 2, top + height / 2, label, "middle")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="12.5" text-anchor="{anchor}" '
        f'dominant-baseline="central" fill="currentColor">{escape(text)}</text>'
    )


def _line(x: float, top: float, bottom: float) -> str:
    return f'<line x1="{x}" y1="{top}" x2="{x}" y2="{bottom}" stroke="currentColor"/>'


FIGURES: Mapping[str, Callable[[], str]] = {
    "layers": lambda: layers("from the calls down to the models"),
    "rooms": lambda: layers("rooms of the pipeline"),
    "model_rooms": lambda: layers("rooms of the models"),
    "kernel_rooms": lambda: layers("rooms of the kernels"),
}
