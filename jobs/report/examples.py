"""A few rows in detail: their sound as a small MP3, and their streams as figures. The sound comes
from the source if its file has the sha256 of the row's provenance, with the channels that the
models heard and the level of the file; a second takes about 6 kB."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from earmill.jobs.report.corpus import Stored
from earmill.jobs.report.page import data_uri
from earmill.jobs.report.plots import Plot, cell_text, signed
from earmill.jobs.report.row_panels import clip_values, panels
from earmill.pipeline.audio.channels import clips_of_channels
from earmill.pipeline.audio.decode import BlockReader
from earmill.pipeline.audio.decoder_pool import DecoderPool
from earmill.pipeline.common.byte_streams import digest_of
from earmill.pipeline.common.errors import EarmillError, RowError, SourceError, SourceOutage
from earmill.pipeline.common.text import named_line, one_line
from earmill.pipeline.planning.plan import Plan
from earmill.pipeline.reader.combined import JoinedFeatures
from earmill.pipeline.reader.features import Features
from earmill.pipeline.sources import open_source
from earmill.pipeline.sources.base import Item, Source
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.retrying import is_store_error

# Sample rates of MP3.
RATES_HZ = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
COMPRESSION = 0.75
LOUDEST = 0.999
MOST_BYTES = 512 * 2**20  # Larger files are not fetched for a few seconds of sound.

# Provenance that the page shows, in this order.
FACTS = (
    "uri", "start_s", "end_s", "container", "codec", "rate_hz", "channels", "nbytes", "decoder",
    "decoder_version", "header_size", "unterminated", "span_short_s", "resampler", "gain_db",
    "bytes_sha256", "pcm_sha256", "shard",
)  # fmt: skip


@dataclass(frozen=True)
class Sound:
    """The sound of a row: an MP3 as data URI and its level in words, or why there is none."""

    data: str = ""
    why: str = ""
    level: str = ""


class Player:
    """Fetches the first seconds of rows, by the source and the channel policy of the job."""

    def __init__(self, spec: JobSpec, seconds: float) -> None:
        self._spec, self._seconds = spec, seconds
        self._source: Source = open_source(spec.source, spec.audio.array_rate_hz)
        self._away = ""  # Why the source does not answer; every further row would wait as long.

    def sound(self, item: Item, channel: int, facts: Mapping[str, Any]) -> Sound:
        """Return the beginning of a row by its provenance, or an empty sound with the reason."""
        if self._away:
            return Sound(why=self._away)
        if item.variant is not None:
            return Sound(why="the sound of a variant is not stored; see its clean row")
        if (item.size or 0) > MOST_BYTES:
            return Sound(why=f"its file of {item.size:,} bytes is too large to fetch for a player")
        try:
            ((_, stream),) = self._source.fetch([item])
            if isinstance(stream, RowError):
                return Sound(why=f"its source cannot be read: {one_line(stream)}")
            with stream:
                expected = facts.get("bytes_sha256")
                if expected and digest_of(stream) != expected:
                    return Sound(why="its file has changed since the features were made")
                is_mp3 = facts.get("container") == "MP3"
                samples, rate_hz = self._beginning(stream, item, channel, is_mp3=is_mp3)
            return Sound(as_mp3(samples, rate_hz), level=self._level(samples))
        except SourceOutage as error:
            self._away = f"the source is away: {error}"
            return Sound(why=self._away)
        except (EarmillError, OSError, ValueError) as error:
            return Sound(why=f"its source cannot be read: {named_line(error)}")

    def _beginning(
        self, stream: BinaryIO, item: Item, channel: int, *, is_mp3: bool
    ) -> tuple[NDArray[np.float32], int]:
        audio = self._spec.audio
        with closing(DecoderPool()) as children:
            # libmpg123 prints warnings about damaged bytes; a child has no standard error.
            opened = children.open if is_mp3 else BlockReader
            with opened(
                stream,
                uri=item.uri,
                start_s=item.start_s,
                end_s=item.end_s,
                channels=audio.channels,
                limits=audio.limits(),
            ) as reader:
                clips = dict(clips_of_channels(audio.channels, reader.channel_ids))
                wanted = int(self._seconds * reader.rate_hz)
                blocks = list[NDArray[np.float32]]()
                for block in reader:
                    blocks.append(block[clips.get(channel, slice(0, 1))])
                    if sum(each.shape[1] for each in blocks) >= wanted:
                        break
                return np.concatenate(blocks, axis=1)[:, :wanted].T, reader.rate_hz

    def _level(self, samples: NDArray[np.float32]) -> str:
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
    """Encode (time, ear) as data URI, resampled to a rate of MP3, and scaled if it would clip."""
    import soundfile

    to_hz = next((rate for rate in RATES_HZ if rate >= rate_hz), RATES_HZ[-1])
    if to_hz != rate_hz:
        import soxr

        samples = soxr.resample(samples, rate_hz, to_hz)
    peak = max(LOUDEST, float(np.abs(samples).max(initial=0.0)))
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
    return data_uri("audio/mpeg", out.getvalue())


def chosen(features: Features, count: int, row_ids: Sequence[str]) -> list[int]:
    """Return positions of the named rows, or of `count` rows from the shortest to the longest."""
    if row_ids:
        try:
            return [features.index_of(row_id) for row_id in row_ids]
        except KeyError as error:
            raise SourceError(str(error.args[0])) from error
    order = np.argsort(features.table.column("seconds").to_numpy(), kind="stable")
    count = min(count, len(order))
    return [int(order[int(len(order) * ((k + 0.5) / count))]) for k in range(count)]


def examples(
    stored: Stored, positions: Sequence[int], seconds: float, job: JobSpec | None, *, audio: bool
) -> list[dict[str, Any]]:
    """Return the first seconds of rows in detail, by their positions in `stored.features`. `job`
    has credentials of the source; without `audio` the source is not opened."""
    dataset, player, why = stored.features.dataset, None, "the report was made without sound"
    planned: Mapping[str, Sequence[Item]] = {}
    if audio and positions:
        try:
            plan = Plan.read(stored.layout, dataset.plan_id)
            planned = {shard.shard_id: shard.items for shard in plan.shards}
            output = {**dataset.spec["output"], "uri": stored.layout.url()}
            stated = {**dataset.spec, "name": dataset.name, "output": output}
            player = Player(job or JobSpec.load(stated), seconds)
        except EarmillError as error:
            why = f"the source cannot be opened: {error}"
    shown = []
    for position in positions:
        known = stored.features.table.slice(position, 1).to_pylist()[0]
        features: Features | JoinedFeatures = stored.features
        place = position
        with suppress(KeyError):  # the row may be bad in an added set
            place, features = stored.joined.index_of(known["row_id"]), stored.joined
        shown_s = min(seconds, known["seconds"])
        facts: Mapping[str, Any] = {}
        extra: Mapping[str, Any] = {}
        plots, values, problem = list[Plot](), None, ""
        try:
            row = features.slice(place, 0.0, shown_s) if shown_s > 0 else features[place]
            facts, extra = features.provenance(place), row.extra
            plots = panels(row, features.streams, shown_s) if shown_s > 0 else []
            values = clip_values(row, features.streams)
        except Exception as error:
            if not (isinstance(error, EarmillError | ValueError) or is_store_error(error)):
                raise
            problem = named_line(error)
        sound = Sound(why=why)
        if player is not None:
            sound = _sound(player, planned.get(known["shard"], ()), known, facts)
        shown.append(
            {
                "row_id": known["row_id"],
                "seconds": known["seconds"],
                "shown_s": shown_s,
                "sound": sound,
                "plots": plots,
                "clip_values": values,
                "facts": _cells({name: facts.get(name) for name in FACTS}),
                "extra": _cells(extra),
                "problem": problem,
            }
        )
    return shown


def _cells(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, cell_text(value)) for name, value in values.items() if value is not None]


def _sound(
    player: Player, items: Iterable[Item], row: Mapping[str, Any], facts: Mapping[str, Any]
) -> Sound:
    """Return the sound of a row of the index, given its planned shard and its provenance."""
    if not facts:
        return Sound(why="its provenance cannot be read")
    wanted = row["plan_row_id"]
    item = next((item for item in items if item.row_id == wanted), None)
    if item is None:
        return Sound(why=f"the plan has no row {wanted!r}; run `earmill verify`")
    return player.sound(item, row["channel"], facts)
