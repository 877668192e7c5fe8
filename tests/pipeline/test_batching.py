"""Batches partition the clips, respect their bounds and depend on nothing but lengths."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from earmill.pipeline.worker.extraction import BUCKET_ENDS, BUCKET_RATIO, form_batches

lengths_lists = st.lists(st.integers(1, 10_000_000), max_size=60)


@given(lengths=lengths_lists, limit=st.integers(1, 20_000_000))
def test_each_clip_is_in_one_batch_of_similar_lengths(lengths: list[int], limit: int) -> None:
    batches = form_batches(lengths, limit)
    assert sorted(position for batch in batches for position in batch) == list(range(len(lengths)))
    for batch in batches:
        members = [lengths[position] for position in batch]
        assert max(members) <= max(BUCKET_ENDS[0], BUCKET_RATIO * (min(members) + 1))
        assert len(members) == 1 or sum(members) <= limit


@given(n=st.integers(1, 10**9))
def test_clips_share_a_batch_where_the_grid_says_so(n: int) -> None:
    k = next(k for k, end in enumerate(BUCKET_ENDS) if n <= end)
    shortest = 1 if k == 0 else BUCKET_ENDS[k - 1] + 1
    assert form_batches([n, shortest, BUCKET_ENDS[k]], 10**10) == [[0, 1, 2]]
    assert form_batches([n, BUCKET_ENDS[k] + 1], 10**10) == [[0], [1]]


def test_padding_stays_below_one_step_of_the_grid() -> None:
    for shorter, longer in pairwise(BUCKET_ENDS[:30]):
        assert longer <= BUCKET_RATIO * (shorter + 1)


def test_equal_clips_fill_a_batch_up_to_the_limit() -> None:
    assert form_batches([100] * 7, 300) == [[0, 1, 2], [3, 4, 5], [6]]


def test_no_clips() -> None:
    assert form_batches([], 100) == []
