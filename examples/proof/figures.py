"""Two figures and the tables of docs/proof.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
import numpy as np

from examples.proof.features import Cost
from examples.proof.scores import Interval

# The same bytes of the same numbers.
STYLE: dict[Any, Any] = {"svg.hashsalt": "earmill", "font.size": 10, "axes.spines.top": False}
METADATA = {"Date": None}
Table = Mapping[str, Mapping[float, Interval]]


def ratio_name(snr_db: float) -> str:
    """As in the tables."""
    return "clean" if np.isinf(snr_db) else f"{snr_db:g} dB"


def draw_accuracy(accuracy: Table, path: Path) -> None:
    """Accuracy over the ratio, a line for each kind of features."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        for shift, (name, by_ratio) in enumerate(accuracy.items()):
            ratios = sorted(by_ratio)
            places = np.arange(len(ratios)) + 0.08 * (shift - 1)
            means = np.array([by_ratio[ratio].mean for ratio in ratios])
            spread = [
                means - [by_ratio[ratio].low for ratio in ratios],
                np.array([by_ratio[ratio].high for ratio in ratios]) - means,
            ]
            marker = "os^"[shift % 3]
            axes.errorbar(places, 100 * means, 100 * np.array(spread), label=name, marker=marker)
        axes.axhline(5, color="grey", linestyle=":", label="chance")
        axes.set_xticks(range(len(ratios)), [ratio_name(ratio) for ratio in ratios])
        axes.set_xlabel("signal-to-noise ratio, other noise and voices than in training")
        axes.set_ylabel("words recognised, %")
        axes.set_ylim(0, 100)
        axes.legend(frameon=False)
        figure.savefig(path, metadata=METADATA)
        plt.close(figure)


def draw_loudness(sones: Mapping[str, Mapping[str, np.ndarray]], path: Path) -> None:
    """Each clip a point: its loudness against the median of its row."""
    rng = np.random.default_rng(0)
    rows = [(model, way, values) for model, ways in sones.items() for way, values in ways.items()]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
        for place, (_, _, values) in enumerate(rows):
            jitter = place + rng.uniform(-0.18, 0.18, len(values))
            axes.plot(values, jitter, "o", alpha=0.6, markersize=4)
            axes.plot([np.median(values)] * 2, [place - 0.3, place + 0.3], color="black")
        axes.set_yticks(range(len(rows)), [f"{model}, same {way}" for model, way, _ in rows])
        axes.invert_yaxis()
        axes.set_xlabel("largest long-term loudness of a clip, sone")
        figure.savefig(path, metadata=METADATA)
        plt.close(figure)


def tables(accuracy: Table, costs: Mapping[str, Cost]) -> str:
    """Accuracy and costs in Markdown."""
    ratios = sorted(next(iter(accuracy.values())), reverse=True)
    lines = _table(
        ["noise", *accuracy],
        [[ratio_name(ratio), *(str(by[ratio]) for by in accuracy.values())] for ratio in ratios],
    )
    lines.append("")
    header = ["features", "times real time on one core: model, job", "kB per second"]
    body = []
    for name, cost in costs.items():
        speeds = [cost.audio_s / cpu_s for cpu_s in (cost.model_cpu_s, cost.job_cpu_s)]
        speed = f"{speeds[0]:.0f}, {speeds[1]:.0f}"
        kilobytes = f"{cost.nbytes / cost.audio_s / 1000:.0f}"
        body.append([name, speed, kilobytes])
    return "\n".join([*lines, *_table(header, body)])


def loudness_table(sones: Mapping[str, Mapping[str, np.ndarray]]) -> str:
    """How far apart clips are that a way calls equal."""
    body = []
    for model, ways in sones.items():
        for way, values in ways.items():
            low, median, high = np.quantile(values, [0.05, 0.5, 0.95])
            spread = f"{np.std(values) / np.mean(values):.1%}"
            ends = f"{values.min():.1f} to {values.max():.1f}"
            # A doubling in sone is 10 phon.
            phon = f"{10 * np.log2(high / low):.1f}"
            body.append([model, way, f"{median:.1f}", ends, spread, phon])
    header = ["model", "equal in", "median, sone", "range", "deviation", "5 to 95 %, phon"]
    return "\n".join(_table(header, body))


def _table(header: list[str], body: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *body]
    return ["| " + " | ".join(cells) + " |" for cells in lines]
