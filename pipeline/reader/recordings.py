"""Recordings that a job has cut into spans, read as one row each.

Rows `<id>#span<k>of<n>` of a job with `audio.spans` are the spans of one recording. The frames of
the recording are the frames of its spans, one after the other. Any other row is a recording by
itself, and rows of two sets are two recordings.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any, SupportsIndex

import numpy as np

from earmill.pipeline.dataset.commit_record import CHANNEL
from earmill.pipeline.loader.rows import FeatureRows, Row
from earmill.pipeline.spec.spans import SPAN_ID

Name = tuple[int, str]  # Number of a set, and the id of a recording in it.


class Recordings:
    """The recordings of a feature set, in the order of their first rows. A sequence of `Row`.

    `Row.index` counts recordings. The columns of the source are taken from the first span.

    Args:
        features: A set from `open_features`: one place, several places, or with additions.

    Attributes:
        streams: Descriptions of the streams that are read, by name.
    Example:
        >>> import earmill
        >>> ds = earmill.open_features("features")  # doctest: +SKIP
        >>> day = earmill.Recordings(ds).by_id("day.flac")  # doctest: +SKIP
    """

    def __init__(self, features: FeatureRows) -> None:
        self._features, self.streams = features, features.streams
        rows, self._missing = _grouped(features)
        self._names, self._rows = list(rows), list(rows.values())
        self._ids = [row_id for _, row_id in rows]
        self._places: dict[str, list[int]] = {}
        for number, row_id in enumerate(self._ids):
            self._places.setdefault(row_id, []).append(number)
        self._seconds = features.table["seconds"].to_numpy()

    @cached_property
    def incomplete(self) -> dict[str, list[int]]:
        """Recordings that lack spans, and the numbers of the missing spans.

        A missing span is in quarantine or not computed yet. These recordings are left out of the
        sequence. A recording without any row is known only if it is in quarantine, which is read at
        the first access.
        """
        known = {*self._names, *self._missing}
        missing: dict[str, list[int]] = {}
        for (_, row_id), spans in (self._missing | _without_rows(self._features, known)).items():
            missing[row_id] = sorted({*missing.get(row_id, ()), *spans})
        return missing

    @property
    def row_ids(self) -> list[str]:
        """The ids of the recordings, in order."""
        return list(self._ids)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"Recordings({self._features!r}, recordings={len(self)})"

    def __getitem__(self, index: SupportsIndex) -> Row:
        """Return a recording by number; negative numbers count from the end."""
        number = self._position(index)
        return self._joined(number, [self._features[row] for row in self._rows[number]])

    def __iter__(self) -> Iterator[Row]:
        return (self[number] for number in range(len(self)))

    def seconds(self, index: SupportsIndex) -> float:
        """Return the duration of a recording in seconds, without reading it."""
        return self._ends_s(self._position(index))[-1]

    def by_id(self, row_id: str) -> Row:
        """Return a recording by its id.

        Raises:
            KeyError: No recording has the id, its spans are not complete, or several sets have it.
            TypeError: The id is not text.
        """
        return self[self.index_of(row_id)]

    def index_of(self, row_id: str) -> int:
        """Return the position of a recording; raises as `by_id`."""
        if not isinstance(row_id, str):
            raise TypeError(f"ids are text, got {row_id!r}; recordings by number are in brackets")
        places = self._places.get(row_id, [])
        if len(places) > 1:
            raise KeyError(f"expected one recording {row_id!r}, got {len(places)}, at {places}")
        if places:
            return places[0]
        if row_id in self.incomplete:
            missing = ", ".join(map(str, self.incomplete[row_id]))
            raise KeyError(
                f"expected all spans of {row_id!r}, got all but {missing}: they are in "
                "ds.quarantine, or not computed yet"
            )
        raise KeyError(f"no recording {row_id!r} among {len(self)}; ids are in `row_ids`")

    def slice(self, index: SupportsIndex, start_s: float, stop_s: float | None = None) -> Row:
        """Return the frames of a recording that overlap [start_s, stop_s); see `Features.slice`."""
        number = self._position(index)
        seconds = self.seconds(number)
        end_s = seconds if stop_s is None else min(stop_s, seconds)
        if not 0 <= start_s < seconds or not end_s > start_s:
            raise ValueError(
                f"expected 0 <= start_s < stop_s inside the recording of {seconds:g} s "
                f"({self._ids[number]!r}), got {start_s} to {stop_s}"
            )
        ends_s = self._ends_s(number)
        spans = zip(self._rows[number], [0.0, *ends_s[:-1]], ends_s, strict=True)
        overlapping = [span for span in spans if span[2] > start_s and span[1] < end_s]
        parts = [
            self._features.slice(row, max(0.0, start_s - begin_s), min(end_s, last_s) - begin_s)
            for row, begin_s, last_s in overlapping
        ]
        # A span begins at a whole frame.
        first_s = overlapping[0][1]
        before = {k: round(first_s * info.frame_rate_hz) for k, info in self.streams.items()}
        whole = self._joined(number, parts)
        return replace(
            whole,
            features={k: _moved(values, before[k]) for k, values in whole.features.items()},
            first_frame={name: before[name] + at for name, at in parts[0].first_frame.items()},
            start_s=float(start_s),
        )

    def _ends_s(self, number: int) -> list[float]:
        """Return the end of each span of a recording, s."""
        return list(accumulate(float(self._seconds[row]) for row in self._rows[number]))

    def _joined(self, number: int, rows: Sequence[Row]) -> Row:
        return replace(
            rows[0],
            index=number,
            row_id=self._ids[number],
            seconds=self.seconds(number),
            features={name: _end_to_end([r.features[name] for r in rows]) for name in self.streams},
        )

    def _position(self, index: SupportsIndex) -> int:
        if isinstance(index, str):
            raise TypeError(f"recordings are numbered from 0, got {index!r}; use by_id for ids")
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"recording {number} of {len(self)}")
        return number % len(self)


def _grouped(features: FeatureRows) -> tuple[dict[Name, list[int]], dict[Name, list[int]]]:
    """Return the rows of each complete recording, and the missing spans of all others."""
    has_spans = [_has_spans(each) for each in _sets_of(features)]
    table = features.table
    ids, planned = (table.column(name).to_pylist() for name in ("row_id", "plan_row_id"))
    # Sets end to end have numbers. The first of sets side by side names the rows.
    numbers = table.column("set").to_pylist() if "set" in table.column_names else [0] * len(ids)
    spans: dict[Name, dict[int, int]] = {}
    counts: dict[Name, int] = {}
    for row, (row_id, plan_row_id, number) in enumerate(zip(ids, planned, numbers, strict=True)):
        match = SPAN_ID.fullmatch(plan_row_id) if has_spans[number] else None
        name, span, count = row_id, 1, 1
        if match is not None:
            channel = row_id.removeprefix(plan_row_id)  # `#ch0` where channels are rows
            name, span, count = match[1] + channel, int(match[2]), int(match[3])
        spans.setdefault((number, name), {})[span] = row
        counts[number, name] = count
    rows: dict[Name, list[int]] = {}
    missing: dict[Name, list[int]] = {}
    for recording, by_span in spans.items():
        absent = [span for span in range(1, counts[recording] + 1) if span not in by_span]
        if absent:
            missing[recording] = absent
        else:
            rows[recording] = [by_span[span] for span in sorted(by_span)]
    return rows, missing


def _without_rows(features: FeatureRows, known: Collection[Name]) -> dict[Name, list[int]]:
    """Return the recordings that only quarantine knows, and the numbers of their spans."""
    sets_have_numbers = "set" in features.table.column_names
    recordings = {*known, *((number, CHANNEL.sub("", name)) for number, name in known)}
    unknown: dict[Name, list[int]] = {}
    for place, each in enumerate(_sets_of(features)):
        if not _has_spans(each):
            continue
        number = place if sets_have_numbers else 0
        for row_id in each.quarantine.column("row_id").to_pylist():
            channel = CHANNEL.search(row_id)
            match = SPAN_ID.fullmatch(CHANNEL.sub("", row_id))
            if match is None:
                continue
            name = match[1] + (channel[0] if channel else "")
            # A row that failed before its channels were split is missing in each known channel.
            if (number, name) not in (known if channel else recordings):
                unknown[number, name] = list(range(1, int(match[3]) + 1))
    return unknown


def _sets_of(features: FeatureRows) -> Sequence[Any]:
    return getattr(features, "sets", (features,))


def _has_spans(features: Any) -> bool:
    return bool(features.dataset.spec.get("audio", {}).get("spans"))


def _end_to_end(parts: Sequence[Any]) -> Any:
    """Concatenate frames or events of consecutive spans; steps count from the first span."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts) if len(parts) > 1 else parts[0]
    at, placed = parts[0].first_frame, []
    for part in parts:
        placed.append(_moved(part, at - part.first_frame))
        at += part.n_frames
    return type(parts[0]).concatenate(placed)


def _moved(values: Any, steps: int) -> Any:
    """Return events shifted by `steps`; frames hold no positions and stay."""
    if isinstance(values, np.ndarray):
        return values
    return replace(values, frame=values.frame + steps, first_frame=values.first_frame + steps)
