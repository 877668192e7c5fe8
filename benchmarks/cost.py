"""Cost of an hour of audio on CPU cores and on a GPU, from RESULTS.md and prices.

`python -m benchmarks.cost --core-hour 0.04 --gpu-hour 3 --cores 24` prints the table for your
prices; without arguments it writes all figures of docs/cost.md, whose prices are assumptions.

    CPU   core seconds per second of audio = 1 / kernel rate of a core + rest of the job
    GPU   rate of a node = min(rate of the GPU, cores / rest of the job)
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill

from benchmarks.report import RESULTS, table

PAGE = Path(__file__).parents[1] / "docs" / "cost.md"
#: Marks around the parts of the page that this module writes.
_OPEN, _CLOSE = "<!-- {}: python -m benchmarks.cost -->\n", "<!-- end of the {} -->"
#: Columns of the page's text.
_WIDTH = 118
#: Threads of the measurements.
_THREADS = 2
_HEAD = ("model", "one core", "price on cores", "GPU", "cores to feed it", "price on the node",
         "node / cores")  # fmt: skip
#: Names of the loudness section, and of the GPU's.
_LOUDNESS = {"moore2016": "Moore2016", "glasberg2002": "Glasberg2002"}


@dataclass(frozen=True)
class Node:
    """A GPU with its cores, and their prices.

    Args:
        gpu: Name in RESULTS.md.
        gpu_hour: Price of the GPU for an hour.
        cores: Cores that feed the GPU.
        core_hour: Price of a core for an hour, in this node or alone.
    """

    gpu: str
    gpu_hour: float
    cores: int
    core_hour: float


#: Assumptions: list prices differ between providers and years by factors.
ASSUMED = Node("H200", 3.5, 24, 0.04)


@dataclass(frozen=True)
class Speeds:
    """Speeds in RESULTS.md.

    Args:
        rest_s: Core seconds that a job takes besides the kernels, per second of audio.
        of_core: Model -> seconds of audio a second of one core, kernels alone.
        of_gpu: Model -> seconds of audio a second of the measured GPU, whole calls.
    """

    rest_s: float
    of_core: dict[str, float]
    of_gpu: dict[str, float]


def _section(text: str, name: str) -> str:
    body = re.search(rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    if body is None:
        raise ValueError(f"expected a section {name!r} in RESULTS.md; run its benchmark")
    return body[1]


def rows_of(text: str, section: str) -> list[dict[str, str]]:
    """Return the first table of a section, each row as a mapping from column to cell."""
    lines = re.search(r"(^\|.*\|\n)+", _section(text, section), re.M)
    assert lines, f"section {section!r} has no table"
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]]
                      for line in lines[0].splitlines())  # fmt: skip
    return [dict(zip(head, row, strict=True)) for row in rows]


def speeds(text: str) -> Speeds:
    """Read the speeds."""
    rests = [
        _THREADS / float(row["job"]) - _THREADS / float(row["kernel"])
        for row in rows_of(text, "The whole job")
    ]
    of_core = {row["model"]: float(row["speech"]) / _THREADS for row in rows_of(text, "Models")}
    for row in rows_of(text, "Loudness"):
        if (row["signal"], row["streams"], row["threads"]) == ("speech", "traces, summary", "1"):
            of_core[_LOUDNESS[row["model"]]] = float(row["seconds of audio per second"])
    return Speeds(max(rests), of_core, gpu_rates(text))


def gpu_rates(text: str) -> dict[str, float]:
    """Return model -> seconds of audio a second of the measured GPU, whole calls at their best."""
    rates: dict[str, float] = {}
    for row in rows_of(text, "GPU"):
        rates[row["model"]] = max(rates.get(row["model"], 0.0), float(row["GPU"]))
    return rates


def price_on_cores(core_rate: float, rest_s: float, core_hour: float) -> float:
    """Return the price of an hour of audio on cores alone."""
    return core_hour * (1.0 / core_rate + rest_s)


def node_rate(gpu_rate: float, rest_s: float, node: Node) -> float:
    """Return the rate of a node: the rate of its GPU, or the rate that its cores can feed."""
    return min(gpu_rate, node.cores / rest_s)


def price_on_node(gpu_rate: float, rest_s: float, node: Node) -> float:
    """Return the price of an hour of audio on a node with a GPU."""
    hour = node.gpu_hour + node.cores * node.core_hour
    return hour / node_rate(gpu_rate, rest_s, node)


def cost_table(known: Speeds, node: Node) -> str:
    """Return prices of 1000 hours of audio for every model with speeds on a core and a GPU."""
    rows = []
    for model, rate in known.of_gpu.items():
        if model not in known.of_core:
            continue
        cpu = 1000 * price_on_cores(known.of_core[model], known.rest_s, node.core_hour)
        price = 1000 * price_on_node(rate, known.rest_s, node)
        rows.append(
            (
                model,
                f"{known.of_core[model]:.0f}",
                f"{cpu:.2f}",
                f"{rate:.0f}",
                f"{rate * known.rest_s:.0f}",
                f"{price:.2f}",
                f"{price / cpu:.2f}",
            )
        )
    return table(_HEAD, rows)


def rest_text(known: Speeds, node: Node) -> str:
    """Say how much a job does besides the kernels, and how fast a GPU the node's cores can feed."""
    fed = node.cores / known.rest_s
    return fill(
        f"`r` is {1000 * known.rest_s:.2f} ms for the slowest files of The whole job, so a core "
        f"handles {1 / known.rest_s:.0f} seconds of audio a second beside the kernels. "
        f"{node.cores} cores feed {fed:.0f} times real time, "
        f"{fed / known.of_gpu['Dau1997']:.1f} times what an {node.gpu} computes of Dau1997.",
        width=_WIDTH,
    )


def written(page: str, known: Speeds) -> str:
    """Return the page with its figures and table replaced."""
    parts = {
        "rest": rest_text(known, ASSUMED),
        "table": cost_table(known, ASSUMED),
    }
    for name, made in parts.items():
        opened = _OPEN.format(name)
        begin = page.index(opened) + len(opened)
        end = page.index(_CLOSE.format(name), begin)
        page = f"{page[:begin]}\n{made}\n\n{page[end:]}"
    return page


def main() -> None:
    """Print the table for given prices, or write the page's table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--core-hour", type=float, help="price of a core for an hour")
    parser.add_argument("--gpu-hour", type=float, help="price of the GPU for an hour")
    parser.add_argument("--cores", type=int, help="cores of the node")
    given = parser.parse_args()
    known = speeds(RESULTS.read_text())
    if all(value is None for value in vars(given).values()):
        PAGE.write_text(written(PAGE.read_text(), known))
        return
    chosen = {name: value for name, value in vars(given).items() if value is not None}
    print(cost_table(known, replace(ASSUMED, **chosen)))


if __name__ == "__main__":
    main()
