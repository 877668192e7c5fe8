"""Reading bytes while the store misbehaves: what is tried again, what is given up, and as what."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import pytest

from earmill.pipeline.common.errors import AbsentError, SourceOutage, UnreadableError
from earmill.pipeline.sources import base
from earmill.pipeline.sources import base as sources_base
from earmill.pipeline.sources import fetch as fetch_module
from earmill.pipeline.sources.base import Fetched, Item
from earmill.pipeline.sources.fetch import Blob, fetch_all, load_blob
from earmill.pipeline.sources.source_probe import SourceProbes, fetch_confirmed
from tests.pipeline.outages import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sources_base, "FETCH_RETRIES", clock.retries())
    return clock


class Store:
    """A filesystem of one object, as fsspec has them.

    Args:
        data: What is there. sent: What a read gives.
    """

    def __init__(self, data: bytes, sent: Sequence[bytes]) -> None:
        self.data, self.sent = data, list(sent)

    def cat_file(self, path: str) -> bytes:
        return self.sent.pop(0)

    def info(self, path: str) -> dict[str, int]:
        return {"size": len(self.data)}

    def invalidate_cache(self, path: str) -> None:
        """Nothing is kept."""


def load(
    monkeypatch: pytest.MonkeyPatch, store: Store, size: int | None
) -> Blob | UnreadableError | Any:
    monkeypatch.setattr(base, "object_of", lambda uri, options: (store, uri))
    ((_, stream),) = fetch_all([Item("a", "x://a", size=size)], lambda uri: {})
    return stream


@pytest.mark.parametrize("size", [8, None])
def test_a_connection_that_breaks_early_is_not_a_short_object(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, size: int | None
) -> None:
    stream = load(monkeypatch, Store(b"12345678", [b"1234", b"1234", b"12345678"]), size)
    assert stream.read() == b"12345678"
    assert clock() > 0


def test_an_object_of_another_size_than_planned_is_changed(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    error = load(monkeypatch, Store(b"1234", [b"1234"]), 8)
    assert isinstance(error, UnreadableError) and not isinstance(error, AbsentError)
    assert "expected 8 bytes, got 4" in str(error) and clock() == 0


@pytest.mark.parametrize(
    "error",
    [ConnectionRefusedError("refused"), OSError(errno.ESTALE, "stale"), RuntimeError("who knows")],
)
def test_no_answer_is_an_outage_after_bounded_tries(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, error: Exception
) -> None:
    def fail(*_: object) -> BinaryIO:
        raise error

    monkeypatch.setattr(fetch_module, "open_regular", fail)
    with pytest.raises(SourceOutage, match="/a: cannot be fetched") as caught:
        load_blob(Item("a", "/a"), lambda uri: {})
    assert caught.value.kind == "source" and "\n" not in str(caught.value)
    assert 30.0 < clock() <= 45.0


def test_a_clear_no_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    def fail(*_: object) -> BinaryIO:
        raise FileNotFoundError(errno.ENOENT, "gone")

    monkeypatch.setattr(fetch_module, "open_regular", fail)
    assert isinstance(load_blob(Item("a", "/a"), lambda uri: {}), AbsentError)
    assert clock() == 0


def test_a_read_that_hangs_is_an_outage_and_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release, waits = threading.Event(), []

    def hang(*_: object) -> BinaryIO:
        waits.append(sources_base.waits.longest_s())
        release.wait()
        raise FileNotFoundError("late")

    monkeypatch.setattr(fetch_module, "open_regular", hang)
    monkeypatch.setattr(fetch_module, "STALL_S", 0.05)
    try:
        with pytest.raises(SourceOutage, match="no byte within"):
            list(fetch_all([Item("a", "/a", size=0), Item("b", "/b", size=0)], lambda uri: {}))
    finally:
        release.set()
    assert sources_base.waits.longest_s() == 0.0


class Rows:
    """A source of rows that are there, missing, or missing at first.

    Args:
        missing: Row ids without bytes; asked for a second time, those in `back` have some.
    """

    def __init__(self, missing: set[str], back: set[str] | None = None) -> None:
        self.missing, self.back = missing, back or set()
        self.asked: list[str] = []

    def fetch(self, items: Sequence[Item]) -> Iterator[Fetched]:
        for item in items:
            back = item.row_id in self.back and item.row_id in self.asked
            self.asked.append(item.row_id)
            if item.row_id in self.missing and not back:
                yield item, AbsentError(f"{item.uri}: gone")
            else:
                yield item, Blob(data=b"x").open()

    def items(self) -> Iterator[Item]:
        return iter(())

    def describe(self) -> dict[str, Any]:
        return {}


def rows(*names: str, folder: str = "s3://b/f") -> list[Item]:
    return [Item(name, f"{folder}/{name}", size=len(name)) for name in names]


def test_a_missing_row_is_missing_while_a_witness_stands() -> None:
    source = Rows({"b"})
    found = list(fetch_confirmed(source, rows("a", "b", "c"), SourceProbes()))
    assert [isinstance(entry, AbsentError) for _, entry in found] == [False, True, False]
    # All rows, a witness, and a second look.
    assert source.asked[:3] == ["a", "b", "c"] and source.asked[3] in ("a", "c")
    assert source.asked[4:] == ["b"]


def test_without_a_witness_nothing_is_called_missing() -> None:
    with pytest.raises(SourceOutage, match=r"3 of 3 rows .* is it still there") as caught:
        list(fetch_confirmed(Rows({"a", "b", "c"}), rows("a", "b", "c"), SourceProbes()))
    assert caught.value.kind == "missing"


def test_a_witness_that_is_gone_too_speaks_for_the_rows() -> None:
    known = SourceProbes()
    known.add(rows("w")[0])
    with pytest.raises(SourceOutage, match="nor can s3://b/f/w, which was read before") as caught:
        list(fetch_confirmed(Rows({"a", "w"}), rows("a"), known))
    assert caught.value.kind == "source"


def test_a_row_that_comes_back_was_never_missing() -> None:
    source = Rows({"b"}, back={"b"})
    with pytest.raises(SourceOutage, match="b: was missing for a moment"):
        list(fetch_confirmed(source, rows("a", "b"), SourceProbes()))


def test_a_witness_from_elsewhere_is_as_good() -> None:
    found = list(fetch_confirmed(Rows({"a"}), rows("a"), SourceProbes(), rows("w")))
    assert isinstance(found[0][1], AbsentError)


def test_the_nearest_and_smallest_witness_is_asked() -> None:
    known = SourceProbes()
    for item in [*rows("long-name", "w"), *rows("x", folder="s3://other/f")]:
        known.add(item)
    assert [item.row_id for item in known.near("s3://b/f/a")] == ["w", "x"]
    assert [item.row_id for item in known.near("s3://other/f/a")] == ["x", "w"]
