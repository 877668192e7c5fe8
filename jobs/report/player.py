"""The sound of a row as a small MP3 for the page, if its source still has it.

The file must be the one that the features were made of: its bytes are held against the hash in the
row's provenance. What is embedded is what the models heard, by the job's channel policy, at the
file's own level: the first seconds, at up to 48 kHz, about 6 kB a second.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from earmill.jobs.report.plots import signed
from earmill.pipeline.common.byte_streams import digest_of
from earmill.pipeline.common.errors import EarmillError, RowError, SourceOutage
from earmill.pipeline.common.text import named_line, one_line

if TYPE_CHECKING:
    from earmill.pipeline.sources.base import Item, Source
    from earmill.pipeline.spec.job import JobSpec

# What an MP3 may have.
RATES_HZ = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
COMPRESSION = 0.75
LOUDEST = 0.999
# Containers whose decoder, libmpg123, prints warnings about damaged bytes. A child process decodes
# them, whose standard error goes nowhere.
NOISY = frozenset({"MP3"})
# A larger file is not fetched for a few seconds of it.
MOST_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Sound:
    """What is heard of a row.

    Args:
        data: MP3 as data URI; empty where there is none, and `why` then says so.
        level: Of what is embedded, in words.
    """

    data: str = ""
    why: str = ""
    level: str = ""


class Player:
    """Makes the sounds of rows.

    Args:
        spec: The job, for its source and channel policy. seconds: Of each row, at most.
    """

    def __init__(self, spec: JobSpec, seconds: float) -> None:
        from earmill.pipeline.sources import open_source

        self._spec, self._seconds = spec, seconds
        self._source: Source = open_source(spec.source, spec.audio.array_rate_hz)

    def sound(self, item: Item, channel: int, facts: Mapping[str, Any]) -> Sound:
        """The beginning of a row; an empty one, and why, where it cannot be had.

        Args:
            item: As the plan has it. channel: Of the row, -1 for mixed or both ears.
            facts: The row's provenance.
        Raises:
            SourceOutage: The source is away.
        """
        if (item.size or 0) > MOST_BYTES:
            return Sound(why=f"its file of {item.size:,} bytes is too large to fetch for a player")
        try:
            ((_, found),) = self._source.fetch([item])
            if isinstance(found, RowError):
                return Sound(why=f"its source cannot be read: {one_line(found)}")
            with found:
                return self._of(found, item, channel, facts)
        except SourceOutage:
            raise
        except (EarmillError, OSError, ValueError) as error:
            return Sound(why=f"its source cannot be read: {named_line(error)}")

    def _of(self, stream: BinaryIO, item: Item, channel: int, facts: Mapping[str, Any]) -> Sound:
        from earmill.pipeline.audio.channels import clips_of_channels
        from earmill.pipeline.audio.decode import open_blocks
        from earmill.pipeline.audio.decoding_children import DecodingChildren

        expected = facts.get("bytes_sha256")
        if expected and digest_of(stream) != expected:
            return Sound(why="its file is another one now than the features were made of")
        policy = self._spec.audio.channels
        children = DecodingChildren()
        opened = children.open if facts.get("container") in NOISY else open_blocks
        with (
            closing(children),
            opened(
                stream,
                uri=item.uri,
                start_s=item.start_s,
                end_s=item.end_s,
                channels=policy,
                limits=self._spec.audio.limits(),
            ) as reader,
        ):
            rows = dict(clips_of_channels(policy, reader.channel_ids)).get(channel, slice(0, 1))
            wanted = int(self._seconds * reader.rate_hz)
            blocks, frames = [], 0
            for block in reader:
                blocks.append(block[rows])
                frames += block.shape[1]
                if frames >= wanted:
                    break
            samples = np.concatenate(blocks, axis=1)[:, :wanted].T
            return Sound(as_mp3(samples, reader.rate_hz), level=self._level(samples))

    def _level(self, samples: NDArray[np.float32]) -> str:
        """What the models took it for."""
        rms = float(np.sqrt(np.mean(np.square(samples, dtype=np.float64))))
        calibration = self._spec.audio.calibration.to_dict()
        if rms == 0:
            return "silent"
        level_db = 20 * float(np.log10(rms))
        if "rms1_db_spl" in calibration:
            return f"{calibration['rms1_db_spl'] + level_db:.1f} dB SPL"
        scaled = calibration["level_db_spl"]
        return signed(f"{level_db:.1f} dB re 1") + f", the whole clip scaled to {scaled:g} dB SPL"


def as_mp3(samples: NDArray[np.float32], rate_hz: int) -> str:
    """(time, ear) as data URI; resampled where MP3 has no such rate, scaled where it would clip."""
    import soundfile

    to_hz = next((rate for rate in RATES_HZ if rate >= rate_hz), RATES_HZ[-1])
    if to_hz != rate_hz:
        import soxr

        samples = soxr.resample(samples, rate_hz, to_hz)
    peak = float(np.abs(samples).max(initial=0.0))
    if peak > LOUDEST:
        samples = samples * np.float32(LOUDEST / peak)
    out = io.BytesIO()
    soundfile.write(
        out,
        samples,
        to_hz,
        format="MP3",
        subtype="MPEG_LAYER_III",
        bitrate_mode="VARIABLE",
        compression_level=COMPRESSION,
    )
    return "data:audio/mpeg;base64," + base64.b64encode(out.getvalue()).decode()
