"""Decoding: seconds of audio per second of one core, as a worker of a job decodes.

Files are read from memory, checked, decoded to float32 and hashed (file and samples), then
resampled to the model's rate where theirs is another. It is what a core has to do for a GPU.
"""

from __future__ import annotations

import io
import time

import numpy as np
import soundfile

from benchmarks.report import table, write_section
from earmill.jobs.demo_audio import speech
from earmill.pipeline.audio.decode import decode
from earmill.pipeline.audio.resample import AudioResampler

MODEL_FS_HZ = 44100
CLIP_S = 60.0
REPEATS = 5
#: What libsndfile calls them, with its subtype.
FORMATS = {"WAV, 16 bit": ("WAV", "PCM_16"), "FLAC": ("FLAC", "PCM_16"),
           "MP3": ("MP3", "MPEG_LAYER_III"), "Ogg Vorbis": ("OGG", "VORBIS")}  # fmt: skip
RATES_HZ = (16000, 44100)
_HEAD = ("files", "rate", "decode", "resample", "both")


def encoded(rate_hz: int, container: str, subtype: str) -> bytes:
    """A clip of generated speech as a file."""
    wave = speech(np.random.default_rng(0), rate_hz, CLIP_S)
    wave = np.clip(0.05 * wave / np.sqrt(np.mean(wave**2)), -1, 1)
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", rate_hz, 1, subtype, format=container) as out:
        # In pieces: libsndfile's Vorbis encoder takes its memory for a whole call from the stack.
        for first in range(0, len(wave), rate_hz):
            out.write(wave[first : first + rate_hz])
    return file.getvalue()


def cpu_seconds(data: bytes) -> tuple[float, float]:
    """Of one core, for decoding and for resampling: least of several."""
    decoding, resampling = [], []
    for _ in range(REPEATS):
        begin = time.process_time()
        clip = decode(io.BytesIO(data), uri="clip")
        middle = time.process_time()
        AudioResampler(clip.facts.rate_hz, MODEL_FS_HZ).process(clip.waveform[0])
        decoding.append(middle - begin)
        resampling.append(time.process_time() - middle)
    return min(decoding), min(resampling)


def _row(label: str, rate_hz: int) -> tuple[str, ...]:
    decoding, resampling = cpu_seconds(encoded(rate_hz, *FORMATS[label]))
    resampled = "" if rate_hz == MODEL_FS_HZ else f"{CLIP_S / resampling:.0f}"
    both = CLIP_S / (decoding + (resampling if resampled else 0.0))
    return label, f"{rate_hz} Hz", f"{CLIP_S / decoding:.0f}", resampled, f"{both:.0f}"


def main() -> None:
    """Measure and write the section."""
    note = (
        f"Seconds of audio per second of one core's time, {CLIP_S:g} s of generated speech, mono, "
        f"from memory: decoding with checksums of file and samples, and resampling to "
        f"{MODEL_FS_HZ} Hz (soxr_vhq)."
    )
    rows = [_row(label, rate_hz) for rate_hz in RATES_HZ for label in FORMATS]
    write_section("Decoding", "python -m benchmarks.decoding", note + "\n\n" + table(_HEAD, rows))


if __name__ == "__main__":
    main()
