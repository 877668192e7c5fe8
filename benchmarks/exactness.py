"""How far the models are from the stored references: the worst relative error of every stage."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from benchmarks.report import table, write_section
from tests.amtcore.test_golden_dau1997 import CASES, DTYPES, output_of, stored
from tests.compare import relative_error

_NAMES = {"gt": "filterbank", "ihc": "hair cell", "ad": "adaptation"}
# Below this norm per sample the reference holds only rounding noise of a silent channel.
_SILENT = 1e-9


def main() -> None:
    """Compare every stored array in both precisions and write the section."""
    worst: dict[tuple[str, str], float] = defaultdict(float)
    arrays: dict[str, int] = defaultdict(int)
    for name, key in CASES:
        expected = stored(name, key)
        if np.abs(expected).max() < _SILENT:
            continue
        stage = key.partition("@")[0]
        label = _NAMES.get(stage) or f"modulation, {stage.split('_')[1]}"
        arrays[label] += 1
        for dtype in DTYPES:
            error = relative_error(output_of(name, key, dtype), expected)
            worst[label, dtype] = max(worst[label, dtype], error)
    rows = [
        (label, str(count), f"{worst[label, 'float64']:.1e}", f"{worst[label, 'float32']:.1e}")
        for label, count in arrays.items()
    ]
    body = (
        "Worst relative error, norm(out - reference) / norm(reference), over the stored arrays of "
        "Dau1997; arrays that hold nothing but rounding noise are left out.\n\n"
        + table(("stage", "arrays", "float64", "float32"), rows)
    )
    write_section("Exactness", "python -m benchmarks.exactness", body)


if __name__ == "__main__":
    main()
