"""Variants of every row: noise, a room, another level or another speed, as rows of their own.

The steps of a variant have one order: speed, impulse response, noise, gain. A variant hears the
decoded clip at the file's rate, before it is resampled to a model's rate and calibrated.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from earmill.pipeline.spec import PlainUri, SpecModel

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def _plain_name(value: str) -> str:
    if not NAME.fullmatch(value):
        raise ValueError(
            "expected letters, digits and . _ - only, beginning with a letter or a digit, got "
            f"{value!r}; it becomes a part of row ids"
        )
    return value


class NoiseSpec(SpecModel):
    """Noise that is added to a clip; exactly one of uri and kind.

    Args:
        uri: File of noise, or folder of such files, one of which is drawn for each row. A local
            path or any fsspec URI. The first ten minutes of a file are used, the mean of its
            channels. A longer noise begins at a random sample; a shorter noise is repeated.
        kind: Noise that is generated: white has the same power at all frequencies, pink loses 3 dB
            an octave from 20 Hz up.
        snr_db: Level of the clip above the noise, both as RMS over the whole clip.
    """

    uri: PlainUri | None = None
    kind: Literal["white", "pink"] | None = None
    snr_db: float = Field(ge=-120, le=120)

    @model_validator(mode="after")
    def _exactly_one(self) -> NoiseSpec:
        if (self.uri is None) == (self.kind is None):
            raise ValueError("expected exactly one of uri and kind; leave the other out")
        return self


class VariantSpec(SpecModel):
    """One variant of every row; its steps are applied in the order of this table.

    Args:
        name: Name in row ids, `<id>@<name>`; letters, digits and . _ - only.
        speed: Factor of speed and pitch: 1.1 resamples a clip to 1/1.1 of its length.
        impulse_response: File with the impulse response of a room, or folder of such files, one of
            which is drawn for each row. The clip keeps its length, and no level is corrected. Two
            channels are the ears of a job with channels binaural.
        noise: Noise that is added; a silent clip gets none.
        gain_db: Change of the level; not together with calibration.level_db_spl.
    """

    name: Annotated[str, AfterValidator(_plain_name)]
    speed: float | None = Field(default=None, ge=0.25, le=4)
    impulse_response: PlainUri | None = None
    noise: NoiseSpec | None = None
    gain_db: float | None = Field(default=None, ge=-120, le=120)

    @model_validator(mode="after")
    def _some_step(self) -> VariantSpec:
        if (self.speed, self.impulse_response, self.noise, self.gain_db) == (None,) * 4:
            raise ValueError(
                f"expected at least one of speed, impulse_response, noise and gain_db in variant "
                f"{self.name!r}, got none: it would be the clean row"
            )
        return self


class VariantsSpec(SpecModel):
    """Seeded variants of every row, each a row beside the clean row.

    Args:
        seed: Decides all random choices, together with the row id and the variant's name.
        of: The variants.
    """

    seed: int = Field(default=0, ge=0)
    of: tuple[VariantSpec, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _unique_names(self) -> VariantsSpec:
        names = [variant.name for variant in self.of]
        twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        if twice:
            raise ValueError(
                f"expected variants with different names, got {twice[0]!r} more than once"
            )
        return self

    def named(self, name: str) -> VariantSpec:
        return next(variant for variant in self.of if variant.name == name)
