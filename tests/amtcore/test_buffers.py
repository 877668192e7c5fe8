"""Memory of large results: used again when nothing refers to it, and never beyond the limit."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from amtcore import GammatoneFilterbank, set_buffer_limit
from amtcore.errors import ParameterError
from amtcore.kernels.vector import result_pool as buffers
from amtcore.kernels.vector.result_pool import LARGE_BYTES, empty

LIKE = torch.zeros(0)
#: A shape of just over LARGE_BYTES in float32.
SHAPE = (2, LARGE_BYTES // 8 + 3)


@pytest.fixture(autouse=True)
def _nothing_waits() -> Iterator[None]:
    gc.collect()
    set_buffer_limit(0)
    set_buffer_limit(2**30)
    yield
    set_buffer_limit(2**30)


def _waiting_bytes() -> int:
    return sum(memory.nbytes for memory in buffers._waiting)


def test_memory_is_used_again_after_the_last_reference() -> None:
    first = empty(SHAPE, LIKE)
    address, row = first.data_ptr(), first[1]
    del first
    second = empty(SHAPE, LIKE)
    assert second.data_ptr() != address, "a row of the first result still lives"
    del row
    assert empty(SHAPE, LIKE).data_ptr() == address


def test_arrays_of_a_result_keep_its_memory() -> None:
    result = empty(SHAPE, LIKE)
    address, array = result.data_ptr(), result.numpy()[1:]
    del result
    other = empty(SHAPE, LIKE)
    assert other.data_ptr() != address
    del array
    assert empty(SHAPE, LIKE).data_ptr() == address


def test_another_dtype_and_a_smaller_shape_fit_too() -> None:
    address = empty(SHAPE, LIKE).data_ptr()
    assert empty((SHAPE[1],), LIKE.double()).data_ptr() == address
    assert empty((SHAPE[0] * 3,), LIKE).data_ptr() != address, "small results are not kept"


def test_what_is_much_larger_is_left_for_others() -> None:
    address = empty((SHAPE[0], 3 * SHAPE[1]), LIKE).data_ptr()
    assert empty(SHAPE, LIKE).data_ptr() != address


@pytest.mark.parametrize("shape", [(0, 3), (3,), (5, 7, 11), SHAPE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_are_aligned(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    result = empty(shape, torch.zeros(0, dtype=dtype))
    assert result.shape == shape and result.dtype == dtype and result.is_contiguous()
    assert result.data_ptr() % 64 == 0


def test_the_limit_drops_the_oldest() -> None:
    sizes = [(SHAPE[0], k * SHAPE[1]) for k in (1, 3, 9)]
    results = [empty(shape, LIKE) for shape in sizes]
    while results:
        del results[0]
    kept = _waiting_bytes()
    assert len(buffers._waiting) == 3
    set_buffer_limit(kept - 1)
    assert len(buffers._waiting) == 2 and _waiting_bytes() < kept - SHAPE[0] * SHAPE[1] * 4
    set_buffer_limit(0)
    assert _waiting_bytes() == 0
    empty(SHAPE, LIKE)
    assert _waiting_bytes() == 0, "with the limit 0 nothing waits"
    with pytest.raises(ParameterError, match="0 bytes or more"):
        set_buffer_limit(-1)


def test_a_result_may_die_while_the_lock_is_held() -> None:
    """Garbage is collected at any moment, also while this thread looks for memory."""
    result: list[Tensor] = [empty(SHAPE, LIKE)]
    address = result[0].data_ptr()
    with buffers._lock:
        result.clear()
    assert empty(SHAPE, LIKE).data_ptr() == address


def test_threads_never_share_memory() -> None:
    """Each writes its own number over and over; memory of two living results would mix them."""
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(40):
            mine = empty(SHAPE, LIKE).fill_(number)
            if not bool((mine == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_kernels_do_not_depend_on_what_memory_held() -> None:
    """The same filters on memory that is full of NaN."""
    x = torch.randn(1, 60_000, generator=torch.Generator().manual_seed(0))
    bank = GammatoneFilterbank(torch.linspace(100, 7000, 31), 16000)
    first = bank(x)
    assert first.nbytes > LARGE_BYTES
    expected, address = first.clone(), first.data_ptr()
    first.fill_(float("nan"))
    del first
    again = bank(x)
    assert again.data_ptr() == address
    assert torch.equal(again, expected)
