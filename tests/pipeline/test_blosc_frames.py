"""blosc frames by our kernels: the bytes of c-blosc, the numbers of c-blosc, and its errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numcodecs import blosc

from amtcore.kernels.vector import blosc_blocks
from earmill.pipeline.formats.zarr import chunks

RNG = np.random.default_rng(7)
# Of which the kernel makes frames: in several blocks, with a last one of a few numbers, of 512, of
# an odd number, and in one that is smaller than a block.
COUNTS = (65536, 131072, 131072 * 2, 131072 * 2 + 512, 131072 + 8192 + 3, 300_003, 70_000)
# Of which c-blosc makes them: the last block has less than 512, or the only one no multiple of 8.
LEFT_TO_C_BLOSC = (131072 + 8, 131072 + 504, 65537, 65539)
KINDS = ("features", "noise", "zeros", "events", "ramp")


def made(kind: str, count: int, dtype: str) -> np.ndarray:
    bits = f"u{np.dtype(dtype).itemsize}"
    values: Any = {
        "features": lambda: np.abs(np.cumsum(RNG.standard_normal(count)) * 0.01),
        "noise": lambda: RNG.integers(0, 256, count * np.dtype(dtype).itemsize, np.uint8),
        "zeros": lambda: np.zeros(count),
        "events": lambda: np.arange(count) // 3,
        "ramp": lambda: np.arange(count) % 200,
    }[kind]()
    if kind == "noise":
        return np.asarray(values.view(bits).view(dtype))
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(values.astype(dtype))


def by_c_blosc(numbers: np.ndarray) -> bytes:
    """As our writers have it."""
    flat = numbers.view(np.uint8)
    return bytes(blosc.compress(flat, b"lz4", 5, blosc.BITSHUFFLE, typesize=numbers.itemsize))


def check_back(frame: np.ndarray, numbers: np.ndarray) -> None:
    """A frame gives the numbers again."""
    into = np.full(numbers.nbytes, 0xA5, np.uint8)
    chunks.decompress(frame, into)
    assert into.tobytes() == numbers.tobytes()


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often the kernels did it, and did not."""
    counts = {"kernel": 0, "c-blosc": 0}

    def counted(function: Any) -> Any:
        def call(*args: Any) -> Any:
            found = function(*args)
            counts["kernel" if found else "c-blosc"] += 1
            return found

        return call

    for name in ("encode_blocks", "decode_blocks"):
        monkeypatch.setattr(blosc_blocks, name, counted(getattr(blosc_blocks, name)))
    return counts


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_those_of_c_blosc(kind: str, dtype: str, by_kernel: dict[str, int]) -> None:
    for count in COUNTS:
        numbers = made(kind, count, dtype)
        if numbers.nbytes < chunks.LEAST_BYTES:
            continue
        by_kernel.update({"kernel": 0, "c-blosc": 0})
        frame = chunks.compress(numbers)
        assert frame.tobytes() == by_c_blosc(numbers)
        check_back(frame, numbers)
        # What cannot be packed is stored plain, which is no kernel's.
        plain = bool(frame[2] & 2)
        assert by_kernel == {"kernel": 0 if plain else 2, "c-blosc": 1 if plain else 0}, count


@pytest.mark.parametrize("count", LEFT_TO_C_BLOSC)
def test_blocks_of_another_kind_are_left_to_c_blosc(count: int, by_kernel: dict[str, int]) -> None:
    numbers = made("ramp", count, "float16")
    frame = chunks.compress(numbers)
    check_back(frame, numbers)
    assert frame.tobytes() == by_c_blosc(numbers)
    assert by_kernel == {"kernel": 0, "c-blosc": 2}


@pytest.mark.parametrize(
    "settings",
    [(b"lz4", 5, blosc.SHUFFLE), (b"zstd", 3, blosc.BITSHUFFLE), (b"lz4", 5, blosc.NOSHUFFLE)],
)
def test_frames_of_others_are_read(settings: Any, by_kernel: dict[str, int]) -> None:
    numbers = made("ramp", 100_000, "float32")
    frame = np.frombuffer(blosc.compress(numbers.view(np.uint8), *settings, typesize=4), np.uint8)
    check_back(frame, numbers)
    assert by_kernel == {"kernel": 0, "c-blosc": 0}


@pytest.mark.parametrize("block_bytes", [1024, 4096, 65536, 10**5])
def test_blocks_of_any_size_are_read(block_bytes: int) -> None:
    """Writers of other settings choose other sizes."""
    numbers = made("features", 60_000, "float16")
    frame = np.frombuffer(
        blosc.compress(numbers.view(np.uint8), b"lz4", 5, 2, block_bytes, typesize=2), np.uint8
    )
    check_back(frame, numbers)


def test_memory_that_begins_anywhere_is_filled() -> None:
    numbers = made("features", 70_000, "float32")
    stored = chunks.compress(numbers)
    shifted, into = np.empty(len(stored) + 1, np.uint8)[1:], np.empty(numbers.nbytes + 3, np.uint8)
    shifted[:] = stored
    for begin in range(4):
        memory = into[begin : begin + numbers.nbytes]
        chunks.decompress(shifted, memory)
        assert memory.tobytes() == numbers.tobytes()


FRAMES = {
    kind: chunks.compress(made(kind, 131072 + 8192 + 3, "float16")) for kind in ("features", "ramp")
}


@given(st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_damage_is_found_as_by_c_blosc(data: st.DataObject) -> None:
    """Numbers and errors are the same; nothing is read or written elsewhere."""
    frame = FRAMES[data.draw(st.sampled_from(sorted(FRAMES)))].copy()
    nbytes = int(frame[4:8].view("<i4")[0])
    # Starts of blocks and sizes of streams are hit as often as what is packed.
    starts = frame[16:24].view("<i4").tolist()
    places = [*range(8, 24), *(start + k for start in starts for k in range(4))]
    at = st.one_of(st.sampled_from(places), st.integers(8, len(frame) - 1))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(at)] ^= data.draw(st.integers(1, 255))
    frame[12:16].view("<i4")[0] = len(frame)
    guard = np.full(nbytes + 2 * 64, 0xC3, np.uint8)
    memory = guard[64:-64]
    try:
        chunks.decompress(frame, memory)
        found: bytes | None = memory.tobytes()
    except RuntimeError:
        found = None
    wanted = np.empty(nbytes, np.uint8)
    try:
        blosc.decompress(frame, wanted)
    except RuntimeError:
        assert found is None
    else:
        assert found == wanted.tobytes()
    assert (guard[:64] == 0xC3).all() and (guard[-64:] == 0xC3).all()


def test_a_frame_that_ends_too_early_is_no_frame() -> None:
    frame, memory = FRAMES["features"], np.empty(2 * (131072 + 8192 + 3), np.uint8)
    for length in (16, 20, 24, 28, 1000, len(frame) // 2, len(frame) - 1):
        numbers = memory.view(np.uint16)
        block_bytes = int(frame[8:12].view("<i4")[0])
        lz4 = chunks._lz4("LZ4_decompress_safe")
        assert not blosc_blocks.decode_blocks(frame[:length], numbers, block_bytes, lz4)


def test_without_the_functions_of_lz4_c_blosc_does_it(
    monkeypatch: pytest.MonkeyPatch, by_kernel: dict[str, int]
) -> None:
    monkeypatch.setattr(chunks, "_lz4", lambda name: 0)
    numbers = made("features", 100_000, "float16")
    check_back(chunks.compress(numbers), numbers)
    assert by_kernel == {"kernel": 0, "c-blosc": 0}
