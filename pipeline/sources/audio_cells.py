"""Cells that hold audio: bytes of a file, a path, or an array of samples with its rate.

    cell   = binary | string | array | struct<bytes?, path?, array?, sampling_rate?>
    array  = list of samples | list of channels, each a list of samples

Arrays become WAV files in memory. Full scale is 32768 for int16, 2^31 for int32, 128 for int8 and
1.0 for floats. Types without a known full scale (int64, unsigned) are refused before work starts.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from earmill.pipeline.common.errors import NotAudioError, SampleRateError, SourceError
from earmill.pipeline.sources.fetch import Blob

RATE_NAMES = ("sampling_rate", "sample_rate")
WAV_HEADER = struct.Struct("<4sI4s4sIHHIIHH4sI")
PCM, FLOAT = 1, 3
# Sizes from here on mean "not known" to readers of WAV.
MOST_BYTES = 0xFFFFFF00 - WAV_HEADER.size
LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)
TEXTS = frozenset({pa.string(), pa.large_string(), pa.string_view()})
BYTES = frozenset({pa.binary(), pa.large_binary(), pa.binary_view()})
EXPECTED = (
    "expected the bytes of files, paths, or arrays of float, int8, int16 or int32 samples with a "
    "sampling_rate"
)


@dataclass(frozen=True)
class AudioCell:
    """The content of one cell: bytes of a file, a path, a list scalar with a rate, or nothing."""

    data: pa.Buffer | None = None
    path: str | None = None
    samples: pa.Scalar | None = None
    rate_hz: Any = None

    @property
    def nbytes(self) -> int | None:
        """Bytes of the file that the cell is or becomes."""
        if self.data is not None:
            return int(self.data.size)
        if self.samples is None:
            return None
        values = _values(self.samples)
        return WAV_HEADER.size + len(values) * np.dtype(_STORED[values.type]).itemsize

    def seconds(self) -> float | None:
        """Return the duration of an array; None for other cells, and without a rate."""
        if self.samples is None or not _is_rate(self.rate_hz):
            return None
        channels = len(self.samples.values) if isinstance(self.samples.values.type, LISTS) else 1
        return float(len(_values(self.samples)) / max(1, channels) / self.rate_hz)


NOTHING = AudioCell()


def audio_cell(cell: pa.Scalar, array_rate_hz: int | None = None) -> AudioCell:
    """Return the content of a cell; arrays without a rate have `array_rate_hz`."""
    if not cell.is_valid:
        return NOTHING
    if isinstance(cell, pa.ExtensionScalar | pa.DictionaryScalar):
        return audio_cell(cell.value, array_rate_hz)
    kind = cell.type
    if isinstance(kind, LISTS):
        return AudioCell(samples=cell, rate_hz=array_rate_hz)
    if not pa.types.is_struct(kind):
        return AudioCell(path=cell.as_py()) if kind in TEXTS else AudioCell(cell.as_buffer())
    # Fields that are there, of a type that fits, and not null.
    fields = {field.name: cell[field.name] for field in kind}
    held = {name: field for name, field in fields.items() if field.is_valid}
    data, path, samples = (
        held[name] if name in held and fits(held[name].type) else None
        for name, fits in _FIELDS.items()
    )
    return AudioCell(
        None if data is None else data.as_buffer(),
        None if path is None else path.as_py(),
        samples,
        next((held[name].as_py() for name in RATE_NAMES if name in held), array_rate_hz),
    )


def check_audio_type(column: str, kind: pa.DataType, array_rate_hz: int | None) -> None:
    """Raise SourceError for a column that `audio_cell` cannot read."""
    stored = kind
    if isinstance(kind, pa.BaseExtensionType):
        stored = kind.storage_type
    elif pa.types.is_dictionary(kind):
        stored = kind.value_type
    fields = {each.name: each.type for each in stored} if pa.types.is_struct(stored) else {}
    known = [name for name, fits in _FIELDS.items() if name in fields and fits(fields[name])]
    advice: str | None = f"{EXPECTED}; name another column in source.audio_column"
    if isinstance(stored, LISTS):
        advice = _list_advice(stored, array_rate_hz)
    elif "array" in known:
        has_rate = not fields.keys().isdisjoint(RATE_NAMES)
        advice = _list_advice(fields["array"], 1 if has_rate else array_rate_hz)
    elif known or stored in TEXTS or stored in BYTES:
        advice = None
    if advice is not None:
        raise SourceError(f"column {column!r} holds {kind}: {advice}")


def _list_advice(kind: pa.DataType, rate_hz: int | None) -> str | None:
    """Return what to do about lists that cannot be read; None for lists that can."""
    value = kind.value_type
    value = value.value_type if isinstance(value, LISTS) else value
    if pa.types.is_struct(value) or value in TEXTS or value in BYTES or isinstance(value, LISTS):
        return f"{EXPECTED}; of several clips a row make as many rows"
    if pa.types.is_unsigned_integer(value) or value == pa.int64():
        return (
            f"{EXPECTED}; the full scale of {value} cannot be told: cast it to int16, int32 or "
            "float32, or bytes of files to binary"
        )
    if value not in _STORED:
        return EXPECTED
    if rate_hz is None:
        return "expected arrays with a sampling_rate; set audio.array_rate_hz to the rate of these"
    return None


def held_blob(cell: AudioCell, uri: str) -> Blob | None:
    """Return the bytes of a cell that holds bytes or an array; None for a path or nothing."""
    if cell.data is not None:
        return Blob(data=cell.data.to_pybytes())
    return None if cell.samples is None else Blob(data=wav_of(cell.samples, cell.rate_hz, uri))


def wav_of(samples: pa.Scalar, rate_hz: Any, uri: str) -> bytes:
    """Return a WAV file of a list of samples, or of channels; NotAudioError or SampleRateError."""
    if not _is_rate(rate_hz):
        raise SampleRateError(
            f"{uri}: expected the rate of the array in whole Hz, got {rate_hz}; set "
            "audio.array_rate_hz if the dataset does not say it"
        )
    outer, values = samples.values, _values(samples)
    channels = 1
    if isinstance(outer.type, LISTS) and len(outer):
        channels, lengths = len(outer), {len(one) for one in outer if one.is_valid}
        if outer.null_count or len(lengths) > 1:
            raise NotAudioError(f"{uri}: expected channels of one length, got {sorted(lengths)}")
        if channels > len(values) / max(1, channels):
            raise NotAudioError(
                f"{uri}: expected an array of (channels, samples), got {channels} lists of "
                f"{len(values) // max(1, channels)}; transpose it"
            )
    if values.null_count:
        raise NotAudioError(f"{uri}: expected numbers, got {values.null_count} null samples")
    # frames: (time, channel)
    frames: NDArray[Any] = values.to_numpy(zero_copy_only=False).reshape(channels, -1).T
    frames = frames.astype(_STORED[values.type])
    if values.type == pa.int8():
        frames <<= 8
    itemsize = frames.dtype.itemsize
    if frames.nbytes > MOST_BYTES:
        raise NotAudioError(f"{uri}: expected an array of at most 4 GiB, got {frames.nbytes:,}")
    tag = FLOAT if frames.dtype.kind == "f" else PCM
    head = WAV_HEADER.pack(
        *(b"RIFF", WAV_HEADER.size - 8 + frames.nbytes, b"WAVE"),
        *(b"fmt ", 16, tag, channels, int(rate_hz)),
        *(int(rate_hz) * channels * itemsize % 2**32, channels * itemsize, 8 * itemsize),
        *(b"data", frames.nbytes),
    )
    return head + frames.tobytes()


def _is_rate(rate_hz: Any) -> bool:
    """Return True for whole Hz that a WAV file can say."""
    is_number = isinstance(rate_hz, int | float) and not isinstance(rate_hz, bool)
    return is_number and 0 < rate_hz < 2**32 and float(rate_hz).is_integer()


def _values(samples: pa.Scalar) -> pa.Array:
    """Return the samples of all channels, one behind the other."""
    values = samples.values
    return values.flatten() if isinstance(values.type, LISTS) else values


# The type of WAV that holds samples of a type exactly.
_STORED = {
    pa.int8(): "<i2",
    pa.int16(): "<i2",
    pa.int32(): "<i4",
    pa.float16(): "<f4",
    pa.float32(): "<f4",
    pa.float64(): "<f8",
}
_FIELDS = {
    "bytes": BYTES.__contains__,
    "path": TEXTS.__contains__,
    "array": lambda kind: isinstance(kind, LISTS),
}
