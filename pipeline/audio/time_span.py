"""Spans of a recording: from seconds to frames, checked against the length of the file.

`seconds_to_frames` is the one rounding of times in the project, and `resampled_length` the one
rounding of lengths. If a header does not declare the length of a file, the end of its span is open
until the file was read.
"""

from __future__ import annotations

import math
from fractions import Fraction

from earmill.pipeline.common.errors import SpanError

TimeSpan = tuple[float | None, float | None]

# Manifests round to hundredths of a second. So an end that is this much behind the file's end means
# the end, unless a job sets `audio.span_tolerance_s`.
END_SLACK_S = 0.01


def seconds_to_frames(seconds: float, rate_hz: float) -> int:
    """Return the sample nearest to a time, halves up. Adjacent spans share no sample."""
    return math.floor(seconds * rate_hz + 0.5)


def resampled_length(n_samples: int, from_hz: float, to_hz: float) -> int:
    """Return the samples after resampling: n * to / from, rounded to nearest, halves down. The
    arithmetic is exact, so that lengths do not depend on float rounding or on chunks."""
    exact = Fraction(n_samples) * Fraction(to_hz) / Fraction(from_hz)
    # ceil(x - 1/2) with integers only.
    return -((exact.denominator - 2 * exact.numerator) // (2 * exact.denominator))


def frame_span(
    span: TimeSpan, rate_hz: float, declared: int | None, tolerance_s: float
) -> tuple[int, int | None]:
    """Return the first frame of a span, and the frame behind its last; None for an open end. `span`
    is in seconds. `declared` are the frames of the file, None if its header does not declare them.
    The span may end `tolerance_s` behind the file."""
    if span == (None, None):
        return 0, declared
    if not all(math.isfinite(value) and value >= 0 for value in span if value is not None):
        raise _error(span, "expected finite seconds from 0 on")
    if span[1] is not None and span[1] <= (span[0] or 0.0):
        raise _error(span, "expected the end after the start")
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


def ends_before(span: TimeSpan, frames: int, rate_hz: float, tolerance_s: float) -> SpanError:
    """Return the error for a file that is shorter than the span."""
    end_s, more = frames / rate_hz, ""
    if span[1] is not None and (span[0] or 0.0) < end_s:
        more = (
            f", {span[1] - end_s:.3f} s before the span; audio.span_tolerance_s, {tolerance_s:g} "
            "here, takes spans that end that far behind"
        )
    return _error(span, f"the file ends at {end_s:.3f} s{more}")


def _error(span: TimeSpan, why: str) -> SpanError:
    return SpanError(f"span {span[0]} to {span[1]} s: {why}")
