"""Memory of decoded blocks that were thrown away: used again, unless somebody reads it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from earmill.pipeline.formats.blocks import BlockCache, IoCounts


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
