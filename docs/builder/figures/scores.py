"""Drawing of scores that a page prints: its job is too long for a build of the site."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from matplotlib.axes import Axes

from docs.builder.blocks import blocks_of
from docs.builder.figures.hearing import _of, _shades

PAGE = Path(__file__).resolve().parents[2] / "howto" / "room-scores.md"


def printed_scores() -> dict[str, tuple[list[str], dict[str, list[float]]]]:
    """Return the page's mean scores by kind: the rooms, and the scores in them by noise."""
    printed = (block.text for block in blocks_of(PAGE.read_text()) if block.language == "text")
    lines = next(text for text in printed if text.startswith("SRMR clean")).splitlines()
    found: dict[str, tuple[list[str], dict[str, list[float]]]] = {}
    for first, *cells in map(str.split, lines):
        if "clean" in cells:
            rooms, by_noise = found[first] = [], {noise: [] for noise in cells}
        else:
            rooms.append(first)
            for scores, cell in zip(by_noise.values(), cells, strict=True):
                scores.append(float(cell))
    return found


def _room_scores(left: Axes, right: Axes) -> None:
    scores = printed_scores().items()
    for axes, (kind, (rooms, by_noise)) in zip((left, right), scores, strict=True):
        for (noise, line), colour in zip(by_noise.items(), _shades(len(by_noise)), strict=True):
            label = "none" if noise == "clean" else f"{int(noise.removesuffix('dB'))} dB"
            axes.plot(rooms, line, "o-", markersize=3, color=colour, label=label)
        axes.set(xlabel="reverberation time (s)", ylabel=kind)
    left.set(yscale="log", title="SRMR, without a reference")
    left.set_yticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
    left.minorticks_off()
    right.set(ylim=(0.4, 1.02), title="STOI against the clean row")
    right.legend(title="noise (SNR)", loc="center left", bbox_to_anchor=(1, 0.5))


FIGURES: Mapping[str, Callable[[], str]] = {
    "room_scores": _of("room_scores", _room_scores, columns=2, height=3.2),
}
