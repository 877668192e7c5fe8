"""Distributions of strangers: a module and its metadata in a folder, as pip would install them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install(
    folder: Path,
    name: str,
    entry_points: Mapping[str, Mapping[str, str]],
    modules: Mapping[str, str],
) -> Path:
    """Put a distribution into a folder, which counts once it is on the path.

    Args:
        entry_points: Group to names and what they lead to.
        modules: Module name to its text.
    """
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for group, names in entry_points.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in names.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
    return folder
