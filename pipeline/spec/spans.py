"""Long recordings in spans: parts that different workers compute at the same time.

A span is read from `warm_up_s` seconds before its start: the models hear these seconds, and their
frames are dropped. It is read to TAIL_S behind its end, for windows and filters that look ahead:

    recording   |-----------|-----------|-----------|
    span 2 reads     |wwwwww|===========|t|
    and keeps               |===========|

Starts are whole seconds, which are a whole number of samples at every rate and of frames of every
stream (`Extractor.grid_s`). So frames and the phase of resampling are the same as in the whole
recording. The only difference is the models' memory of earlier sound: exp(-warm_up_s / memory_s) of
a stream's largest value, which is the rounding of float32 after TIMES time constants.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator

from earmill.pipeline.common.errors import SpecError
from earmill.pipeline.spec import SpecModel

TIMES = 17.0  # exp(-17) is 4e-8, less than the rounding of float32.
# Seconds behind a span for resampling filters and half windows. Also added to the warm-up.
TAIL_S = 1
# Row id of a span: id of the recording, number of the span, number of spans.
SPAN_ID = re.compile(r"(.+)#span([1-9][0-9]*)of([1-9][0-9]*)", re.DOTALL)


def recording_of(row_id: str) -> str:
    """Return the id of the recording of a span; other ids do not change."""
    match = SPAN_ID.fullmatch(row_id)
    return row_id if match is None else str(match[1])


class SpansSpec(SpecModel):
    """Long recordings in spans that workers compute side by side.

    Args:
        seconds: Length of a span in whole seconds. A recording of at least one and a half times
            this length is cut into spans; the last span has half to one and a half of it. Each span
            is a row, `<id>#span<k>of<n>`, and a shard of its own from output.shard_seconds on.
        warm_up_s: Whole seconds that the models hear before a span. null takes enough seconds that
            the effect of earlier sound is below the rounding of float32.
    """

    seconds: int = Field(ge=2 * TAIL_S)
    warm_up_s: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _longer_than_warm_up(self) -> SpansSpec:
        if self.warm_up_s is not None and self.warm_up_s > self.seconds:
            raise ValueError(
                f"expected seconds of {self.warm_up_s} or more, which the warm-up takes, got "
                f"{self.seconds}; work would be done twice: raise seconds"
            )
        return self


def warm_up_s(spans: SpansSpec | None, models: Sequence[Any], names: Sequence[str]) -> int:
    """Return the seconds that the models hear before a span; 0 for a job without spans. `memory_s`
    and `grid_s` of the models, see `Extractor`, decide it."""
    if spans is None:
        return 0
    for model, name in zip(models, names, strict=True):
        if model.memory_s is None:
            raise SpecError(
                "audio.spans: expected models whose frames forget what was long before, got "
                f"{name}: with its parameters and streams that is not true, or not known; leave "
                "audio.spans out, and recordings are computed in order"
            )
    grid_s = math.lcm(*(model.grid_s for model in models))
    longest_s = max(model.memory_s or 0.0 for model in models)
    needed_s = grid_s * math.ceil((math.ceil(TIMES * longest_s) + TAIL_S) / grid_s)
    warm_up = needed_s if spans.warm_up_s is None else spans.warm_up_s
    for key, value in (("seconds", spans.seconds), ("warm_up_s", warm_up)):
        if value % grid_s:
            raise SpecError(
                f"audio.spans.{key}: expected a multiple of {grid_s} s, after which the frames of "
                f"{', '.join(names)} begin on a whole second again, got {value}"
            )
    if warm_up > spans.seconds:
        raise SpecError(
            f"audio.spans.seconds: expected {warm_up} or more, which the warm-up of "
            f"{', '.join(names)} takes, got {spans.seconds}; work would be done twice: raise it"
        )
    return warm_up
