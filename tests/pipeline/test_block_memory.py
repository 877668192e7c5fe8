"""Memory of decoded blocks that were thrown away: used again, unless somebody reads it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from earmill.pipeline.formats.blocks import (
    LEAST_SLABS,
    MOST_SIZES,
    PAGE_BYTES,
    SLAB_BYTES,
    SPARE_BYTES,
    BlockCache,
    IoCounts,
    Slabs,
)

MB = 2**20


@pytest.mark.parametrize("held", ["nothing", "block", "array", "view"])
def test_memory_of_a_block_is_used_again_when_nobody_reads_it(held: str) -> None:
    cache = BlockCache(100, IoCounts())
    memory = cache.memory(80)
    address = memory.ctypes.data
    array = memory.view(np.int16).reshape(-1, 4)[:9]
    del memory
    cache.put("old", (array,))
    del array
    kept: Any = {
        "nothing": lambda: None,
        "block": lambda: cache.get("old"),
        "array": lambda: cache.get("old")[0],  # type: ignore[index]
        "view": lambda: cache.get("old")[0][2:3],  # type: ignore[index]
    }[held]()
    cache.put("new", (cache.memory(80).view(np.int16),))
    # Not by the address of `again`: freed memory may be given out at the same place.
    assert [spare.ctypes.data for spare in cache._spare] == [address] * (held == "nothing")
    again = cache.memory(80)
    assert again.flags.writeable and not cache._spare
    del kept


@pytest.mark.parametrize(("nbytes", "fits"), [(63, False), (64, True), (80, True), (81, False)])
def test_memory_of_about_the_size_is_used_again_and_weighed_whole(nbytes: int, fits: bool) -> None:
    cache = BlockCache(100, IoCounts())
    memory = cache.memory(80)
    address = memory.ctypes.data
    cache.put("old", (memory.view(np.int16),))
    del memory
    cache.put("new", (np.empty(100, np.uint8),))
    again = cache.memory(nbytes)
    assert len(again) == nbytes
    assert len(cache._spare) == (not fits)
    assert again.ctypes.data == address or not fits
    cache.clear()
    cache.put("again", (again,))
    assert cache.nbytes == (80 if fits else nbytes)
    assert cache.counts.bytes_read == 180 + nbytes


def test_what_the_cache_may_hold_is_kept_for_the_next_blocks() -> None:
    """A burst of blocks, as of many requests at a time: its memory is there for the next one."""
    block_bytes, burst = SPARE_BYTES // 8, 30
    cache = BlockCache(32 * block_bytes, IoCounts())

    def come(first: int) -> list[int]:
        keys = cache.claim(range(first, first + burst), ahead=True)
        addresses = []
        for key in keys:
            memory = cache.memory(block_bytes)
            addresses.append(memory.ctypes.data)
            cache.put(key, (memory,))
            del memory
        cache.release(keys)
        return addresses

    before = come(0)
    with cache.scan(1):  # one that reads in order lets go of what was used
        assert all(cache.get(key) is not None for key in range(burst))
        cache.put("next", (np.empty(1, np.uint8),))
    spare = [memory.ctypes.data for memory in cache._spare]
    assert len({*before} & {*spare}) > SPARE_BYTES // block_bytes
    assert cache.nbytes + sum(memory.nbytes for memory in cache._spare) <= cache.max_bytes
    assert {*spare} & {*come(burst)}


def test_memory_of_many_blocks_is_cut_from_large_pages_and_never_given_twice() -> None:
    slabs, nbytes = Slabs(), MB - 100
    taken = [slabs.take(nbytes) for _ in range(20)]
    assert all(len(memory) == nbytes and memory.flags.writeable for memory in taken)
    for number, memory in enumerate(taken):
        memory[:] = number
    assert all((memory == number).all() for number, memory in enumerate(taken))
    addresses = sorted(memory.ctypes.data for memory in taken)
    assert min(np.diff(addresses)) >= nbytes
    # As many as fit, and every slab begins with a page.
    assert [memory.ctypes.data % PAGE_BYTES for memory in taken[::8]] == [0, 0, 0]
    assert all(slabs.owns(memory) for memory in taken)


def test_a_slab_is_cut_for_few_sizes_and_for_blocks_that_are_worth_it() -> None:
    slabs = Slabs()
    for nbytes in (100, SLAB_BYTES // 2 + 1, 2 * SLAB_BYTES):
        assert slabs.take(nbytes).flags.owndata
    sizes = [MB + 64 * k for k in range(MOST_SIZES + 2)]
    assert [slabs.take(nbytes).flags.owndata for nbytes in sizes] == MOST_SIZES * [False] + [
        True,
        True,
    ]
    assert not slabs.take(MB).flags.owndata


def test_memory_that_was_not_taken_here_is_never_written_to() -> None:
    slabs, foreign = Slabs(), np.arange(MB, dtype=np.uint8)
    assert not slabs.owns(np.frombuffer(foreign.data[:100], np.uint8))
    assert not slabs.owns(np.frombuffer(bytes(100), np.uint8))
    assert not slabs.owns(Slabs().take(MB))
    assert not slabs.owns(slabs.take(MB)[:100][:])


@pytest.mark.parametrize("held", [False, True])
def test_a_part_of_a_slab_is_used_again_when_nobody_reads_it(held: bool) -> None:
    cache = BlockCache(LEAST_SLABS * SLAB_BYTES, IoCounts())
    addresses, kept = set(), None
    for key in range(cache.max_bytes // MB + 1):
        memory = cache.memory(MB, many=True)
        assert not memory.base.flags.owndata  # type: ignore[union-attr]
        memory[:] = key
        addresses.add(memory.ctypes.data)
        (array,) = cache.put(key, (memory.view(np.int16).reshape(-1, 8),))
        kept = array[:1] if held and key == 0 else kept
        del memory, array
    assert cache.nbytes == cache.max_bytes
    assert len(cache._spare) == (not held)
    again = cache.memory(MB, many=True)
    assert (again.ctypes.data in addresses) == (not held)
    again[:] = 99
    assert kept is None or (kept.view(np.uint8) == 0).all()
    assert [int(cache.get(key)[0][0, 0]) for key in (1, 63)] == [257, 257 * 63]  # type: ignore[index]


def test_a_small_cache_takes_no_slabs() -> None:
    cache = BlockCache(LEAST_SLABS * SLAB_BYTES - 1, IoCounts())
    assert cache.memory(MB, many=True).base.flags.owndata  # type: ignore[union-attr]
