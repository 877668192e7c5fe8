"""The kernels' threads: what torch does on them, calls from one of them, failures."""

from __future__ import annotations

import multiprocessing
import threading
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from amtcore import get_num_threads, set_num_threads
from amtcore.errors import ParameterError
from amtcore.kernels.vector import threads
from amtcore.kernels.vector.threads import one_torch_thread, parallel_for


@pytest.fixture(autouse=True)
def _three_new_threads() -> Iterator[None]:
    """A pool of its own, and two torch threads for everybody else."""
    kernels, torchs = get_num_threads(), torch.get_num_threads()
    torch.set_num_threads(2)
    set_num_threads(3)
    yield
    set_num_threads(kernels)
    torch.set_num_threads(torchs)


def test_torch_runs_on_one_thread_there_and_on_its_own_elsewhere() -> None:
    parallel_for(lambda i: None, 20)  # the threads start, and look at torch's number only later
    seen: list[int] = []
    parallel_for(lambda i: seen.append(torch.get_num_threads()), 20)
    assert set(seen) == {1}
    assert torch.get_num_threads() == 2


def test_calls_on_a_thread_of_the_pool_run_right_there() -> None:
    """Else three calls that wait for three more would wait for ever."""
    counts = [0] * 12
    parallel_for(lambda i: parallel_for(lambda j: counts.__setitem__(4 * i + j, 1), 4), 3)
    assert counts == [1] * 12


def test_the_first_failure_is_raised() -> None:
    def fail(i: int) -> None:
        if i >= 2:
            raise ArithmeticError(f"item {i}")

    for _ in range(50):
        with pytest.raises(ArithmeticError, match="item 2"):
            parallel_for(fail, 5)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 100])
def test_each_number_is_called_once(count: int) -> None:
    """Fewer numbers than threads, as many, and more."""
    calls: list[int] = []
    parallel_for(calls.append, count)
    assert sorted(calls) == list(range(count))


def test_the_other_calls_are_made_although_one_fails() -> None:
    """A call that fails costs its thread's turn, not the numbers behind it."""
    calls: list[int] = []

    def some_fail(i: int) -> None:
        calls.append(i)
        if i == 0:
            raise ArithmeticError("item 0")

    with pytest.raises(ArithmeticError, match="item 0"):
        parallel_for(some_fail, 12)
    assert sorted(calls) == list(range(12))


def test_every_thread_flushes_denormals_and_no_other_does() -> None:
    """In silence a filter's state decays into that range, where arithmetic is slow."""
    smallest = torch.finfo(torch.float32).tiny

    def halved() -> float:
        return (torch.full((4,), smallest) / 2).max().item()

    found: list[float] = []
    parallel_for(lambda i: found.append(halved()), 12)
    assert found == [0.0] * 12
    assert halved() == smallest / 2


@pytest.mark.parametrize("threads", [0, -1, 1.5, True, None, "2"])
def test_a_number_of_threads_that_is_none(threads: object) -> None:
    with pytest.raises(ParameterError, match="whole number, 1 or more"):
        set_num_threads(threads)  # type: ignore[arg-type]
    assert get_num_threads() == 3


def test_the_number_set_is_the_number_used() -> None:
    """So many calls meet at a barrier; with one thread fewer they would wait for ever."""
    set_num_threads(np.int64(4))  # type: ignore[arg-type]
    barrier = threading.Barrier(4, timeout=60)
    parallel_for(lambda i: barrier.wait() and None, 4)
    set_num_threads(1)
    names: list[str] = []
    parallel_for(lambda i: names.append(threading.current_thread().name), 8)
    assert len(set(names)) == 1


def test_a_forked_process_has_threads_of_its_own() -> None:
    """The pool's threads stay behind in the parent; waiting for them would never end."""
    parallel_for(lambda i: None, 4)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def child() -> None:
        calls: list[int] = []
        parallel_for(calls.append, 7)
        answers.put(sorted(calls))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads, on purpose
        process = context.Process(target=child, daemon=True)
        process.start()
    process.join(120)
    assert process.exitcode == 0
    assert answers.get() == list(range(7))


@pytest.mark.parametrize("of_kernels", [0, 3])  # 0: torch's own number
def test_torch_alone_can_have_one_thread(of_kernels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_threads", of_kernels)
    own, kernels = torch.get_num_threads(), get_num_threads()
    assert kernels == (of_kernels or 2)
    with pytest.raises(ZeroDivisionError), one_torch_thread(), one_torch_thread():
        assert torch.get_num_threads() == 1 and get_num_threads() == kernels
        parallel_for(lambda i: None, 3)
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == own and get_num_threads() == kernels
