"""What an hour of audio costs on CPU cores and on a GPU: from RESULTS.md and from prices.

`python -m benchmarks.cost --core-hour 0.04 --gpu-hour 3 --cores 24` prints the table for one's own
prices; without arguments it writes all figures of docs/cost.md, whose prices are assumptions.

    CPU   core seconds per second of audio = 1 / kernel rate of a core + rest of the job
    GPU   rate of a node = min(rate of the GPU, cores / rest of the job)
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from benchmarks.report import RESULTS, table

PAGE = Path(__file__).parents[1] / "docs" / "cost.md"
#: Where the page has what this module writes: its marks open and close a part.
_OPEN, _CLOSE = "<!-- {}: python -m benchmarks.cost -->\n", "<!-- end of the {} -->"
#: Columns of the page's text.
_WIDTH = 118
#: Threads of the measurements.
_THREADS = 2
_HEAD = ("model", "one core", "price on cores", "GPU", "GPU alone", "cores to feed it", "node",
         "price on the node", "node / cores")  # fmt: skip
#: Rows of the loudness section and of the GPU's, and what the reckoned section calls them.
_LOUDNESS = {"moore2016": "Moore2016, two ears", "glasberg2002": "Glasberg2002"}
_ON_GPU = {"Moore2016": "Moore2016, two ears"}


@dataclass(frozen=True)
class Node:
    """A GPU with its cores, and what they cost.

    Args:
        gpu: As RESULTS.md calls it.
        gpu_hour: Price of the GPU for an hour.
        cores: That feed it.
        core_hour: Price of a core for an hour, in such a node and alone.
    """

    gpu: str
    gpu_hour: float
    cores: int
    core_hour: float


#: Assumptions: list prices differ between providers and years by factors.
ASSUMED = (
    Node("H100 SXM", 3.0, 24, 0.04),
    Node("A100 80 GB", 1.5, 12, 0.04),
    Node("H200, measured", 3.5, 24, 0.04),
)


@dataclass(frozen=True)
class Speeds:
    """What RESULTS.md says.

    Args:
        rest_s: Core seconds that a job takes besides the kernels, per second of audio.
        of_core: Model -> seconds of audio a second of one core, kernels alone.
        of_gpu: (model, GPU) -> the same of a GPU.
    """

    rest_s: float
    of_core: dict[str, float]
    of_gpu: dict[tuple[str, str], float]


def _section(text: str, name: str) -> str:
    body = re.search(rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    if body is None:
        raise ValueError(f"expected a section {name!r} in RESULTS.md; run its benchmark")
    return body[1]


def rows_of(text: str, section: str) -> list[dict[str, str]]:
    """The first table of a section, a row a mapping from column to cell."""
    lines = re.search(r"(^\|.*\|\n)+", _section(text, section), re.M)
    assert lines, f"section {section!r} has no table"
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]]
                      for line in lines[0].splitlines())  # fmt: skip
    return [dict(zip(head, row, strict=True)) for row in rows]


def speeds(text: str) -> Speeds:
    """Read them."""
    rests = [
        _THREADS / float(row["job"]) - _THREADS / float(row["kernel"])
        for row in rows_of(text, "The whole job")
    ]
    of_core = {row["model"]: float(row["speech"]) / _THREADS for row in rows_of(text, "Models")}
    for row in rows_of(text, "Loudness"):
        if (row["signal"], row["streams"], row["threads"]) == ("speech", "traces, summary", "1"):
            of_core[_LOUDNESS[row["model"]]] = float(row["seconds of audio per second"])
    return Speeds(max(rests), of_core, gpu_rates(text))


def gpu_rates(text: str) -> dict[tuple[str, str], float]:
    """(model, GPU) -> seconds of audio a second: as reckoned, and whole calls as measured."""
    rates = {
        (row["model"], row["chip"]): float(row["times real time"])
        for row in rows_of(text, "GPU, reckoned")
    }
    chip = re.search(r"^NVIDIA ([^,]+),", _section(text, "GPU"), re.M)
    assert chip, "section 'GPU' names no chip"
    for row in rows_of(text, "GPU"):
        key = _ON_GPU.get(row["model"], row["model"]), f"{chip[1]}, measured"
        rates[key] = max(rates.get(key, 0.0), float(row["GPU"]))
    models = dict.fromkeys(model for model, _ in rates)
    return {key: rate for each in models for key, rate in rates.items() if key[0] == each}


def price_on_cores(core_rate: float, rest_s: float, core_hour: float) -> float:
    """Of an hour of audio."""
    return core_hour * (1.0 / core_rate + rest_s)


def node_rate(gpu_rate: float, rest_s: float, node: Node) -> float:
    """Seconds of audio a second of a node: its GPU's, or what its cores can feed."""
    return min(gpu_rate, node.cores / rest_s)


