"""Spans of a recording: seconds in, frames out, checked against what the file holds.

One function turns seconds into samples for the whole project, and one gives the samples of a clip
at another rate. A file whose header does not say how
long it is gives an open end; reading then decides.
"""

from __future__ import annotations

import math
from fractions import Fraction

from earmill.pipeline.common.errors import SpanError

TimeSpan = tuple[float | None, float | None]

# Manifests round to hundredths of a second; an end this far behind the file's end means the end,
# where a job does not say another `audio.span_tolerance_s`.
END_SLACK_S = 0.01


def seconds_to_frames(seconds: float, rate_hz: float) -> int:
    """The sample nearest to a time, halves up. Spans that share a time share no sample."""
    return math.floor(seconds * rate_hz + 0.5)


def resampled_length(n_samples: int, from_hz: float, to_hz: float) -> int:
    """Samples after resampling: n * to / from, rounded to nearest, halves down.

    Exact rational arithmetic: a duration never depends on float rounding, and chunked and whole
    agree for any length.
    """
    exact = Fraction(n_samples) * Fraction(to_hz) / Fraction(from_hz)
    # ceil(x - 1/2) with integers only.
    return -((exact.denominator - 2 * exact.numerator) // (2 * exact.denominator))


def frame_span(
    span: TimeSpan, rate_hz: float, declared: int | None, tolerance_s: float = END_SLACK_S
) -> tuple[int, int | None]:
    """First frame and the frame behind the last; SpanError where they select nothing of the file.

    Args:
        span: Start and end in seconds; None is the beginning, the end.
        rate_hz: Sample rate of the file.
        declared: Frames of the file, None if its header does not say.
        tolerance_s: An end so much behind the file's end means the end.
    """
    if span == (None, None):
        return 0, declared
    _check_order(span)
    start = seconds_to_frames(span[0] or 0.0, rate_hz)
    stop = None if span[1] is None else seconds_to_frames(span[1], rate_hz)
    if declared is None:
        return start, stop
    slack = seconds_to_frames(tolerance_s, rate_hz)
    if start >= declared or (stop is not None and stop > declared + slack):
        raise ends_before(span, declared, rate_hz, tolerance_s)
    stop = declared if stop is None else min(stop, declared)
    if start >= stop:
        raise _error(span, "expected at least one sample between them")
    return start, stop


def ends_before(
    span: TimeSpan, frames: int, rate_hz: float, tolerance_s: float = END_SLACK_S
) -> SpanError:
    """The error for a file that is shorter than the span."""
    end_s = frames / rate_hz
    if span[1] is None or (span[0] or 0.0) >= end_s:
        return _error(span, f"the file ends at {end_s:.3f} s")
    return _error(
        span,
        f"the file ends at {end_s:.3f} s, {span[1] - end_s:.3f} s before the span; "
        f"audio.span_tolerance_s, {tolerance_s:g} here, takes spans that end so much behind",
    )


def _check_order(span: TimeSpan) -> None:
    start_s, end_s = span
    if not all(math.isfinite(value) and value >= 0 for value in span if value is not None):
        raise _error(span, "expected finite seconds from 0 on")
    if end_s is not None and end_s <= (start_s or 0.0):
        raise _error(span, "expected the end after the start")


def _error(span: TimeSpan, why: str) -> SpanError:
    return SpanError(f"span {span[0]} to {span[1]} s: {why}")
