"""JSON files of the output, damaged: read as they were written, or refused where they are read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from earmill.pipeline.common.errors import CommitError, EarmillError, OutputError
from earmill.pipeline.dataset.commit_record import CommitRecord, read_commit
from earmill.pipeline.dataset.description import DatasetFile
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.snapshot import Current, Snapshot
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.test_snapshot import small_dataset

FILES: list[tuple[str, Callable[[bytes], Any], type[EarmillError]]] = [
    ("commits/00002.json", CommitRecord.from_json, CommitError),
    ("snapshots/*.json", Snapshot.from_json, CommitError),
    ("current.json", Current.from_json, CommitError),
    ("dataset.json", DatasetFile.from_json, OutputError),
]
# Every third bit: each of the eight places in three bytes.
EVERY = 3
# Values of another type that a field takes all the same.
OTHER_TYPES = [("replaces", None), ("replaces", "text"), ("replaces", "1.5"), ("seconds", 7)]


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed dataset, which is only read."""
    folder = tmp_path_factory.mktemp("closed")
    finalise(small_dataset(folder))
    return folder


@pytest.mark.parametrize(("pattern", "parse", "error"), FILES, ids=[f[0] for f in FILES])
def test_a_flipped_bit_is_read_or_refused(
    pattern: str, parse: Callable[[bytes], Any], error: type[EarmillError], closed: Path
) -> None:
    (path,) = closed.glob(pattern)
    whole = path.read_bytes()
    refused = 0
    for bit in range(0, 8 * len(whole), EVERY):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        try:
            parse(bytes(data))
        except error as err:
            refused += 1
            assert "\n" not in str(err)
    assert refused


@pytest.mark.parametrize("value", [None, 7, True, "text", [], {}, [["a"]], {"a": {"b": 1}}, "1.5"])
@pytest.mark.parametrize(("pattern", "parse", "error"), FILES, ids=[f[0] for f in FILES])
def test_a_field_of_another_type_is_refused(
    pattern: str,
    parse: Callable[[bytes], Any],
    error: type[EarmillError],
    value: object,
    closed: Path,
) -> None:
    (path,) = closed.glob(pattern)
    whole = json.loads(path.read_bytes())
    for name in whole:
        if type(whole[name]) is type(value) or (name, value) in OTHER_TYPES:
            continue
        with pytest.raises(error):
            parse(json.dumps(whole | {name: value}).encode())


def test_a_format_that_does_not_exist_is_no_format(tmp_path: Path) -> None:
    layout = small_dataset(tmp_path)
    text = layout.read_bytes("commits/00002.json")
    layout.write_bytes("commits/00002.json", text.replace(b'"parquet"', b'"parqUet"'))
    assert any("commits/00002.json" in line for line in verify(layout).problems)
    with pytest.raises(CommitError, match="parqUet"):
        read_commit(layout, "00002")


def test_every_damaged_value_of_a_commit_is_a_problem_and_no_crash(tmp_path: Path) -> None:
    """One bit of every other line: whatever it makes of it, verify ends and names the file."""
    layout: Layout = small_dataset(tmp_path)
    finalise(layout)
    name = "commits/00001.json"
    whole = layout.read_bytes(name)
    starts = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    for start, bit in zip(starts[::2], range(10**6), strict=False):
        data = bytearray(whole)
        data[min(start + 4 + bit % 7, len(whole) - 1)] ^= 1 << bit % 6
        layout.write_bytes(name, bytes(data))
        assert any(name in line for line in verify(layout, hashes=False).problems), start
