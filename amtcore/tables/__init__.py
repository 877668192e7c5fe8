"""Published tables as data: one JSON file a table, with its source and its columns.

It may import nothing but `amtcore.errors`.

>>> load_table("moore2016_alpha_of_gain")["alpha"][-1]
np.float64(0.2)
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from amtcore.errors import ParameterError

Columns = Mapping[str, NDArray[np.float64]]


@functools.cache
def load_table(name: str) -> Columns:
    """The columns of a table by name, read-only float64."""
    source = resources.files(__name__) / f"{name}.json"
    if not source.is_file():
        raise ParameterError(f"there is no table {name!r} among {', '.join(table_names())}")
    listed: dict[str, list[float]] = json.loads(source.read_text())["columns"]
    columns = {key: np.asarray(values, np.float64) for key, values in listed.items()}
    for column in columns.values():
        column.flags.writeable = False
    return MappingProxyType(columns)


def table_names() -> list[str]:
    """Every table there is."""
    files = (entry.name for entry in resources.files(__name__).iterdir())
    return sorted(file.removesuffix(".json") for file in files if file.endswith(".json"))
