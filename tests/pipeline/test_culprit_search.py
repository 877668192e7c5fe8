"""The culprits-row search against brute force: any set of culprits is found, and few probes do."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from earmill.pipeline.driver.shard_ledger import Bisection
from tests.short import drawn


def search(rows: list[str], culprits: set[str]) -> tuple[dict[str, str], list[tuple[str, ...]]]:
    bisection, probes = Bisection(rows), []
    while (probe := bisection.next_probe()) is not None:
        probes.append(probe)
        bisection.report(failed=bool(culprits & set(probe)), reason="dead")
    return bisection.culprits, probes


@drawn(200)
@given(data=st.data(), n=st.integers(1, 200))
def test_exactly_the_guilty_rows_are_found(data: st.DataObject, n: int) -> None:
    rows = [f"r{i}" for i in range(n)]
    culprits = data.draw(st.sets(st.sampled_from(rows), min_size=1, max_size=5))
    found, probes = search(rows, culprits)
    assert found == {row: "dead" for row in rows if row in culprits}
    # 2 halves a level and one confirmation, for each culprits row.
    assert len(probes) <= len(culprits) * (2 * math.ceil(math.log2(n)) + 3)


def test_found_rows_come_in_planned_order() -> None:
    found, _ = search(list("abcdefgh"), {"g", "b", "e"})
    assert list(found) == ["b", "e", "g"]


def test_every_innocent_row_passed_in_some_probe() -> None:
    rows = [f"r{i}" for i in range(37)]
    _, probes = search(rows, {"r5", "r6"})
    passed = {row for probe in probes if not {"r5", "r6"} & set(probe) for row in probe}
    assert passed == set(rows) - {"r5", "r6"}


def test_a_row_that_fails_once_and_then_passes_is_innocent() -> None:
    bisection, failures = Bisection(list("abcd")), iter([True])
    while (probe := bisection.next_probe()) is not None:
        bisection.report(failed=probe == ("c", "d") or (probe == ("d",) and next(failures, False)))
    assert bisection.culprits == {}


def test_a_group_that_only_fails_together_has_no_guilty_row() -> None:
    bisection = Bisection(list("abcd"))
    while (probe := bisection.next_probe()) is not None:
        bisection.report(failed=len(probe) > 2)
    assert bisection.culprits == {}
    assert bisection.done


def test_nothing_to_search() -> None:
    assert Bisection([]).done
    with pytest.raises(ValueError, match="after its end"):
        Bisection([]).report(failed=True)


def test_duplicates_are_refused() -> None:
    with pytest.raises(ValueError, match="each row id once"):
        Bisection(["a", "a"])
