"""Codecs for stored features: ratio, and both speeds of one core, on chunks of every stream.

Chunks are those of the Zarr stores, about 1 MB; decoding is into memory that is there already, as
the reader does. MB are of decoded features; seconds are CPU seconds of one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numcodecs import Blosc, Zstd, blosc

from benchmarks.feature_sets import hour, loudness
from benchmarks.report import table, write_section
from earmill.pipeline.formats.zarr import blosc_frames
from earmill.pipeline.formats.zarr.write import chunk_frames

CODECS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "zstd-3": lambda: Zstd(3),
    "blosc lz4": lambda: Blosc("lz4", 5, Blosc.BITSHUFFLE),
    "blosc zstd-3": lambda: Blosc("zstd", 3, Blosc.BITSHUFFLE),
    "blosc zstd-5": lambda: Blosc("zstd", 5, Blosc.BITSHUFFLE),
    "blosc lz4, our kernels": lambda: OurKernels(),
}
CHOSEN = "blosc lz4, our kernels"
MOST_CHUNKS = 24


def chunks() -> dict[str, list[np.ndarray]]:
    """Chunks of every stream."""
    streams, rows = hour()
    parts = [row.streams for row, _ in zip(rows, range(150), strict=False)]
    loud_streams, loud = loudness()
    found = {}
    for infos, values in ((streams, parts), (loud_streams, loud)):
        for info in infos:
            whole = np.concatenate([each[info.name] for each in values])
            size = min(len(whole), chunk_frames(whole.shape[1], whole.dtype.name))
            starts = range(0, len(whole) - size + 1, size)[:MOST_CHUNKS]
            found[info.name] = [np.ascontiguousarray(whole[at : at + size]) for at in starts]
    return found


def measured(codec: Any, values: list[np.ndarray]) -> tuple[float, float, float]:
    """Ratio, and decoded bytes per CPU second of encoding and of decoding."""
    if codec is None:
        codec = Copy()
    nbytes = sum(chunk.nbytes for chunk in values)
    begin = time.process_time()
    stored = [codec.encode(chunk) for chunk in values]
    encode_s = time.process_time() - begin
    memory, decode_s = np.empty_like(values[0]), float("inf")
    for _ in range(3):
        begin = time.process_time()
        for each in stored:
            codec.decode(each, memory)
        decode_s = min(decode_s, time.process_time() - begin)
    return nbytes / sum(len(each) for each in stored), nbytes / encode_s, nbytes / decode_s


class Copy:
    """No codec: what reading and writing memory costs."""

    def encode(self, chunk: np.ndarray) -> bytes:
        return chunk.tobytes()

    def decode(self, stored: bytes, memory: np.ndarray) -> None:
        memory.reshape(-1).view(np.uint8)[:] = np.frombuffer(stored, np.uint8)


class OurKernels:
    """The same frames as our stores are written and read."""

    def encode(self, chunk: np.ndarray) -> np.ndarray:
        return blosc_frames.compress(chunk)

    def decode(self, stored: np.ndarray, memory: np.ndarray) -> None:
        blosc_frames.decompress(stored, memory.reshape(-1).view(np.uint8))


def main() -> None:
    """Measure and write the section."""
    blosc.use_threads = False
    blosc_frames.exercise()
    lines = []
    for name, values in chunks().items():
        for codec, make in CODECS.items():
            ratio, encode, decode = measured(make(), values)
            mark = " (chosen)" if codec == CHOSEN else ""
            speeds = (f"{encode / 1e6:.0f}", f"{decode / 1e6:.0f}")
            lines.append((name, codec + mark, f"{ratio:.2f}", *speeds))
    head = ("stream", "codec", "ratio", "encode MB/s", "decode MB/s")
    note = (
        "One core, chunks of 1 MB, float16 (spikes: int32). blosc shuffles bits; `our kernels` are "
        "the same bytes without c-blosc's shuffle. lz4 is chosen: in all it is smaller than "
        "zstd-3, and several times as fast at decoding; zstd behind a bit shuffle saves a further "
        "4 to 7 % of frames and half of the spikes, at a third of the speed."
    )
    write_section("Codecs", "python -m benchmarks.codecs", f"{note}\n\n{table(head, lines)}")


if __name__ == "__main__":
    main()
