"""The kernels' threads: what torch does on them, calls from one of them, failures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from amtcore import get_num_threads, set_num_threads
from amtcore.kernels.vector.threads import parallel_for


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
