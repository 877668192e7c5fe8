"""Largest relative error of every stage against the stored references.

The tests of the suite run the comparisons; the errors are recorded instead of judged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.report import table, write_section
from tests.amtcore import (
    test_carfac,
    test_glasberg2002,
    test_golden_dau1997,
    test_king2019,
    test_moore2016,
    test_osses2021,
    test_paulick2024,
    test_sai,
)
from tests.compare import relative_error

DTYPES = ("float64", "float32")
_NAMES = {"gt": "filterbank", "ihc": "hair cell", "ad": "adaptation", "drnl": "filterbank",
          "mod_dau": "modulation, dau", "mod_jepsen": "modulation, jepsen", "mod": "modulation",
          "mod150": "modulation, to 150 Hz", "mod1000": "modulation, to 1000 Hz",
          "outerear": "ears", "headphone": "headphone", "middleear": "middle ear",
          "bm": "membrane", "nap": "hair cell", "ohc_za": "resonator state",
          "agc_zb": "undamping", "agc": "gain control",
          "out_bandpass": "modulation, bands", "out_hilbert": "modulation, envelopes"}  # fmt: skip
#: An array this far below the largest of its stage is rounding noise.
_SILENT = 1e-9


@dataclass(frozen=True)
class Suite:
    """One test of stored arrays.

    Args:
        model: Name of the model.
        module: Module of the test.
        test: The test; takes the arguments of a case and a precision.
        cases: (file, array) of each case.
    """

    model: str
    module: ModuleType
    test: Callable[..., None]
    cases: Iterable[tuple[str, str]]


_DAU, _KING, _MOORE = test_golden_dau1997, test_king2019, test_moore2016
_GLASBERG = test_glasberg2002
SUITES = (
    Suite("Dau1997", _DAU, _DAU.test_stored_array, _DAU.CASES),
    Suite("Osses2021", test_osses2021, test_osses2021.test_stored_array, test_osses2021.CASES),
    Suite("King2019", _KING, _KING.test_stored_stage, list(product(_KING.FILES, _KING.STAGES))),
    Suite("King2019", _KING, _KING.test_stored_modulation,
          list(product(_KING.FILES, _KING.BANKS))),
    Suite("Paulick2024", test_paulick2024, test_paulick2024.test_stored_array,
          test_paulick2024.CASES),
    Suite("Moore2016", _MOORE, _MOORE.test_stored_loudness,
          list(product(_MOORE.FILES, _MOORE.CONDITIONS))),
    Suite("Glasberg2002", _GLASBERG, _GLASBERG.test_whole_traces_but_for_the_gain,
          list(product(_GLASBERG.FILES, ("inst", "stl", "ltl")))),
    Suite("SAI", test_sai, test_sai.test_stored_array, test_sai.CASES),
    Suite("CARFAC", test_carfac, test_carfac.test_stored_array, test_carfac.CASES),
)  # fmt: skip


def _label(model: str, name: str, key: str, what: str) -> str:
    """Return the stage of an array; an array with a bound of its own has a row of its own."""
    stage = key.partition("@")[0]
    stage = _NAMES.get(stage) or _NAMES.get(stage.rpartition("_")[0], stage)
    apart = ""
    if model == "King2019" and what.endswith(" 2 Hz"):
        apart = ", 2 Hz"
    elif name.startswith("tone100"):
        apart = ", 100 Hz tone"
    return stage + apart


def _errors(suite: Suite, dtype: str) -> dict[str, list[tuple[float, float]]]:
    """Return relative error and highest value of every array, by stage."""
    seen: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, key in suite.cases:

        def note(got: Any, expected: Any, _: Any, what: str = "", case: Any = (name, key)) -> None:
            entry = relative_error(got, expected), float(np.abs(np.asarray(expected)).max())
            seen[_label(suite.model, *case, what)].append(entry)

        with patch.object(suite.module, "assert_close", note):
            suite.test(name, key, dtype)
    return seen


def _rows(suite: Suite) -> list[tuple[str, ...]]:
    by_type = [_errors(suite, dtype) for dtype in DTYPES]
    rows = []
    for label in by_type[0]:
        loudest = max(peak for _, peak in by_type[0][label])
        kept = [[e for e, peak in seen[label] if peak > _SILENT * loudest] for seen in by_type]
        worst = (f"{max(errors):.1e}" for errors in kept)
        rows.append((suite.model, label, str(len(kept[0])), *worst))
    return rows


def main() -> None:
    """Compare every stored array in both precisions and write the section."""
    rows = [row for suite in SUITES for row in _rows(suite)]
    body = (
        "Worst relative error, norm(out - reference) / norm(reference), over the stored arrays; "
        "arrays that hold nothing but rounding noise are left out. King2019's reference runs "
        "fourth-order polynomials, which are off themselves; that of Moore2016 has another filter "
        "of the ear below 60 Hz; Glasberg2002 is compared with another program after its gain is "
        "made equal (its own is 0.62 dB less, see docs/api_loudness.md; as it is, steady sounds "
        "lie within 8 %).\n\n" + table(("model", "stage", "arrays", "float64", "float32"), rows)
    )
    write_section("Exactness", "python -m benchmarks.exactness", body)


if __name__ == "__main__":
    main()