def price_on_node(gpu_rate: float, rest_s: float, node: Node) -> float:
    """Of an hour of audio."""
    hour = node.gpu_hour + node.cores * node.core_hour
    return hour / node_rate(gpu_rate, rest_s, node)


def cost_table(known: Speeds, nodes: tuple[Node, ...]) -> str:
    """Every model that is known for a core and for a GPU; prices of 1000 hours of audio."""
    rows = []
    for (model, gpu), rate in known.of_gpu.items():
        for node in (each for each in nodes if each.gpu == gpu and model in known.of_core):
            cpu = 1000 * price_on_cores(known.of_core[model], known.rest_s, node.core_hour)
            price = 1000 * price_on_node(rate, known.rest_s, node)
            rows.append(
                (
                    model,
                    f"{known.of_core[model]:.0f}",
                    f"{cpu:.2f}",
                    gpu,
                    f"{rate:.0f}",
                    f"{rate * known.rest_s:.0f}",
                    f"{node_rate(rate, known.rest_s, node):.0f}",
                    f"{price:.2f}",
                    f"{price / cpu:.2f}",
                )
            )
    return table(_HEAD, rows)


def cores_that_pay(known: Speeds, model: str, node: Node) -> float:
    """How many cores a GPU's price buys the work of, where they and not the GPU bound the node."""
    return node.gpu_hour * known.rest_s * known.of_core[model] / node.core_hour


def rest_text(known: Speeds, node: Node) -> str:
    """What a job does besides the kernels, and what a node's cores can feed."""
    fed = node.cores / known.rest_s
    share = fed / known.of_gpu["Dau1997", node.gpu]
    return fill(
        f"`r` is {1000 * known.rest_s:.2f} ms for the slowest files of The whole job, so a core "
        f"handles {1 / known.rest_s:.0f} seconds of audio a second beside the kernels. A node's "
        f"cores therefore bound its GPU: {node.cores} of them feed {fed:.0f} times real time, "
        f"{100 * share:.0f} % of what an {node.gpu} computes of Dau1997.",
        width=_WIDTH,
    )


def threshold_text(known: Speeds, node: Node) -> str:
    """From how many cores on a GPU pays, of a few models."""
    named = ("Paulick2024", "Osses2021", "Dau1997", "King2019, phase_insens='none'")
    cores = "; ".join(f"{model} {cores_that_pay(known, model, node):.0f}" for model in named)
    text = f"Cores from which an {node.gpu} as reckoned pays at these prices: {cores}."
    return fill(text, width=_WIDTH)


def written(page: str, known: Speeds) -> str:
    """The page with the figures and the table of today in the place of its own."""
    parts = {
        "rest": rest_text(known, ASSUMED[0]),
        "thresholds": threshold_text(known, ASSUMED[0]),
        "table": cost_table(known, ASSUMED),
    }
    for name, made in parts.items():
        opened = _OPEN.format(name)
        begin = page.index(opened) + len(opened)
        end = page.index(_CLOSE.format(name), begin)
        page = f"{page[:begin]}\n{made}\n\n{page[end:]}"
    return page


def main() -> None:
    """Print the table for given prices, or write that of the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--core-hour", type=float, help="price of a core for an hour")
    parser.add_argument("--gpu-hour", type=float, help="price of the GPU for an hour")
    parser.add_argument("--cores", type=int, help="cores of the node")
    given = parser.parse_args()
    known = speeds(RESULTS.read_text())
    if all(value is None for value in vars(given).values()):
        PAGE.write_text(written(PAGE.read_text(), known))
        return
    nodes = tuple(
        Node(
            node.gpu,
            node.gpu_hour if given.gpu_hour is None else given.gpu_hour,
            node.cores if given.cores is None else given.cores,
            node.core_hour if given.core_hour is None else given.core_hour,
        )
        for node in ASSUMED
    )
    print(cost_table(known, nodes))


if __name__ == "__main__":
    main()
