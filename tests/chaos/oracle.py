"""What a disturbed output must be: the undisturbed one, row by row and byte by byte."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from earmill import open_features
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.dataset.garbage import collect_garbage
from earmill.pipeline.dataset.snapshot import current_index
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.storage.documents import read_table
from earmill.pipeline.storage.layout import Layout

ATTEMPT = re.compile(r"-[0-9a-f]{8}(?=\.)")
# How often a bad row was tried is a fact of the run: in its quarantine file and in the index.
TRIES = "attempts"
CONTENT = re.compile(r"^(index|snapshots)/\w+")


def differences(disturbed: Layout, undisturbed: Path) -> list[str]:
    """How a result differs from the undisturbed one; empty where it does not. Both local."""
    expected = Layout.open(str(undisturbed))
    before = verify(disturbed)
    found = [f"verify: {problem}" for problem in before.problems]
    collect_garbage(disturbed, grace_s=0)
    after = verify(disturbed)
    found += [f"verify without orphans: {problem}" for problem in after.problems]
    if after.shards != after.shards_planned:
        found.append(f"{after.shards} of {after.shards_planned} shards")
    found += _files(disturbed, expected)
    found += _values(disturbed, expected)
    return found


def _files(disturbed: Layout, expected: Layout) -> list[str]:
    """Committed files by size and sha256, and that there are no others."""
    got, wanted = _committed(disturbed), _committed(expected)
    found = [
        f"{name}: {got.get(name)} instead of {wanted.get(name)}"
        for name in sorted(got.keys() | wanted.keys())
        if got.get(name) != wanted.get(name)
    ]
    if _index(disturbed) != _index(expected):
        found.append("the index says something else")
    others = _every_name(disturbed) ^ _every_name(expected)
    return found + [f"only in one of them: {name}" for name in sorted(others)]


def _committed(layout: Layout) -> dict[str, tuple[int, str]]:
    return {
        ATTEMPT.sub("", file.path): (file.bytes, file.sha256)
        for record in commits(layout).values()
        for file in record.files
        if not file.path.startswith("quarantine/")
    }


def _every_name(layout: Layout) -> set[str]:
    """All files, hidden ones too; which attempt won, how often and when is no difference."""
    names = {*layout.everything()}
    return {ATTEMPT.sub("", CONTENT.sub(r"\1", name)) for name in names}


def _index(layout: Layout) -> dict[str, list[Any]]:
    name = current_index(layout)
    columns = {} if name is None else read_table(layout, name).to_pydict()
    return {name: column for name, column in columns.items() if name != TRIES}


def _values(disturbed: Layout, expected: Layout) -> list[str]:
    found: list[str] = []
    for format_ in ("zarr", "parquet"):
        got, wanted = _open(disturbed, format_), _open(expected, format_)
        ids = [row.row_id for row in got]
        if len(ids) != len(set(ids)):
            found.append(f"{format_}: a row comes twice")
        if ids != [row.row_id for row in wanted]:
            found.append(f"{format_}: other rows")
            continue
        for one, other in zip(got, wanted, strict=True):
            same = one.seconds == other.seconds and all(
                np.array_equal(one.features[name], values)
                for name, values in other.features.items()
            )
            if not same:
                found.append(f"{format_}: {one.row_id} has other values")
        if got.moments != wanted.moments:
            found.append(f"{format_}: other statistics")
    if _bad(got) != _bad(wanted):
        found.append(f"quarantine has {_bad(got)} instead of {_bad(wanted)}")
    return found


def _open(layout: Layout, format_: str) -> Any:
    return open_features(layout.root, format=format_)


def _bad(opened: Any) -> list[tuple[str, str, str]]:
    rows = opened.quarantine.to_pylist()
    return sorted((row["row_id"], row["stage"], row["error_class"]) for row in rows)
