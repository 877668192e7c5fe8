"""Rows of different lengths as one batch: padded, packed or jagged; and the view by channel. Each
is a `collate_fn` of a DataLoader; bind options with `functools.partial`. Events are collated as
dense counts (step, neuron) in float32, which is exact up to 2^24."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.formats.block_cache import FrameView
from earmill.pipeline.loader.epoch_order import check_number, check_whole
from earmill.pipeline.loader.rows import Described, Row, short, values_text

Array = TypeVar("Array", np.ndarray, torch.Tensor)
Part = torch.Tensor | FrameView  # Frames of a row.
# Returns memory of this shape and dtype, or None if there is no room.
Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Padded:
    """One stream of a batch, padded to the longest row.

    Args:
        values: (B, T, width).
        lengths: (B,) int64, valid frames of each row.
    """

    values: torch.Tensor
    lengths: torch.Tensor

    @property
    def mask(self) -> torch.Tensor:
        """(B, T) bool, True on valid frames."""
        frames = torch.arange(self.values.shape[1], device=self.lengths.device)
        return frames < self.lengths[:, None]

    def unpad(self) -> list[torch.Tensor]:
        """Return the rows as views of (n_frames, width)."""
        return [row[:n] for row, n in zip(self.values, self.lengths.tolist(), strict=True)]

    def map(self, f: Callable[[torch.Tensor], torch.Tensor]) -> Padded:
        """Return the stream with `f` applied to each tensor."""
        return Padded(f(self.values), f(self.lengths))


@dataclass(frozen=True, slots=True)
class Packed:
    """One stream of a batch, rows end to end without padding.

    Args:
        values: (sum of lengths, width).
        offsets: (B + 1,) int64; row b is `values[offsets[b]:offsets[b + 1]]`.
    """

    values: torch.Tensor
    offsets: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor:
        """(B,) int64."""
        return self.offsets.diff()

    def unpack(self) -> list[torch.Tensor]:
        """Return the rows as views of (n_frames, width)."""
        return list(torch.split(self.values, self.lengths.tolist()))

    def map(self, f: Callable[[torch.Tensor], torch.Tensor]) -> Packed:
        """Return the stream with `f` applied to each tensor."""
        return Packed(f(self.values), f(self.offsets))


@dataclass(frozen=True, slots=True, repr=False)
class Batch(Described):
    """A collated batch; `len(batch)` is its number of rows.

    DataLoaders, accelerate and Lightning call `to` and `pin_memory`.

    Args:
        row_ids: Row ids.
        indices: (B,) int64, positions in the dataset.
        seconds: (B,) float64, clip lengths.
        extra: Columns of the source by name: a tensor (B,) of int64, float64 or bool, or a list of
            other values.
        features: `Padded`, `Packed` or a jagged nested tensor for each stream.
        start_s: (B,) float64, begin of the features in their clips; 0 except in crops.
        sets: (B,) int64, number of the set of each row; 0 if there is one set.
        label: The label column of the dataset, as losses take it: (B,) int64 of whole numbers,
            float32 of other numbers, a list of texts; None without a label.
    """

    row_ids: tuple[str, ...]
    indices: torch.Tensor
    seconds: torch.Tensor
    extra: Mapping[str, torch.Tensor | list[Any]]
    features: Mapping[str, Any]
    start_s: torch.Tensor
    sets: torch.Tensor
    label: torch.Tensor | list[Any] | None = None

    @property
    def padding_share(self) -> float:
        """The share of padding in the values of padded streams, from 0 to 1."""
        padded = [value for value in self.features.values() if isinstance(value, Padded)]
        held = sum(value.values.numel() for value in padded)
        real = sum(int(value.lengths.sum()) * value.values.shape[-1] for value in padded)
        return 1.0 - real / held if held else 0.0

    def __len__(self) -> int:
        return len(self.row_ids)

    def texts(self) -> tuple[str, str, Mapping[str, str], str, Mapping[str, str]]:
        return (
            f"Batch of {len(self)} rows",
            "",
            {name: _stream_text(value) for name, value in self.features.items()},
            "" if self.label is None else _column_text(self.label),
            {name: _column_text(value) for name, value in self.extra.items()},
        )

    def to(self, *args: Any, **kwargs: Any) -> Batch:
        """Return the batch with `Tensor.to` applied to its tensors.

        A dtype applies to features and to floating-point labels. Lengths, offsets, seconds and
        whole numbers keep their dtype.
        """
        typed = torch.dtype | torch.Tensor
        options = [*args, *kwargs.values()]
        place = [each for each in args if not isinstance(each, typed)]
        place += [each.device for each in options if isinstance(each, torch.Tensor)]
        placed = {name: each for name, each in kwargs.items() if not isinstance(each, typed)}

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(*place, **placed)

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(*args, **kwargs) if tensor.is_floating_point() else moved(tensor)

        return self._map(moved, cast)

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory; DataLoaders with `pin_memory=True` call this."""
        pin = torch.Tensor.pin_memory
        return self._map(pin, pin)

    def _map(
        self, f: Callable[[torch.Tensor], torch.Tensor], g: Callable[[torch.Tensor], torch.Tensor]
    ) -> Batch:
        """Return the batch with `g` applied to features and label, and `f` to other tensors."""
        features = {
            name: g(value) if isinstance(value, torch.Tensor) else value.map(g)
            for name, value in self.features.items()
        }
        extra = {k: f(v) if isinstance(v, torch.Tensor) else v for k, v in self.extra.items()}
        label = g(self.label) if isinstance(self.label, torch.Tensor) else self.label
        return replace(
            self,
            indices=f(self.indices),
            seconds=f(self.seconds),
            extra=extra,
            features=features,
            start_s=f(self.start_s),
            sets=f(self.sets),
            label=label,
        )


