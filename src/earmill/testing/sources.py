"""Conformance tests of a kind of source."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from earmill.pipeline.common.errors import RowError, SourceOutage
from earmill.pipeline.common.retries import RetryPolicy
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.sources import Item, Source, base, open_source
from earmill.pipeline.spec.job import JobSpec

Section = Mapping[str, Any]
Made = tuple[JobSpec, Mapping[str, bytes]]  # A job, and the bytes of its rows by row id.


class SourceConformance:
    """Subclass it as `TestMine`, set `kind`, and write `corpus`, `lose` and `cut_off`.

    Attributes:
        kind: Registered name of the source.
    """

    kind: ClassVar[str]

    def corpus(self, folder: Path) -> tuple[Section, Mapping[str, bytes]]:
        """Make a corpus of three rows or more in an empty folder.

        Returns:
            The job's `source` section without `kind`, and the bytes of each row by row id, in the
            order of the source.
        """
        raise NotImplementedError

    def lose(self, folder: Path, row_id: str) -> None:
        """Remove the bytes of one row."""
        raise NotImplementedError

    def cut_off(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        """Make the store fail from now on: no answer, no network, a broken disk."""
        raise NotImplementedError

    @pytest.fixture
    def made(self, tmp_path: Path) -> Made:
        """Return a job on the corpus, and the bytes of its rows."""
        return self.make(tmp_path)

    def make(self, parent: Path) -> Made:
        """Return a job on a corpus in the folder `corpus` of `parent`."""
        folder = parent / "corpus"
        folder.mkdir(parents=True)
        section, wanted = self.corpus(folder)
        assert len(wanted) >= 3, "corpus: expected three rows or more"
        job = {
            "source": {"kind": self.kind, **section},
            "extract": [{"model": "dau1997"}],
            "output": {"uri": "features"},
        }
        return JobSpec.load(job), wanted

    @pytest.fixture(autouse=True)
    def no_waiting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ask a store that does not answer only once."""
        monkeypatch.setattr(base, "FETCH_RETRIES", RetryPolicy(budget_s=0.0))

    def test_the_section_is_a_part_of_the_job(self, made: Made) -> None:
        spec, _ = made
        stored = json.loads(spec.canonical_json())
        again = JobSpec.load({**stored, "output": {**stored["output"], "uri": "elsewhere"}})
        assert again.sha256() == spec.sha256()
        assert "storage_options" not in stored["source"]
        assert pickle.loads(pickle.dumps(spec)) == spec
        for name, field in type(spec.source).model_fields.items():
            assert field.description, f"{name}: describe it under Args in the section's docstring"

    def test_rows_have_stable_ids_in_a_stable_order(self, made: Made) -> None:
        spec, wanted = made
        source = open_source(spec.source)
        first, second = [*source.items()], [*source.items()]
        assert [item.row_id for item in first] == [*wanted]
        assert [item.position for item in first] == [*range(len(first))]
        assert first == second
        assert [*open_source(spec.source).items()] == first
        assert make_plan(open_source(spec.source), spec) == make_plan(source, spec)

    def test_every_row_gives_its_bytes_in_any_order(self, made: Made) -> None:
        spec, wanted = made
        items = [*open_source(spec.source).items()]
        # A worker opens the source anew and asks for the rows of one shard.
        # Variants ask for their row several times in succession.
        repeated = [item for item in items for _ in range(2)]
        for part in (items, items[::-1], items[1:2], [], repeated):
            source = open_source(spec.source)
            found = zip(part, _fetched(source, part), strict=True)
            # Not the bytes themselves: their difference would be spelt out for minutes.
            assert [item.row_id for item, one in found if one != wanted[item.row_id]] == []

    def test_a_row_that_is_lost_is_a_bad_row(self, made: Made, tmp_path: Path) -> None:
        spec, wanted = made
        source = open_source(spec.source)
        items = [*source.items()]
        lost = items[1].row_id
        self.lose(tmp_path / "corpus", lost)
        for item, found in zip(items, _fetched(source, items), strict=True):
            if item.row_id == lost:
                assert isinstance(found, RowError) and found.stage == "fetch"
                assert "\n" not in str(found)
            else:
                same = found == wanted[item.row_id]
                assert same, f"row {item.row_id!r} has other bytes"

    def test_an_outage_is_no_property_of_a_row(
        self, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spec, _ = made
        source = open_source(spec.source)
        items = [*source.items()]
        self.cut_off(tmp_path / "corpus", monkeypatch)
        with pytest.raises(SourceOutage):
            _fetched(source, items)

    def test_what_it_says_of_itself_can_be_stored(self, made: Made) -> None:
        spec, _ = made
        source = open_source(spec.source)
        items = [*source.items()]
        assert json.loads(json.dumps(source.describe())).get("kind") == self.kind
        assert all(count >= 0 for count in source.skipped().values())
        assert set(source.columns().types) <= {name for item in items for name in item.extra}


def _fetched(source: Source, items: Sequence[Item]) -> list[bytes | RowError]:
    """Return the bytes or the error of each item, in order."""
    results: list[bytes | RowError] = []
    for item, (fetched, stream) in zip(items, source.fetch(items), strict=True):
        assert fetched == item
        if isinstance(stream, RowError):
            results.append(stream)
            continue
        with stream:
            assert stream.seekable()
            results.append(stream.read())
    return results
