"""Make the variant of a decoded clip that its plan row names; see `spec.variants`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from earmill.pipeline.audio.channels import AudioBlock, Channels
from earmill.pipeline.audio.decode import Blocks
from earmill.pipeline.audio.resample import resample
from earmill.pipeline.audio.variants import (
    Recording,
    Samples,
    generated,
    generator,
    in_room,
    rms,
    stretch,
)
from earmill.pipeline.common import errors
from earmill.pipeline.formats.row_table import VARIANT_FACTS
from earmill.pipeline.formats.rows import Scalar
from earmill.pipeline.sources.base import Item, Variant, waits
from earmill.pipeline.sources.fetch import load_blob
from earmill.pipeline.spec.variants import NoiseSpec, VariantsSpec

RECORDINGS_KEPT = 8  # Each has up to 115 MB: ten minutes at 48 kHz.


class VariantMaker:
    """The variants of a job. `opened` decodes a stream, as `BlockReader`. Threads may share it."""

    def __init__(self, spec: VariantsSpec, opened: Callable[..., Blocks]) -> None:
        self._spec, self._open = spec, opened
        keep = lru_cache(RECORDINGS_KEPT)
        self._noise_at = keep(lambda uri, sha256, hz: self._read(uri, sha256, "mean").at(hz)[0])
        self._taps_at = keep(lambda uri, sha256, hz: self._read(uri, sha256, "each").taps(hz))

    def make(
        self, item: Item, variant: Variant, clip: AudioBlock, rate_hz: int
    ) -> tuple[AudioBlock, dict[str, Scalar]]:
        """Return the samples (ear, time) of a variant at the clip's rate, and its provenance."""
        spec = self._spec.named(variant.name)
        settings: dict[str, Any] = {"seed": self._spec.seed}
        if spec.speed is not None:
            from_hz = round(rate_hz * spec.speed, 6)  # 17600 Hz, not 17600.000000000004
            clip = np.stack([resample(ear, from_hz, rate_hz) for ear in clip])
            settings["speed"] = spec.speed
        if not clip.shape[1]:
            raise errors.TooShortError(f"{item.uri}: expected samples at this speed, got none")
        ears = clip.astype(np.float64)
        if variant.response_uri is not None:
            file = str(variant.response_uri), str(variant.response_sha256)
            ears = in_room(ears, self._taps_at(*file, rate_hz), rate_hz)
            settings["impulse_response"] = dict(zip(("uri", "sha256"), file, strict=True))
        if spec.noise is not None:
            noise, settings["noise"] = self._noise(item, variant, spec.noise, ears, rate_hz)
            ears += noise
        if spec.gain_db is not None:
            ears *= 10 ** (spec.gain_db / 20)
            settings["gain_db"] = spec.gain_db
        values = (variant.name, variant.clean_id, json.dumps(settings, sort_keys=True))
        return ears.astype(np.float32), dict(zip(VARIANT_FACTS, values, strict=True))

    def _noise(
        self, item: Item, variant: Variant, spec: NoiseSpec, ears: Samples, rate_hz: int
    ) -> tuple[Samples, dict[str, Any]]:
        """Return scaled noise (time,) for all ears of a clip, and its part of the provenance."""
        random = generator(self._spec.seed, variant.clean_id, variant.name)
        *_, place = random.random(3)  # the first two have chosen files, see `planning.variants`
        samples = ears.shape[1]
        facts: dict[str, Any] = {"snr_db": spec.snr_db}
        if spec.kind is not None:
            made = generated(spec.kind, random, samples, rate_hz)
            facts["kind"] = spec.kind
        else:
            file = str(variant.noise_uri), str(variant.noise_sha256)
            made, first = stretch(self._noise_at(*file, rate_hz), samples, float(place))
            facts |= {"uri": file[0], "sha256": file[1], "start_s": first / rate_hz}
        level = rms(made)
        if level == 0:
            raise errors.NotAudioError(
                f"{item.uri}: expected noise for variant {variant.name!r}, got silence from "
                f"{facts['start_s']:.3f} s of {variant.noise_uri}; remove it, or cut its silence"
            )
        gain = rms(ears) / level * 10 ** (-spec.snr_db / 20)
        # A silent clip gets no noise.
        facts["gain_db"] = 20 * math.log10(gain) if gain > 0 else None
        return gain * made, facts

    def _read(self, uri: str, sha256: str, channels: Channels) -> Recording:
        """Return a recording; RowError if its bytes are not the planned bytes."""
        with waits.waiting():
            blob = load_blob(Item(row_id=uri, uri=uri), lambda uri: {})
        if isinstance(blob, errors.AbsentError):
            # No row is at fault: all were planned with this file.
            raise errors.SourceOutage(f"{blob}; a variant was planned with it")
        if isinstance(blob, errors.RowError):
            raise blob
        if (now := blob.digest()) != sha256:
            raise errors.UnreadableError(
                f"{uri}: changed since it was planned: expected sha256 {sha256[:12]}, got "
                f"{now[:12]}; `earmill retry` takes the file as it is now"
            )
        return Recording.read(self._open, blob.open(), uri, channels)
