"""Drawings of the site, computed by the models when the site is built.

A page refers to a drawing by `![description](figure:name)`; screen readers read the description.
Text and axes have the colour of the page.
"""

from __future__ import annotations

from importlib import import_module

#: Module of this package -> its drawings; a module is imported when one of them is drawn.
_MODULES = {
    "home": ("home",),
    "hearing": (
        *("adaptation", "drnl", "ears", "gammatone", "haircell"),
        *("king", "modulated", "modulation", "osses", "paulick"),
    ),
    "loudness": ("growth", "loudness_time", "patterns", "two_ears"),
    "neurons": ("neuron",),
    "scores": ("room_scores",),
    "structure": ("layers", "rooms", "model_rooms", "kernel_rooms"),
}
NAMES = {name: module for module, names in _MODULES.items() for name in names}


def make(name: str) -> str:
    """Return the SVG of a drawing."""
    module = import_module(f"docs.builder.figures.{NAMES[name]}")
    return str(module.FIGURES[name]())
