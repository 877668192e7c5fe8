"""Long recordings in spans: parts that different workers compute at the same time.

A span is read from `warm_up_s` seconds before its start, which the models hear and whose frames are
thrown away, and to TAIL_S behind its end, for windows and filters that look ahead:

    recording   |-----------|-----------|-----------|
    span 2 reads     |wwwwww|===========|t|
    and keeps               |===========|

Starts are whole seconds, which are a whole number of samples at every rate and of frames of every
stream (`Extractor.grid_s`), so frames and the phase of resampling are those of the recording. What
differs is what the models' states remember of what came before, exp(-warm_up_s / memory_s) of a
stream's largest value; after TIMES time constants that is the rounding of float32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Protocol

from pydantic import Field, model_validator

from earmill.pipeline.common.errors import SpecError
from earmill.pipeline.spec.section import SpecModel

# exp(-17) is 4e-8, less than the rounding of float32.
TIMES = 17.0
# Read behind a span: filters of resampling, half windows of spectra. Also added to the warm-up.
TAIL_S = 1
# The row of a span: of which row, its number, and how many there are.
SPAN_ID = re.compile(r"(.+)#span([1-9][0-9]*)of([1-9][0-9]*)", re.DOTALL)


def recording_of(row_id: str) -> str:
    """What the recording is called that a planned span is of."""
    found = SPAN_ID.fullmatch(row_id)
    return row_id if found is None else str(found[1])


class SpansSpec(SpecModel):
    """Long recordings in spans that workers compute side by side.

    Args:
        seconds: Length of a span in whole seconds. A recording of one and a half or more is cut
            into spans, the last of which has what is left, half to one and a half; each is a row,
            `<id>#span<k>of<n>`, and from output.shard_seconds on a shard.
        warm_up_s: Whole seconds that the models hear before a span; null takes as many as leave
            less than the rounding of float32 of what was before them.
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


class Remembers(Protocol):
    """What of a model decides how early a span must begin; see `Extractor`."""

    @property
    def memory_s(self) -> float | None: ...

    @property
    def grid_s(self) -> int: ...


def warm_up_s(spans: SpansSpec | None, models: Sequence[Remembers], names: Sequence[str]) -> int:
    """Seconds that the models hear before a span; 0 for a job without spans.

    Args:
        names: Of the models, for messages.
    Raises:
        SpecError: A model that cannot be computed in spans, or not in these.
    """
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
    given_s = needed_s if spans.warm_up_s is None else spans.warm_up_s
    for key, value in (("seconds", spans.seconds), ("warm_up_s", given_s)):
        if value % grid_s:
            raise SpecError(
                f"audio.spans.{key}: expected a multiple of {grid_s} s, after which the frames of "
                f"{', '.join(names)} begin on a whole second again, got {value}"
            )
    if given_s > spans.seconds:
        raise SpecError(
            f"audio.spans.seconds: expected {given_s} or more, which the warm-up of "
            f"{', '.join(names)} takes, got {spans.seconds}; work would be done twice: raise it"
        )
    return given_s
