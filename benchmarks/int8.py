"""Errors and sizes of `output.dtype: int8`, for every column of every stream on speech.

The error of a column is the RMS of the difference between stored and computed values. It is divided
by the RMS of the computed values, and by their standard deviation over time, which is the scale of
normalised features. float16 is measured too. Sizes are of Zarr chunks, relative to float32.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile
import soxr
from numcodecs import Blosc, blosc

from amtcore.features.registry import build_extractor
from amtcore.features.stream_info import StreamInfo
from benchmarks.feature_sets import sounds
from benchmarks.report import table, write_section
from earmill.pipeline.formats.values import INT8, Caster, as_stored, converted, dequantised
from earmill.pipeline.formats.zarr.write import chunk_frames

SPEECH = Path(__file__).resolve().parents[1] / "tests" / "data" / "speech"
LEVEL = 0.05  # 74 dB SPL if an RMS of 1 is 100 dB SPL
GENERATED = 6
FILTERBANK = {"modulation": {}, "adaptation": {}, "envelope": {}}
LOUDNESS = {"short_term_loudness": {}, "long_term_loudness": {}, "specific_loudness": {}}
MODELS = {
    "dau1997": (16000, FILTERBANK),
    "king2019": (16000, {"modulation": {}}),
    "paulick2024": (44100, {"modulation": {}}),
    "moore2016": (32000, LOUDNESS),
    "melspectrogram": (16000, None),
}


def speech(fs_hz: int) -> list[np.ndarray]:
    """Return the sentences in tests/data and generated clips, all at one level."""
    clips = sounds(fs_hz, GENERATED)
    for path in sorted(SPEECH.rglob("*.*")):
        if path.suffix in (".wav", ".flac", ".ogg", ".opus", ".mp3"):
            wave, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
            wave = soxr.resample(wave.mean(axis=1), rate_hz, fs_hz)
            clips.append((LEVEL * wave / np.sqrt(np.mean(wave**2))).astype(np.float32))
    return clips


def made(model: str) -> dict[str, tuple[StreamInfo, list[np.ndarray]]]:
    """Return the streams of a model with their values, clip by clip."""
    fs_hz, streams = MODELS[model]
    extractor = build_extractor(model, fs_hz=fs_hz, streams=streams)
    ears = max(extractor.input_channels)
    clips = [np.stack([clip] * ears) if ears > 1 else clip for clip in speech(fs_hz)]
    clips = extractor.extract(clips)
    return {info.name: (info, [clip[info.name] for clip in clips]) for info in extractor.streams}


def compared(info: StreamInfo, clips: list[np.ndarray], dtype: str) -> tuple[np.ndarray, float]:
    """Return the errors of the columns over all clips, (2, columns) relative to RMS and standard
    deviation; and the size relative to float32."""
    (stored,) = as_stored([info], dtype)
    cast = Caster(dtype, [stored])
    rows = [cast(info.name, clip)[0] for clip in clips]
    scale = stored.scale_factor
    back = [dequantised(r) if dtype == INT8 else converted(r, np.dtype("f4"), scale) for r in rows]
    wanted = np.concatenate(clips).astype(np.float64)
    error = np.sqrt(np.mean((np.concatenate(back) - wanted) ** 2, axis=0))
    sizes = np.stack([np.sqrt(np.mean(wanted**2, axis=0)), wanted.std(axis=0)])
    relative = np.divide(error, sizes, out=np.zeros_like(sizes), where=sizes > 0)
    return relative, _stored_bytes(np.concatenate(rows)) / wanted.astype(np.float32).nbytes


def _stored_bytes(rows: np.ndarray) -> int:
    step, codec = chunk_frames(rows.shape[1], rows.dtype.name), Blosc("lz4", 5, Blosc.BITSHUFFLE)
    starts = range(0, len(rows), step)
    return sum(len(codec.encode(np.ascontiguousarray(rows[s : s + step]))) for s in starts)


def main() -> None:
    """Measure and write the section."""
    blosc.use_threads = False
    lines = []
    for model in MODELS:
        for name, (info, clips) in made(model).items():
            if not info.frame_rate_hz:
                continue
            for dtype in (INT8, "float16"):
                (rms, std), size = compared(info, clips, dtype)
                errors = (np.median(rms), rms.max(), np.median(std), std.max())
                lines.append(
                    (model, name, dtype, *(f"{100 * e:.2g} %" for e in errors), f"{size:.3f}")
                )
    head = ("model", "stream", "stored as", "error / RMS, median column", "worst column",
            "error / std, median column", "worst column", "bytes / float32")  # fmt: skip
    note = (
        "The spoken sentences in tests/data/speech, and speech and music made by code, at 74 dB "
        "SPL, frames of the default rate. Error: RMS over all clips of what is read less what the "
        "model made."
    )
    write_section("Frames in int8", "python -m benchmarks.int8", f"{note}\n\n{table(head, lines)}")


if __name__ == "__main__":
    main()
