"""Order, bounds and ends of work done ahead, with threads that are held at known points."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from earmill.pipeline.worker.extraction import ModelQueue
from earmill.pipeline.worker.prefetch import prefetched
from tests.short import drawn
from tests.waiting import DEADLINE_S


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


@drawn(40)
@given(
    sizes=st.lists(st.integers(0, 30), max_size=40),
    budget=st.integers(1, 50),
    in_flight=st.integers(1, 6),
)
def test_equals_map_for_any_sizes_and_bounds(sizes: list[int], budget: int, in_flight: int) -> None:
    with ThreadPoolExecutor(3) as pool:
        got = list(
            prefetched(
                sizes,
                lambda n: bytes(n),
                pool=pool,
                nbytes=len,
                budget_bytes=budget,
                in_flight=in_flight,
            )
        )
    assert got == [bytes(n) for n in sizes]


def test_no_more_than_the_budget_waits(pool: ThreadPoolExecutor) -> None:
    made = 0
    lock = threading.Lock()

    def make(n: int) -> bytes:
        nonlocal made
        with lock:
            made += n
        return bytes(n)

    pieces = prefetched([10] * 50, make, pool=pool, nbytes=len, budget_bytes=35, in_flight=2)
    taken = 0
    for piece in pieces:
        taken += len(piece)
        # Waiting pieces stay below the budget when the next one starts; two may be under way.
        assert made - taken <= 35 + 2 * 10
    assert taken == 500


def test_one_piece_above_the_budget_gets_through(pool: ThreadPoolExecutor) -> None:
    pieces = prefetched([9, 9], bytes, pool=pool, nbytes=len, budget_bytes=1, in_flight=3)
    assert [len(piece) for piece in pieces] == [9, 9]


def test_an_exception_comes_at_its_place(pool: ThreadPoolExecutor) -> None:
    def work(n: int) -> int:
        if n == 2:
            raise KeyError("two")
        return n

    pieces = prefetched(range(5), work, pool=pool, nbytes=lambda _: 1, budget_bytes=9, in_flight=4)
    assert [next(pieces), next(pieces)] == [0, 1]
    with pytest.raises(KeyError, match="two"):
        next(pieces)


def test_an_exception_of_the_source_is_raised_after_what_came_before(
    pool: ThreadPoolExecutor,
) -> None:
    def items() -> Iterator[int]:
        yield 7
        raise OSError("the connection is gone")

    pieces = prefetched(items(), str, pool=pool, nbytes=len, budget_bytes=9, in_flight=1)
    assert next(pieces) == "7"
    with pytest.raises(OSError, match="connection is gone"):
        next(pieces)


def test_leaving_early_stops_the_feeder(pool: ThreadPoolExecutor) -> None:
    pulled: list[int] = []
    done = threading.Event()

    def items() -> Iterator[int]:
        try:
            for n in range(1000):
                pulled.append(n)
                yield n
        finally:
            done.set()

    pieces = prefetched(items(), bytes, pool=pool, nbytes=lambda _: 5, budget_bytes=9, in_flight=1)
    next(pieces)
    pieces.close()
    assert done.wait(DEADLINE_S)
    assert len(pulled) < 20


@pytest.mark.parametrize("taken", [1, 4])
def test_what_nobody_takes_is_released(pool: ThreadPoolExecutor, taken: int) -> None:
    """Items that are not worked on and results that nobody takes: their files would stay open."""
    pulled: list[int] = []
    worked: list[int] = []
    released: list[int | str] = []

    def items() -> Iterator[int]:
        for n in range(1000):
            pulled.append(n)
            yield n

    def work(n: int) -> str:
        worked.append(n)
        return str(n)

    pieces = prefetched(
        items(),
        work,
        pool=pool,
        nbytes=lambda _: 5,
        budget_bytes=20,
        in_flight=3,
        release=released.append,
    )
    got = [next(pieces) for _ in range(taken)]
    pieces.close()
    pool.shutdown(wait=True)
    assert sorted([int(n) for n in got] + [int(n) for n in released]) == pulled
    assert {n for n in released if isinstance(n, int)} == set(pulled) - set(worked)


def test_shards_get_the_models_in_the_order_of_arrival() -> None:
    models, entered = ModelQueue(), []
    lined_up = threading.Semaphore(0)

    def visit(name: int) -> None:
        with models.ticket() as ticket:
            lined_up.release()
            ticket.wait()
            entered.append(name)

    with models.ticket() as first:
        first.wait()
        threads = []
        for name in range(6):
            threads.append(threading.Thread(target=visit, args=(name,)))
            threads[-1].start()
            lined_up.acquire()
        assert entered == []
    for thread in threads:
        thread.join()
    assert entered == list(range(6))


def test_a_shard_that_fails_gives_its_ticket_back() -> None:
    models = ModelQueue()
    with pytest.raises(ValueError, match="early"), models.ticket():
        raise ValueError("left early")
    with models.ticket() as ticket:
        ticket.wait()


def test_a_ticket_given_back_lets_the_next_shard_in() -> None:
    models = ModelQueue()
    with models.ticket() as first, models.ticket() as second:
        first.wait()
        first.give_back()
        second.wait()  # for ever, if the first were still in the line
        first.give_back()
