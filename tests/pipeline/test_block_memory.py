"""Memory of decoded blocks that were thrown away: used again, unless somebody reads it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from earmill.pipeline.formats.blocks import SPARE_BYTES, BlockCache, IoCounts


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
