"""docs/proof.md, of page.md and the numbers, which choose the words for what came out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from examples.proof.scores import Interval

PAGE = Path(__file__).with_suffix(".md").read_text()


def time_text(cpu_s: Mapping[str, float], whole_s: float | None) -> str:
    """What training took, and the whole where nothing of it was there before.

    Args:
        cpu_s: Of a network of each kind.
    """
    each = ", ".join(f"{seconds:.0f} s ({name})" for name, seconds in cpu_s.items())
    said = f"CPU time of one training run: {each}."
    return said if whole_s is None else f"{said} The whole program took {whole_s / 60:.1f} minutes."


def verdict(differences: Mapping[str, Interval]) -> str:
    """A sentence for each difference, by whether its interval holds zero."""
    said = []
    for pair, points in differences.items():
        if points.low > 0:
            what = "the first is better"
        elif points.high < 0:
            what = "the first is worse"
        else:
            what = "no significant difference"
        said.append(f"- **{pair}**: {points} points in noise, {what}.")
    return "\n".join(said)