# Registered as pytrees, batches can be arguments under torch.compile, torch.export and torch.func.
for _kind in (Padded, Packed, Batch):
    torch.export.register_dataclass(_kind)


def _stream_text(value: Any) -> str:
    if not isinstance(value, Padded | Packed):
        return f"jagged {values_text(value)}"
    return f"{'packed ' * isinstance(value, Packed)}{values_text(value.values)}"


def _column_text(values: torch.Tensor | list[Any]) -> str:
    if isinstance(values, torch.Tensor):
        return values_text(values)
    return short(f"list of {len(values)}: {values[:3]}")


def _empty(shape: Sequence[int], like: Part, allocate: Allocate | None) -> torch.Tensor:
    """Return memory of a shape, in the dtype of the frames of a row."""
    dtype: Any = like.dtype
    if not isinstance(dtype, torch.dtype):
        dtype = torch.from_numpy(np.empty(0, dtype)).dtype
    found = None if allocate is None else allocate(shape, dtype)
    return torch.empty(tuple(shape), dtype=dtype) if found is None else found


def as_tensor(features: Any) -> torch.Tensor:
    """Return a tensor of the same dtype; it shares a writable array and copies a read-only one.
    Events (objects with `dense()`) become counts in float32."""
    if is_sparse(features):
        return torch.from_numpy(features.dense().astype(np.float32))
    if isinstance(features, torch.Tensor):
        return features
    if not features.flags.writeable or not features.dtype.isnative:
        features = features.astype(features.dtype.newbyteorder("="))
    return torch.from_numpy(features)


def is_sparse(features: Any) -> bool:
    """Return True for events; `SpikeEvents` is not imported."""
    return hasattr(features, "dense")


