"""Conformance tests of a format of data files."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from amtcore.features.spike_events import SpikeEvents
from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.dataset.description import DatasetFile, open_dataset
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.publish import publish_shard
from earmill.pipeline.dataset.snapshot import described
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.formats.block_cache import BlockCache, FrameSpan, IoCounts
from earmill.pipeline.formats.digest import differences, digest_rows
from earmill.pipeline.formats.format import (
    BINARY,
    Encoding,
    Format,
    Promise,
    explain_damage,
    format_of,
)
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.planning.plan import plan_of
from earmill.pipeline.planning.shards import Shard
from earmill.pipeline.reader.open import open_features
from earmill.pipeline.sources.base import Item
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import data_path

SHARD, ATTEMPT = "00000", "0000000a"
# Row ids, some of which cannot be file names, and the frames of each row.
ROWS = {
    "speech/a.wav": 300,
    "../up.flac": 0,
    "z.tar/utt.1": 17,
    "ü #%&?=\\.wav": 1,
    "x" * 300: 41,
    "silent": 200,
}
FLIPS = 60
ENVELOPE = StreamInfo(
    name="envelope",
    model="dau1997",
    unit="model units",
    width=6,
    frame_rate_hz=100.0,
    pool="mean",
    axes=("time", "channel"),
    channel_offsets=(0, 2, 4, 6),
    fc_hz=(100.0, 200.0, 300.0),
    mfc_hz=(),
)
SPIKES = replace(ENVELOPE, name="spikes", unit="spikes", frame_rate_hz=200.0, layout="events")
STREAMS = (ENVELOPE, SPIKES)


@dataclass(frozen=True)
class Written:
    """A shard that the format wrote."""

    format: Format
    layout: Layout
    rel: str  # Path of the shard in the layout.
    rows: Sequence[FeatureRow]
    dtype: str
    promise: Promise  # Facts of a commit about the shard.

    @property
    def path(self) -> Path:
        return Path(self.layout.path(self.rel))

    @property
    def files(self) -> list[Path]:
        return [Path(self.layout.path(name)) for name in self.promise.files]

    def whole(self) -> list[tuple[str, FrameSpan]]:
        """Return every row of every stream."""
        found = []
        for info in STREAMS:
            start = 0
            for number, row in enumerate(self.rows):
                count = len(row.streams[info.name])
                found.append((info.name, FrameSpan(row.row_id, number, start, 0, count)))
                start += count
        return found

    def read(self, wanted: Sequence[tuple[str, FrameSpan]]) -> list[np.ndarray]:
        """Read frames as a reader of the dataset does; CommitError for damage."""
        cache = BlockCache(1000, IoCounts())
        with (
            explain_damage("row", self.rel),
            closing(self.format.open(self.layout, self.rel, self.promise, cache)) as reader,
        ):
            return [reader.read(stream, span) for stream, span in wanted]


class FormatConformance:
    """Subclass it as `TestMine` and set `format`.

    Attributes:
        format: Registered name of the format.
    """

    format: ClassVar[str]

    @pytest.fixture(params=["float16", "float32"])
    def written(self, request: pytest.FixtureRequest, tmp_path: Path) -> Written:
        """Write a shard of frames and events."""
        return self.write(tmp_path / "one", sample_rows(request.param), request.param)

    def write(self, root: Path, rows: Sequence[FeatureRow], dtype: str) -> Written:
        """Write a shard of these rows with the format."""
        fmt = format_of(self.format)
        rel = data_path(SHARD, ATTEMPT, fmt.suffix)
        path = root / rel
        path.parent.mkdir(parents=True, exist_ok=True)
        fmt.write(path, rows, STREAMS, Encoding(dtype, attrs={"spec_sha256": "ab" * 32}))
        parts = [part for part in (path, *sorted(path.rglob("*"))) if part.is_file()]
        files = [described(part.relative_to(root).as_posix(), part.read_bytes()) for part in parts]
        layouts = {info.name: fmt.layout_of(info) for info in STREAMS}
        promise = Promise(
            rows=len(rows),
            frames={name: sum(len(row.streams[name]) for row in rows) for name in layouts},
            columns={k: (v.stored_width, v.stored_dtype(dtype)) for k, v in layouts.items()},
            files={file.path: file for file in files},
        )
        return Written(fmt, Layout.open(root), rel, rows, dtype, promise)

    def test_what_is_read_back_is_what_was_written(self, written: Written) -> None:
        wanted = digest_rows(written.rows, STREAMS, written.dtype)
        found = written.format.digest(written.path, STREAMS)
        assert differences(wanted, found) == []

    def test_every_row_is_read_at_random(self, written: Written) -> None:
        wanted = written.whole()
        order = np.random.default_rng(1).permutation(len(wanted))
        shuffled = [wanted[number] for number in order]
        cut = [(stream, _part(span, 3)) for stream, span in shuffled]
        empty = [(stream, _part(span, 10**9)) for stream, span in shuffled]
        asked = [*shuffled, *cut, *empty]
        rows = {row.row_id: row for row in written.rows}
        found = written.read(asked)
        for (stream, span), frames in zip(asked, found, strict=True):
            expected = rows[span.row_id].streams[stream][span.first : span.last]
            assert frames.dtype == expected.dtype and frames.shape == expected.shape
            np.testing.assert_array_equal(frames, expected)
            assert frames.flags.writeable or not frames.size, "read: expected a fresh array"

    def test_equal_rows_give_equal_bytes(self, written: Written, tmp_path: Path) -> None:
        again = self.write(tmp_path / "two", written.rows, written.dtype)
        assert written.promise.files == again.promise.files

    def test_a_shard_without_rows(self, tmp_path: Path) -> None:
        written = self.write(tmp_path / "none", [], "float16")
        wanted = digest_rows([], STREAMS, "float16")
        found = written.format.digest(written.path, STREAMS)
        assert differences(wanted, found) == []
        assert written.read([]) == []

    def test_the_files_are_as_many_as_was_said(self, written: Written) -> None:
        said = written.format.objects(written.promise.frames, STREAMS, written.dtype)
        assert said == len(written.files)

    def test_an_index_of_another_file_is_refused(self, written: Written) -> None:
        stream, span = written.whole()[0]
        for wrong in (
            FrameSpan("other", span.row, span.start, 0, span.last),
            FrameSpan(span.row_id, span.row + 1, span.start, 0, 0),
            FrameSpan(span.row_id, len(written.rows) + 5, span.start, 0, 1),
            FrameSpan(span.row_id, span.row, span.start, 0, 10**6),
        ):
            with pytest.raises(CommitError):
                written.read([(stream, wrong)])

    def test_a_changed_byte_is_found_or_harmless(self, written: Written) -> None:
        """A reader gets the right values or an error, whichever byte has changed."""
        wanted = written.whole()
        expected = written.read(wanted)
        places = [(path, at) for path in written.files for at in range(path.stat().st_size)]
        chosen = np.random.default_rng(2).choice(len(places), FLIPS, replace=False)
        found = 0
        for path, at in (places[number] for number in chosen):
            content = path.read_bytes()
            path.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
            try:
                for values, right in zip(written.read(wanted), expected, strict=True):
                    np.testing.assert_array_equal(values, right)
            except CommitError:
                found += 1
            path.write_bytes(content)
        assert found > FLIPS // 4, "most bytes of a shard are values: a change of one must show"

    def test_a_cut_off_shard_is_found(self, written: Written) -> None:
        largest = max(written.files, key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
        with pytest.raises(CommitError):
            written.read(written.whole())

    def test_a_dataset_of_it_is_whole_and_readable(self, tmp_path: Path) -> None:
        rows = sample_rows("float16")
        layout = _dataset(tmp_path / "set", self.format, rows)
        report = verify(layout)
        assert report.problems == [] and report.orphans == []
        features = open_features(layout.root, format=self.format)
        assert [row.row_id for row in features] == [*ROWS]
        for row in rows:
            got = features.by_id(row.row_id)
            np.testing.assert_array_equal(got.features["envelope"], row.streams["envelope"])
            spikes = got.features["spikes"]
            np.testing.assert_array_equal(spikes.to_columns(), row.streams["spikes"])
        card = (tmp_path / "set" / "README.md").read_text()
        fmt = format_of(self.format)
        for line in fmt.reading([data_path(SHARD, ATTEMPT, fmt.suffix)]):
            assert line in card


def _part(span: FrameSpan, first: int) -> FrameSpan:
    first = min(first, span.last)
    return FrameSpan(span.row_id, span.row, span.start, first, max(first, span.last - 2))


def sample_rows(dtype: str) -> list[FeatureRow]:
    """Return rows of frames and events. Values follow from the ids of rows; -0.0 and subnormals are
    among them."""
    rows = []
    for row_id, frames in ROWS.items():
        rng = np.random.default_rng([*row_id.encode()[:50]])
        values = rng.normal(0, 50, (frames, ENVELOPE.width)).astype(dtype)
        values[:1, :2] = [-0.0, np.finfo(dtype).smallest_subnormal]
        drawn = rng.poisson(0.0 if row_id == "silent" else 0.3, (2 * frames, SPIKES.width))
        spikes = SpikeEvents.from_dense(drawn.astype(np.int32)).to_columns()
        row = FeatureRow(
            row_id=row_id,
            plan_row_id=row_id,
            channel=-1,
            seconds=frames / 100,
            facts={"uri": f"corpus/{row_id}", "rate_hz": 16000.0, "pcm_sha256": "cd" * 32},
            extra={"speaker": f"s{frames}", "take": frames, "note": None},
            streams={"envelope": values, "spikes": spikes},
            steps={"spikes": 2 * frames},
        )
        rows.append(row)
    return rows


def _dataset(root: Path, fmt: str, rows: Sequence[FeatureRow]) -> Layout:
    """Write a closed dataset of one shard."""
    layout = Layout.open(root)
    spec = JobSpec.load(
        {
            "source": {"kind": "files", "uri": "corpus"},
            "extract": [{"model": "dau1997"}],
            "output": {"uri": str(root), "formats": [fmt]},
        }
    )
    items = tuple(Item(row.row_id, f"corpus/{row.row_id}", seconds=1.0) for row in rows)
    plan = plan_of([Shard(SHARD, items)], spec.sha256())
    dataset = DatasetFile(
        name="conformance",
        spec=spec.canonical(),
        spec_sha256=spec.sha256(),
        plan_id=plan.plan_id,
        streams=tuple(info.to_dict() for info in STREAMS),
        buffers_sha256={},
        provenance={},
        parquet_form=BINARY,
        created="2026-01-01T00:00:00+00:00",
    )
    open_dataset(layout, dataset)
    plan.write(layout)
    assert publish_shard(
        layout,
        dataset,
        shard_id=SHARD,
        attempt=ATTEMPT,
        rows=rows,
        bad=[],
        info={},
        plan_rows=[row.row_id for row in rows],
    )
    finalise(layout)
    return layout
