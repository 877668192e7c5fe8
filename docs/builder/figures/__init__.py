"""Drawings of the site, made by the models themselves while it is built.

A page says `![what it shows](figure:name)`; the text is the drawing's description for those who
cannot see it. Text and axes take the colour of the page.
"""

from __future__ import annotations

from importlib import import_module

#: Module of this package -> what it draws; imported only when something of it is drawn.
_MODULES = {
    "home": ("home",),
    "hearing": (
        *("adaptation", "drnl", "ears", "gammatone", "haircell"),
        *("king", "modulated", "modulation", "osses", "paulick"),
    ),
    "loudness": ("growth", "loudness_time", "patterns", "two_ears"),
    "neurons": ("neuron",),
    "structure": ("layers", "rooms", "model_rooms"),
}
NAMES = {name: module for module, names in _MODULES.items() for name in names}


def make(name: str) -> str:
    """The SVG of a drawing."""
    module = import_module(f"docs.builder.figures.{NAMES[name]}")
    return str(module.FIGURES[name]())