def collate_padded(
    rows: Sequence[Row],
    *,
    pad_value: float = 0.0,
    multiple_of: int = 1,
    allocate: Allocate | None = None,
) -> Batch:
    """Pad rows to (B, T, width) with lengths; `batch.features[stream].mask` marks valid frames.

    Args:
        rows: At least one, all with the same streams.
        pad_value: Fills the frames past a row's end.
        multiple_of: T is rounded up to a multiple of it, because compiled models recompile for
            every new T.
        allocate: Gives the memory of a tensor, by shape and dtype, or None; None takes new memory.
    """
    if check_whole("multiple_of", multiple_of) < 1:
        raise ValueError(f"multiple_of must be at least 1 frame, got {multiple_of}")
    check_number("pad_value", pad_value)

    def pad(parts: list[Part], lengths: torch.Tensor) -> Padded:
        n_frames = -(-int(lengths.max()) // multiple_of) * multiple_of
        values = _empty((len(parts), n_frames, parts[0].shape[1]), parts[0], allocate)
        for row, part in zip(values, parts, strict=True):
            _copy(part, row[: len(part)])
            row[len(part) :] = pad_value
        return Padded(values, lengths)

    return _collate(rows, pad)


def collate_packed(rows: Sequence[Row], *, allocate: Allocate | None = None) -> Batch:
    """Join rows end to end: (sum of lengths, width) with int64 offsets (B + 1,); `allocate` as for
    `collate_padded`."""
    return _collate(
        rows, lambda parts, lengths: Packed(_joined(parts, allocate), _offsets(lengths))
    )


def collate_jagged(rows: Sequence[Row], *, allocate: Allocate | None = None) -> Batch:
    """Join rows to `torch.nested` tensors of layout `torch.jagged`, shape (B, ragged, width);
    `allocate` as for `collate_padded`."""

    def nest(parts: list[Part], lengths: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor_from_jagged(
            _joined(parts, allocate),
            _offsets(lengths),
            min_seqlen=int(lengths.min()),
            max_seqlen=int(lengths.max()),
        )

    return _collate(rows, nest)


def per_channel(features: Array, stream: StreamInfo) -> list[Array]:
    """Split features into their frequency channels.

    Args:
        features: (..., frames, width) of this stream; array or tensor, of events their counts.
        stream: Its description; `channel_offsets` says which columns belong to which channel.
    Returns:
        One view of (..., M_i, frames) per channel, in the order of `stream.fc_hz`.
    """
    offsets = stream.channel_offsets
    if features.ndim < 2 or features.shape[-1] != offsets[-1]:
        raise ValueError(
            f"stream {stream.name!r} has {offsets[-1]} columns, expected (frames, {offsets[-1]}), "
            f"got {tuple(features.shape)}; pass one stream's features, frames first"
        )
    return [features[..., first:last].swapaxes(-1, -2) for first, last in pairwise(offsets)]


def takes_views(collate_fn: Callable[..., Any]) -> bool:
    """Return True for a collate of this module, also with bound options: it copies `FrameView`."""
    made = collate_fn.func if isinstance(collate_fn, partial) else collate_fn
    return made in (collate_padded, collate_packed, collate_jagged)


def _joined(parts: list[Part], allocate: Allocate | None) -> torch.Tensor:
    found = _empty((sum(map(len, parts)), parts[0].shape[1]), parts[0], allocate)
    at = 0
    for part in parts:
        _copy(part, found[at : at + len(part)])
        at += len(part)
    return found


def _copy(part: Part, into: torch.Tensor) -> None:
    if tuple(part.shape) != tuple(into.shape):
        raise ValueError(
            f"all rows of a batch need as many columns: expected {into.shape[1]}, got "
            f"{part.shape[1]}"
        )
    if isinstance(part, torch.Tensor):
        into.copy_(part)
    else:
        part.fill(into.numpy())


def _column(values: Sequence[Any]) -> torch.Tensor | list[Any]:
    """Return a column of some rows: an exact tensor of numbers, or a list."""
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        return torch.tensor(values, dtype=torch.bool)
    if kinds == {int} and all(-(2**63) <= value < 2**63 for value in values):
        return torch.tensor(values, dtype=torch.int64)
    if kinds == {float}:
        return torch.tensor(values, dtype=torch.float64)
    return list(values)


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _collate(rows: Sequence[Row], join: Callable[[list[Part], torch.Tensor], Any]) -> Batch:
    """Collate rows; `join` makes the features of a stream from its parts and their lengths."""
    if not rows:
        raise ValueError("cannot collate an empty list of rows; give at least one")
    if any(isinstance(row, Batch) for row in rows):
        raise TypeError(
            "expected rows, got batches, as a stream with batch_size= or a budget gives them; "
            "DataLoader(stream, batch_size=None) hands them on, or leave batch_size= out of the "
            "stream"
        )
    names = list(rows[0].features)
    for row in rows:
        if set(row.features) != set(names):
            raise ValueError(
                f"all rows of a batch need the same streams: row {rows[0].row_id!r} has "
                f"{sorted(names)}, row {row.row_id!r} has {sorted(row.features)}"
            )
    features = {}
    for name in names:
        values = [row.features[name] for row in rows]
        parts = [each if isinstance(each, FrameView) else as_tensor(each) for each in values]
        features[name] = join(parts, torch.tensor([*map(len, parts)], dtype=torch.int64))
    # Rows of a caller's own class may lack the fields with defaults.
    labels = [getattr(row, "label", None) for row in rows]
    label = None if labels[0] is None else _column(labels)
    if isinstance(label, torch.Tensor):
        label = label.to(torch.float32 if label.is_floating_point() else torch.int64)
    columns = dict.fromkeys(name for row in rows for name in row.extra)
    return Batch(
        row_ids=tuple(row.row_id for row in rows),
        indices=torch.tensor([row.index for row in rows], dtype=torch.int64),
        seconds=torch.tensor([row.seconds for row in rows], dtype=torch.float64),
        extra={name: _column([row.extra.get(name) for row in rows]) for name in columns},
        features=features,
        start_s=torch.tensor([getattr(row, "start_s", 0.0) for row in rows], dtype=torch.float64),
        sets=torch.tensor([getattr(row, "set", 0) for row in rows], dtype=torch.int64),
        label=label,
    )
