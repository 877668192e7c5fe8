"""Collates lose nothing: undoing them gives back the rows, bit for bit, with ids and extras."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from earmill.pipeline.loader.collate import (
    as_tensor,
    collate_jagged,
    collate_packed,
    collate_padded,
    per_channel,
)
from tests.short import drawn

COLLATES: dict[str, Any] = {
    "padded": collate_padded,
    "padded to 8": partial(collate_padded, pad_value=-7.0, multiple_of=8),
    "packed": collate_packed,
    "jagged": collate_jagged,
}
quick = drawn(50, derandomize=True)
lengths_st = st.lists(st.integers(0, 12), min_size=1, max_size=6)


@dataclass
class AnyRow:
    """A row by shape only: the collates need no dataset."""

    index: int
    row_id: str
    features: dict[str, Any]
    seconds: float = 1.0
    extra: Mapping[str, Any] = field(default_factory=dict)


def make_rows(lengths: list[int], dtype: Any = np.float16, as_torch: bool = False) -> list[AnyRow]:
    rng = np.random.default_rng(len(lengths))
    rows = []
    for i, n in enumerate(lengths):
        parts: dict[str, Any] = {
            "modulation": rng.standard_normal((n, 5)).astype(dtype),
            "loudness": rng.standard_normal((2 * n, 1)).astype(dtype),
        }
        if as_torch:
            parts = {name: torch.from_numpy(part) for name, part in parts.items()}
        rows.append(AnyRow(40 - i, f"clip/{i}.wav", parts, seconds=n / 100, extra={"label": i}))
    return rows


def undo(value: Any) -> list[torch.Tensor]:
    """Whatever a collate made of one stream, back into rows."""
    if isinstance(value, torch.Tensor):
        return list(value.unbind())
    return value.unpad() if hasattr(value, "unpad") else value.unpack()


@pytest.mark.parametrize("name", COLLATES)
@pytest.mark.parametrize("as_torch", [False, True], ids=["arrays", "tensors"])
@quick
@given(lengths=lengths_st, dtype=st.sampled_from([np.float16, np.float32]))
def test_undoing_a_collate_gives_the_rows(
    name: str, as_torch: bool, lengths: list[int], dtype: Any
) -> None:
    rows = make_rows(lengths, dtype, as_torch)
    batch = COLLATES[name](rows)
    for stream in ("modulation", "loudness"):
        parts = undo(batch.features[stream])
        assert len(parts) == len(rows) == len(batch)
        for part, row in zip(parts, rows, strict=True):
            wanted = as_tensor(row.features[stream])
            assert part.dtype == wanted.dtype
            assert torch.equal(part, wanted)
    assert batch.row_ids == tuple(row.row_id for row in rows)
    assert batch.indices.tolist() == [row.index for row in rows]
    assert batch.seconds.tolist() == [row.seconds for row in rows]
    assert batch.extra["label"].tolist() == list(range(len(rows)))


@quick
@given(lengths=lengths_st, multiple=st.integers(1, 9))
def test_padding_is_only_padding(lengths: list[int], multiple: int) -> None:
    """What the mask hides holds the pad value, and no frame more than the rounding asks for."""
    batch = collate_padded(make_rows(lengths), pad_value=-7.0, multiple_of=multiple)
    stream = batch.features["modulation"]
    assert stream.mask.sum(1).tolist() == lengths == stream.lengths.tolist()
    assert (stream.values[~stream.mask] == -7.0).all()
    assert stream.values.shape[1] % multiple == 0
    assert 0 <= stream.values.shape[1] - max(lengths) < multiple


def test_packed_offsets_address_the_rows() -> None:
    rows = make_rows([3, 0, 2])
    packed = collate_packed(rows).features["modulation"]
    assert packed.offsets.dtype == torch.int64
    assert packed.offsets.tolist() == [0, 3, 3, 5]
    assert torch.equal(packed.values[3:5], torch.from_numpy(rows[2].features["modulation"]))


def test_jagged_works_in_torch_operators() -> None:
    """Row means of the nested tensor equal the means of the rows."""
    rows = make_rows([4, 1, 6], np.float32)
    nested = collate_jagged(rows).features["modulation"]
    assert nested.layout is torch.jagged
    means = nested.mean(dim=1)
    for row, mean in zip(rows, means, strict=True):
        np.testing.assert_allclose(
            mean.reshape(-1).numpy(), row.features["modulation"].mean(0), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("name", COLLATES)
def test_batch_moves_with_its_metadata(name: str) -> None:
    batch = COLLATES[name](make_rows([2, 3]))
    moved = batch.to("meta")
    assert moved.indices.device.type == "meta"
    assert moved.row_ids == batch.row_ids
    value = moved.features["modulation"]
    assert (value if isinstance(value, torch.Tensor) else value.values).device.type == "meta"


def test_read_only_arrays_are_copied_and_others_shared() -> None:
    frozen, open_ = np.ones((2, 2), np.float16), np.ones((2, 2), np.float16)
    frozen.flags.writeable = False
    as_tensor(frozen)[0, 0] = 5
    as_tensor(open_)[0, 0] = 5
    assert frozen[0, 0] == 1
    assert open_[0, 0] == 5


@pytest.mark.parametrize("collate", [collate_padded, collate_packed, collate_jagged])
def test_bad_batches_are_named(collate: Any) -> None:
    with pytest.raises(ValueError, match="empty list of rows"):
        collate([])
    rows = make_rows([2, 3])
    del rows[1].features["loudness"]
    with pytest.raises(ValueError, match=r"clip/0\.wav.*loudness.*clip/1\.wav"):
        collate(rows)


def test_multiple_of_must_be_positive() -> None:
    with pytest.raises(ValueError, match="multiple_of must be at least 1 frame, got 0"):
        collate_padded(make_rows([2]), multiple_of=0)


def ragged_stream(*sizes: int) -> Any:
    return SimpleNamespace(name="modulation", channel_offsets=(0, *np.cumsum(sizes).tolist()))


@pytest.mark.parametrize("name", [*COLLATES])
def test_rows_of_other_widths_are_refused_and_not_spread(name: str) -> None:
    rows = [AnyRow(i, f"{i}", {"m": np.ones((3, width))}) for i, width in enumerate((4, 1))]
    with pytest.raises(ValueError, match="as many columns: expected 4, got 1"):
        COLLATES[name](rows)


@pytest.mark.parametrize("as_torch", [False, True], ids=["array", "tensor"])
def test_per_channel_cuts_columns_and_turns_time_last(as_torch: bool) -> None:
    features: Any = np.arange(4 * 6, dtype=np.float32).reshape(4, 6)
    if as_torch:
        features = torch.from_numpy(features)
    channels = per_channel(features, ragged_stream(1, 3, 2))
    assert [tuple(c.shape) for c in channels] == [(1, 4), (3, 4), (2, 4)]
    # Column 3 of frame 2 is channel 1, modulation filter 2.
    assert channels[1][2][2] == features[2][3]
    rebuilt = np.concatenate([np.asarray(c) for c in channels]).T
    np.testing.assert_array_equal(rebuilt, np.asarray(features))


def test_per_channel_of_a_padded_batch_equals_that_of_its_rows() -> None:
    rows = make_rows([3, 5])
    stream = ragged_stream(2, 3)
    padded = per_channel(collate_padded(rows).features["modulation"].values, stream)
    for b, row in enumerate(rows):
        for channel, wanted in zip(
            padded, per_channel(row.features["modulation"], stream), strict=True
        ):
            np.testing.assert_array_equal(channel[b, :, : wanted.shape[1]].numpy(), wanted)


def test_per_channel_refuses_another_width() -> None:
    with pytest.raises(ValueError, match=r"'modulation' has 6 columns.*got \(4, 5\)"):
        per_channel(np.zeros((4, 5)), ragged_stream(1, 5))
