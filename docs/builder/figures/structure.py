"""The structure of the code, drawn from the import contracts that the linter holds it to."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from docs.builder.figures.style import COLOURS

ROOT = Path(__file__).resolve().parents[3]
WIDTH, ROW, GAP, SIDE = 720, 34, 8, 150


def contracts() -> dict[str, list[str]]:
    """Name of each contract of layers -> its layers, the uppermost first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return {c["name"]: c["layers"] for c in settings["contracts"] if c["type"] == "layers"}


def layers(name: str, contract: str, described: Mapping[str, str]) -> str:
    """Layers as boxes, each of which may import from those below it."""
    rows: Sequence[str] = contracts()[contract]
    height = len(rows) * (ROW + GAP) + 8
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" xmlns="http://www.w3.org/2000/svg">']
    for index, row in enumerate(rows):
        top = 4 + index * (ROW + GAP)
        boxes = [part.strip().split(".")[-1] for part in row.split("|")]
        width = (SIDE * 2 - GAP * (len(boxes) - 1)) / len(boxes)
        for place, box in enumerate(boxes):
            left = place * (width + GAP)
            parts.append(_box(left, top, width, box))
        said = "; ".join(described[box] for box in boxes)
        parts.append(_text(SIDE * 2 + 14, top + ROW / 2, said, "start"))
        if index:
            parts.append(_arrow(SIDE, top - GAP, top))
    return "".join([*parts, "</svg>"])


def _box(left: float, top: float, width: float, label: str) -> str:
    frame = (
        f'<rect x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{ROW}" rx="4" '
        f'fill="{COLOURS[0]}" fill-opacity="0.14" stroke="{COLOURS[0]}"/>'
    )
    return frame + _text(left + width / 2, top + ROW / 2, label, "middle")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="13" text-anchor="{anchor}" '
        f'dominant-baseline="central" fill="currentColor">{escape(text)}</text>'
    )


def _arrow(x: float, top: float, bottom: float) -> str:
    return f'<line x1="{x}" y1="{top}" x2="{x}" y2="{bottom}" stroke="currentColor"/>'


_WHOLE = {
    "api": "extract, plan, verify, retry: the commands as calls",
    "upkeep": "log, diff, compact, gc",
    "jobs": "the earmill command, one module a command",
    "pipeline": "the corpus machine; knows no formula",
    "amtcore": "the science; knows no file",
}
_PIPELINE = {
    "driver": "runs a job: who does which shard, when; counts, stops, goes on",
    "worker": "warm models, decoding, batches",
    "reader": "datasets, loaders, collates",
    "dataset": "commits, snapshots, verify, cards",
    "planning": "rows into shards; what it will cost",
    "formats": "Zarr, Parquet, tars",
    "sources": "files, tables, hubs, tars",
    "spec": "the job file",
    "audio": "bytes into samples",
    "storage": "names, stores, put-if-absent",
    "common": "errors, names, entry points",
}
_MODELS = {
    "extensions": "mel, mfcc, any torch module",
    "features": "models as streams of frames",
    "models": "Dau1997 ... Moore2016 as torch modules",
    "stages": "ears, filters, hair cells, loops",
    "scales": "ERB, Cam",
    "units": "Pa, dB SPL, calibration",
    "arguments": "checks of arguments",
    "kernels": "recurrences: plain loop, CPU, GPU, adjoint",
    "filter_design": "coefficients in float64",
    "tables": "published tables",
    "errors": "what is raised",
}
FIGURES: Mapping[str, Callable[[], str]] = {
    "layers": lambda: layers("layers", "from the calls down to the models", _WHOLE),
    "rooms": lambda: layers("rooms", "rooms of the pipeline", _PIPELINE),
    "model_rooms": lambda: layers("model_rooms", "rooms of the models", _MODELS),
}
