"""Memory for many blocks of one size at a time, in pages of 2 MB where the system has them.

Blocks of a MB are read and written once from end to end; in pages of 4 KB a processor looks up
where they are after every few hundred ns of that, in a virtual machine twice. numpy asks for large
pages (madvise) for what is larger than any block: so that is taken, and cut.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

# Cut at once.
SLAB_BYTES = 8 * 2**20
# Smaller blocks are used before they leave the processor's cache.
LEAST_BYTES, MOST_BYTES = 2**17, SLAB_BYTES // 2
# Sizes at a time: a set has one or two a stream, and of each a slab may be cut to half only.
MOST_SIZES = 8
PAGE_BYTES, LINE_BYTES = 2**21, 64


class Slabs:
    """Gives memory out part by part; a slab is gone when all that was cut of it is. Not safe in
    several threads."""

    def __init__(self) -> None:
        self._left: dict[int, list[Bytes]] = {}
        self._cut: WeakValueDictionary[int, Bytes] = WeakValueDictionary()

    def take(self, nbytes: int) -> Bytes:
        """Memory of this size; that of one block where a slab for it does not pay."""
        known = nbytes in self._left or len(self._left) < MOST_SIZES
        if not (known and LEAST_BYTES <= nbytes <= MOST_BYTES):
            return np.empty(nbytes, np.uint8)
        left = self._left.setdefault(nbytes, [])
        if not left:
            left += reversed(self._parts(nbytes))
        return left.pop()

    def owns(self, memory: Bytes) -> bool:
        """Whether this is memory that was taken from here, as a whole: nobody else's."""
        if memory.flags.owndata:
            return True
        whole = memory.base.obj if isinstance(memory.base, memoryview) else None
        return whole is not None and self._cut.get(id(whole)) is whole

    def clear(self) -> None:
        """Let go of what nobody has taken."""
        self._left.clear()

    def _parts(self, nbytes: int) -> list[Bytes]:
        slab = np.empty(SLAB_BYTES + PAGE_BYTES, np.uint8)
        self._cut[id(slab)] = slab
        # Views of a view refer to the array that owns the memory; of a buffer, to the part itself.
        whole = slab.data[-slab.ctypes.data % PAGE_BYTES :]
        pitch = -(-nbytes // LINE_BYTES) * LINE_BYTES
        firsts = range(0, SLAB_BYTES - nbytes + 1, pitch)
        return [np.frombuffer(whole[first : first + nbytes], np.uint8) for first in firsts]
