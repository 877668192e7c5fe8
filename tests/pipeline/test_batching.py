"""Batches partition the clips, respect their bounds and depend on nothing but lengths."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from earmill.pipeline.worker.batches import BUCKET_RATIO, bucket_end, bucket_of, form_batches

lengths_lists = st.lists(st.integers(1, 10_000_000), max_size=60)


@given(lengths=lengths_lists, limit=st.integers(1, 20_000_000))
def test_each_clip_is_in_one_batch_of_similar_lengths(lengths: list[int], limit: int) -> None:
    batches = form_batches(lengths, limit)
    assert sorted(position for batch in batches for position in batch) == list(range(len(lengths)))
    for batch in batches:
        members = [lengths[position] for position in batch]
        assert len({bucket_of(n) for n in members}) == 1
        assert len(members) == 1 or sum(members) <= limit


@given(n=st.integers(1, 10**9))
def test_a_bucket_holds_the_lengths_it_says(n: int) -> None:
    k = bucket_of(n)
    assert n <= bucket_end(k)
    assert k == 0 or n > bucket_end(k - 1)


def test_padding_stays_below_one_step_of_the_grid() -> None:
    for k in range(1, 30):
        assert bucket_end(k) <= BUCKET_RATIO * (bucket_end(k - 1) + 1)


def test_equal_clips_fill_a_batch_up_to_the_limit() -> None:
    assert form_batches([100] * 7, 300) == [[0, 1, 2], [3, 4, 5], [6]]


def test_no_clips() -> None:
    assert form_batches([], 100) == []
