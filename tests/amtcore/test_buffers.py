"""Memory of large results: used again when nothing refers to it, and never beyond the limit."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from amtcore import Dau1997, GammatoneFilterbank, LIFExodus, set_buffer_limit
from amtcore.errors import ParameterError
from amtcore.kernels.vector import arrays as buffers
from amtcore.kernels.vector.arrays import LARGE_BYTES, empty

LIKE = torch.zeros(0)
#: A shape of just over LARGE_BYTES in float32.
SHAPE = (2, LARGE_BYTES // 8 + 3)


@pytest.fixture(autouse=True, scope="module")
def _others_are_no_garbage() -> None:
    """What other modules have left is not looked through each time that a test here collects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test begins with nothing kept and a limit that a caller has set."""
    gc.collect()
    with monkeypatch.context() as change:
        change.setattr(buffers, "_limit", None)
        set_buffer_limit(0)
        set_buffer_limit(2**30)
        yield
        gc.collect()
        set_buffer_limit(0)


@pytest.fixture
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process whose caller has set none."""
    monkeypatch.setattr(buffers, "_limit", None)


def _waiting_bytes() -> int:
    gc.collect()
    with buffers._lock:
        buffers._settle()
    return sum(memory.nbytes for memory in buffers._waiting)


def _large_input() -> Tensor:
    return 0.05 * torch.randn(1, 60_000, generator=torch.Generator().manual_seed(0))


def _bank(**options: Any) -> GammatoneFilterbank:
    return GammatoneFilterbank(torch.linspace(100, 7000, 31), 16000, **options)


@pytest.mark.parametrize("grad_mode", [True, False])
def test_inference_keeps_nothing(grad_mode: bool, no_limit: None) -> None:
    """No gradient is recorded: none is asked for, or what could be learned is under `no_grad`."""
    neurons = LIFExodus(200, dt=1e-3).requires_grad_(not grad_mode)
    with torch.set_grad_enabled(grad_mode):
        results = [
            _bank()(_large_input()),
            Dau1997(16000.0)(_large_input()),
            neurons(torch.zeros(1, 6000, 200)),
        ]
    bank, features, (spikes, *_) = results
    assert min(bank.nbytes, sum(each.nbytes for each in features), spikes.nbytes) > LARGE_BYTES
    assert not bank.requires_grad and not spikes.requires_grad
    del results, bank, features, spikes
    assert _waiting_bytes() == 0


def test_what_a_training_step_made_is_used_again(no_limit: None) -> None:
    x, bank = _large_input().requires_grad_(), _bank()
    y = bank(x)
    address, size = y.data_ptr(), y.nbytes
    y.sum().backward()
    del y
    kept = _waiting_bytes()
    assert kept > 2 * size, "the result and the gradient of the bank"
    assert bank(x.detach()).data_ptr() != address, "inference leaves it to the next step"
    assert _waiting_bytes() == kept
    again = bank(x)
    assert again.nbytes == size and _waiting_bytes() == kept // 2, "the next step takes one of two"


def test_training_on_threads_of_its_own_keeps_nothing_of_others(no_limit: None) -> None:
    with buffers.training(), ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: empty(SHAPE, LIKE).nbytes).result()
    assert _waiting_bytes() == 0


def test_with_a_limit_of_the_caller_inference_is_kept_too() -> None:
    _bank()(_large_input())
    assert _waiting_bytes() > LARGE_BYTES


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
