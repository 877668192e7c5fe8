"""What is read around a span, and which of the frames that are made of it are its own."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from amtcore.features.spike_events import SpikeEvents
from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.audio.decode import BlockReader
from earmill.pipeline.audio.decoder_pool import DecoderPool
from earmill.pipeline.common.errors import (
    TooLongError,
    TruncatedError,
)
from earmill.pipeline.sources import Item
from earmill.pipeline.worker.prepare import FrameTrim, SpanContext, span_context
from tests.pipeline import audio_factory
from tests.pipeline.outputs import stream
from tests.pipeline.whole_clips import decode


@pytest.mark.parametrize("kind", ["wav", "flac", "ogg"])
@pytest.mark.parametrize("span", [(0.0, 3.0), (3.0, 5.0), (5.0, None), (4.0, 7.5)])
def test_blocks_hold_the_margins_and_facts_do_not(
    kind: str, span: tuple[float, float | None]
) -> None:
    data, margins = audio_factory.clip(kind, 8.0, seed=3), (2, 1)
    whole = decode(io.BytesIO(data), uri="x")
    alone = decode(io.BytesIO(data), uri="x", start_s=span[0], end_s=span[1])
    options: dict[str, Any] = {"start_s": span[0], "end_s": span[1], "margins_s": margins}
    with BlockReader(io.BytesIO(data), uri="x", block_frames=5000, **options) as reader:
        got = np.concatenate(list(reader), axis=1)
        assert reader.facts == alone.facts
    rate = whole.facts.rate_hz
    begin = max(0, round((span[0] - 2) * rate))
    stop = None if span[1] is None else round((span[1] + 1) * rate)
    np.testing.assert_array_equal(got, whole.waveform[:, begin:stop])


def test_a_child_reads_the_same_margins() -> None:
    data, children = audio_factory.clip("flac", 8.0, seed=3), DecoderPool()
    spec = {"uri": "x", "start_s": 3.0, "end_s": 5.0, "channels": "mean", "margins_s": (2, 1)}
    try:
        from earmill.pipeline.audio.decode import Limits

        with BlockReader(io.BytesIO(data), **spec) as here:  # type: ignore[arg-type]
            wanted = np.concatenate(list(here), axis=1)
        with children.open(io.BytesIO(data), limits=Limits(), **spec) as there:  # type: ignore[arg-type]
            np.testing.assert_array_equal(np.concatenate(list(there), axis=1), wanted)
            assert there.facts == here.facts
    finally:
        children.close()


def test_a_file_that_is_cut_within_the_margin_is_found() -> None:
    data = audio_factory.clip("flac", 8.0, seed=3)
    cut = io.BytesIO(data[: int(len(data) * 0.66)])
    with (
        pytest.raises(TruncatedError),
        BlockReader(cut, uri="x", start_s=3.0, end_s=5.0, margins_s=(2, 1)) as reader,
    ):
        list(reader)


def test_the_longest_row_is_that_without_margins() -> None:
    from earmill.pipeline.audio.decode import Limits

    data = audio_factory.clip("wav", 8.0, seed=3)
    for most, fits in ((2.0, True), (1.9, False)):
        options: dict[str, Any] = {"start_s": 3.0, "end_s": 5.0, "margins_s": (2, 1)}
        try:
            limits = Limits(max_seconds=most)
            with BlockReader(io.BytesIO(data), uri="x", limits=limits, **options) as reader:
                assert sum(block.shape[1] for block in reader) == 5 * 22050 and fits
        except TooLongError:
            assert not fits


@pytest.mark.parametrize(
    ("item", "wanted"),
    [
        (Item("x", "x.wav"), None),
        (Item("x", "x.wav", start_s=20.0, end_s=30.0), None),
        (Item("x", "x", start_s=0.0, end_s=10.0, part_of=(0.0, None)), SpanContext(0, 1, 10)),
        (Item("x", "x", start_s=5.0, end_s=15.0, part_of=(2.0, None)), SpanContext(3, 1, 10)),
        (Item("x", "x", start_s=20.0, end_s=30.0, part_of=(0.0, 99.5)), SpanContext(12, 1, 10)),
        (Item("x", "x", start_s=90.0, end_s=99.5, part_of=(0.0, 99.5)), SpanContext(12)),
        (Item("x", "x", start_s=90.0, part_of=(0.0, None)), SpanContext(12)),
    ],
    ids=["whole", "span of a table", "first", "second", "later", "last, its end given", "last"],
)
def test_what_is_read_around_a_row(item: Item, wanted: SpanContext | None) -> None:
    assert span_context(item, 12) == wanted


@pytest.mark.parametrize("step", [1, 7, 100, 1000])
@pytest.mark.parametrize("margins", [SpanContext(3, 1, 4), SpanContext(0, 1, 4), SpanContext(3)])
def test_own_frames_are_picked_whatever_the_stretches(step: int, margins: SpanContext) -> None:
    infos: list[StreamInfo] = [stream(), stream("envelope", (1, 1), 50.0)]
    total_s = margins.lead_s + (margins.own_s or 4) + margins.tail_s
    rng, own = np.random.default_rng(0), FrameTrim(margins, infos)
    frames = rng.standard_normal((total_s * 100, infos[0].width))
    counts = rng.poisson(0.05, (total_s * 50, 2))
    got: dict[str, list[Any]] = {"modulation": [], "envelope": []}
    for at in range(0, len(frames), step):
        got["modulation"].append(own.take({"modulation": frames[at : at + step]})["modulation"])
    for at in range(0, len(counts), step):
        events = SpikeEvents.from_dense(counts[at : at + step], at)
        got["envelope"].append(own.take({"envelope": events})["envelope"])
    own.check()
    first, last = margins.lead_s, margins.lead_s + (margins.own_s or 4)
    np.testing.assert_array_equal(
        np.concatenate(got["modulation"]), frames[first * 100 : last * 100]
    )
    picked = SpikeEvents.concatenate(got["envelope"])
    assert picked.first_frame == 0
    np.testing.assert_array_equal(picked.dense(), counts[first * 50 : last * 50])


def test_a_model_that_looks_ahead_too_far_is_a_fault_not_a_short_row() -> None:
    own = FrameTrim(SpanContext(3, 1, 4), [stream()])
    own.take({"modulation": np.zeros((650, 8))})
    with pytest.raises(RuntimeError, match="expected 700 frames of a span"):
        own.check()
