"""The cache of decoded blocks against a plain model of it: bound, order, counts, read-only."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.block_cache import BlockCache, FrameSpan, IoCounts, other_row, outside
from earmill.pipeline.formats.format import Promise
from earmill.pipeline.reader import features
from earmill.pipeline.reader.features import ProcessHandles
from earmill.pipeline.storage.layout import Layout
from tests.short import drawn
from tests.waiting import DEADLINE_S

BOUND = 1000


def block(*sizes: int, value: int = 0) -> tuple[np.ndarray, ...]:
    """Arrays of so many bytes each."""
    return tuple(np.full(size, value, np.uint8) for size in sizes)


class CacheAsAList(RuleBasedStateMachine):
    """Any puts, gets and clears: the cache is what two lists would be, one in order of use and one
    of what was read ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = IoCounts()
        self.cache = BlockCache(BOUND, self.counts)
        self.used: list[tuple[int, int]] = []  # key and bytes, the least recently used first
        # Key, bytes, and all that was put until then.
        self.ahead: list[tuple[int, int, int]] = []
        self.put_count = self.put_bytes = 0

    def kept(self) -> dict[int, int]:
        return dict(self.used) | {key: size for key, size, _ in self.ahead}

    def use(self, key: int) -> None:
        size = self.kept()[key]
        self.forget(key)
        self.used.append((key, size))

    def forget(self, key: int) -> None:
        self.used = [entry for entry in self.used if entry[0] != key]
        self.ahead = [entry for entry in self.ahead if entry[0] != key]

    def throw_away(self, newest: int) -> None:
        while sum(self.kept().values()) > BOUND and len(self.kept()) > 1:
            used = [key for key, _ in self.used if key != newest]
            ahead = [key for key, *_ in self.ahead if key != newest]
            passed = [key for key, _, then in self.ahead if self.put_bytes - then > BOUND]
            self.forget([*passed[:1], *used, *ahead][0])

    @rule(key=st.integers(0, 6), size=st.integers(0, 700), is_ahead=st.booleans())
    def put(self, key: int, size: int, is_ahead: bool) -> None:
        claimed = self.cache.claim([key], ahead=True) if is_ahead else []
        assert claimed == ([key] if is_ahead and key not in self.kept() else [])
        value = block(size // 2, size - size // 2, value=key)
        assert self.cache.put(key, value) is value
        self.cache.release(claimed)
        self.put_count, self.put_bytes = self.put_count + 1, self.put_bytes + size
        self.forget(key)
        if claimed:
            self.ahead.append((key, size, self.put_bytes))
        else:
            self.used.append((key, size))
        self.throw_away(key)

    @rule(key=st.integers(0, 6))
    def get(self, key: int) -> None:
        found, kept = self.cache.get(key), self.kept()
        assert (found is not None) == (key in kept)
        if found is not None:
            assert sum(array.nbytes for array in found) == kept[key]
            assert all((array == key).all() for array in found)
            self.use(key)

    @rule(keys=st.lists(st.integers(0, 6), unique=True))
    def held(self, keys: list[int]) -> None:
        kept = self.kept()
        found = [None if block is None else len(block) for block in self.cache.held(keys)]
        assert found == [2 if key in kept else None for key in keys]
        for key in keys:
            if key in kept:
                self.use(key)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.used, self.ahead = [], []

    @invariant()
    def bytes_are_those_of_what_is_kept(self) -> None:
        assert self.cache.nbytes == sum(self.kept().values())
        assert self.cache.nbytes <= BOUND or len(self.kept()) == 1

    @invariant()
    def reads_are_counted_once(self) -> None:
        assert (self.counts.blocks_read, self.counts.bytes_read) == (self.put_count, self.put_bytes)


TestCacheAsAList = CacheAsAList.TestCase
TestCacheAsAList.settings = drawn(120, stateful_step_count=30)


class TestBound:
    @given(st.lists(st.integers(0, 300), max_size=30), st.integers(0, 500))
    @drawn(60)
    def test_never_above_it(self, sizes: list[int], bound: int) -> None:
        cache = BlockCache(bound, IoCounts())
        for key, size in enumerate(sizes):
            cache.put(key, block(size))
            assert cache.get(key) is not None, "the newest block is always kept"
            assert cache.nbytes <= max(bound, size)

    def test_exactly_the_bound_fits(self) -> None:
        cache = BlockCache(100, IoCounts())
        cache.put("a", block(60))
        cache.put("b", block(40))
        assert cache.get("a") is not None
        cache.put("c", block(1))
        assert cache.get("b") is None
        assert cache.get("a") is not None, "it was used after b"

    def test_one_larger_than_the_bound_drives_out_the_rest_and_goes_next(self) -> None:
        cache = BlockCache(100, IoCounts())
        cache.put("a", block(10))
        cache.put("large", block(500))
        assert (cache.get("a"), cache.nbytes) == (None, 500)
        cache.put("b", block(10))
        assert (cache.get("large"), cache.nbytes) == (None, 10)

    def test_the_same_block_read_again_counts_once(self) -> None:
        """Two readers of one shard, or a shard opened again, put the same key."""
        cache = BlockCache(100, IoCounts())
        for _ in range(5):
            cache.put("a", block(40))
        cache.put("b", block(60))
        assert (cache.nbytes, cache.counts.blocks_read) == (100, 6)
        assert cache.get("a") is not None

    def test_nobody_can_edit_what_is_kept(self) -> None:
        cache = BlockCache(100, IoCounts())
        kept = cache.put("a", block(4, 4))
        for array in kept:
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1


class TestReadAhead:
    def cache(self) -> BlockCache:
        return BlockCache(100, IoCounts())

    def put_ahead(self, cache: BlockCache, *keys: int) -> None:
        assert cache.claim(keys, ahead=True) == [*keys]
        for key in keys:
            cache.put(key, block(20))
        cache.release(keys)

    def there(self, cache: BlockCache, keys: Iterable[int]) -> list[int]:
        return [key for key in keys if not cache.claim([key])]

    def test_what_was_used_goes_before_what_is_still_to_be_used(self) -> None:
        """In order, three ahead: the oldest of all is the next that is needed."""
        cache = self.cache()
        self.put_ahead(cache, 0, 1, 2, 3)
        for key in range(20):
            assert cache.get(key) is not None
            self.put_ahead(cache, key + 4)
        assert cache.counts.blocks_read == 24

    def test_what_was_passed_over_goes_when_as_much_as_is_kept_came_after_it(self) -> None:
        cache = self.cache()
        self.put_ahead(cache, 0, 1)
        for key in range(2, 6):
            cache.put(key, block(20))
        assert self.there(cache, range(6)) == [0, 1, 3, 4, 5]
        cache = self.cache()
        self.put_ahead(cache, 0, 1)
        for key in range(2, 9):
            cache.put(key, block(20))
        assert self.there(cache, range(9)) == [4, 5, 6, 7, 8]

    def test_of_nothing_but_what_is_ahead_the_oldest_goes(self) -> None:
        cache = self.cache()
        self.put_ahead(cache, *range(6))
        assert self.there(cache, range(6)) == [1, 2, 3, 4, 5]


def test_errors_name_both_sides() -> None:
    span = FrameSpan("a.wav", 3, 0, 0, 1)
    for found, there in ((None, "nothing"), ("b.wav", "'b.wav'"), (np.str_("c"), "'c'")):
        error = other_row("data/0.zarr", span, found)
        assert f"has row 'a.wav' at 3, the file holds {there} there" in str(error)
    assert "expects 9 of loudness, the file holds 7" in str(outside("f", "loudness", 9, 7))


class Opened:
    """A shard that only knows whether it is open."""

    def __init__(self, layout: Layout, rel: str, promise: Promise, cache: BlockCache) -> None:
        if rel == "broken":
            raise CommitError("broken")
        self.rel, self.cache, self.open = rel, cache, True

    def read(self, stream: str, span: FrameSpan) -> np.ndarray:
        raise NotImplementedError

    def close(self) -> None:
        assert self.open, "closed twice"
        self.open = False


class TestOpenShards:
    @pytest.fixture(autouse=True)
    def _fake(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opener: Any = SimpleNamespace(open=Opened)
        monkeypatch.setattr(features, "format_of", lambda name: self.opener)
        monkeypatch.setattr(features, "MAX_OPEN_SHARDS", 2)
        promise = Promise(0, {}, {}, {})
        catalog: Any = SimpleNamespace(shard_file=lambda layout, shard, *_: (shard, promise))
        places: Any = SimpleNamespace(shard=str, nbytes=len)
        layout = Layout.open("memory://nowhere")
        self.shards = ProcessHandles(catalog, places, layout, "none", cache_bytes=100)

    def get(self, shard: str) -> Any:
        return self.shards.reader(shard)

    def test_the_least_recently_used_is_closed(self) -> None:
        a, b = self.get("a"), self.get("b")
        assert self.get("a") is a
        c = self.get("c")
        assert (a.open, b.open, c.open) == (True, False, True)
        again = self.get("b")
        assert again is not b
        assert (a.open, c.open, again.open) == (False, True, True)
        assert self.shards.counts.shards_opened == 4

    def test_all_share_one_cache(self) -> None:
        assert self.get("a").cache is self.get("b").cache is self.shards.cache
        assert self.shards.cache.max_bytes == 100

    def test_one_that_does_not_open_takes_no_place(self) -> None:
        a, b = self.get("a"), self.get("b")
        with pytest.raises(CommitError):
            self.get("broken")
        assert a.open
        assert b.open
        assert self.shards.counts.shards_opened == 2

    def test_two_are_opened_side_by_side_and_one_only_once(self) -> None:
        both = Barrier(2)

        def open_slowly(layout: Layout, rel: str, *rest: Any) -> Opened:
            both.wait(DEADLINE_S)
            return Opened(layout, rel, *rest)

        self.opener.open = open_slowly
        with ThreadPoolExecutor(4) as pool:
            found = [*pool.map(self.get, "abab")]
        assert found[:2] == found[2:]
        assert self.shards.counts.shards_opened == 2

    def test_closing_closes_each_once_and_forgets_the_blocks(self) -> None:
        opened = [self.get("a"), self.get("b")]
        self.shards.cache.put("key", block(50))
        self.shards.close()
        self.shards.close()
        assert [shard.open for shard in opened] == [False, False]
        assert self.shards.cache.nbytes == 0
        assert self.get("a") is not opened[0]


def test_a_block_is_read_once_by_those_who_ask_at_the_same_time() -> None:
    cache = BlockCache(1000, IoCounts())
    begun, go_on = Event(), Event()

    def load() -> tuple[np.ndarray]:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return (np.arange(8),)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.loaded, "k", load)
        assert begun.wait(DEADLINE_S)
        assert cache.claim(["k"]) == []
        second = pool.submit(cache.loaded, "k", load)
        go_on.set()
        assert first.result(DEADLINE_S)[0] is second.result(DEADLINE_S)[0]
    assert cache.counts.blocks_read == 1
    assert cache.claim(["other"]) == ["other"]
