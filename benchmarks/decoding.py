"""Decoding: seconds of audio per second of one core, as a worker of a job decodes.

Files are read from memory, checked, decoded to float32 and hashed (file and samples), then
resampled to the model's rate if it differs. A core does this work for a GPU.
"""

from __future__ import annotations

import io
import time
from typing import Any

import numpy as np
import psutil
import soundfile

from benchmarks.report import table, write_section
from earmill.jobs.demo_audio import speech
from earmill.pipeline.audio.channels import AudioBlock
from earmill.pipeline.audio.decode import BlockReader, Limits
from earmill.pipeline.audio.decoder_pool import DecoderPool
from earmill.pipeline.audio.resample import resample

MODEL_FS_HZ = 44100
CLIP_S = 60.0
REPEATS = 5
#: Formats and subtypes by libsndfile's names.
FORMATS = {"WAV, 16 bit": ("WAV", "PCM_16"), "FLAC": ("FLAC", "PCM_16"),
           "MP3": ("MP3", "MPEG_LAYER_III"), "Ogg Vorbis": ("OGG", "VORBIS")}  # fmt: skip
RATES_HZ = (16000, 44100)
_COMMAND = "python -m benchmarks.decoding"
# Runs of a figure.
CHILD_AUDIO_S = 1800.0
_CHILD_HEAD = ("files", "length", "here", "in a child", "ratio")
_HEAD = ("files", "rate", "decode", "resample", "both")


def encoded(rate_hz: int, container: str, subtype: str, seconds: float = CLIP_S) -> bytes:
    """Return a clip of generated speech as a file."""
    wave = speech(np.random.default_rng(0), rate_hz, seconds)
    wave = np.clip(0.05 * wave / np.sqrt(np.mean(wave**2)), -1, 1)
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", rate_hz, 1, subtype, format=container) as out:
        # In pieces, because libsndfile's Vorbis encoder allocates a whole call on the stack.
        for first in range(0, len(wave), rate_hz):
            out.write(wave[first : first + rate_hz])
    return file.getvalue()


def decode(data: bytes) -> tuple[AudioBlock, float]:
    """Return the samples of a file, and their rate."""
    with BlockReader(io.BytesIO(data), uri="clip") as reader:
        return np.concatenate(list(reader), axis=1), reader.rate_hz


def cpu_seconds(data: bytes) -> tuple[float, float]:
    """Return the least CPU seconds of decoding and of resampling in several runs."""
    decoding, resampling = [], []
    for _ in range(REPEATS):
        begin = time.process_time()
        waveform, rate_hz = decode(data)
        middle = time.process_time()
        resample(waveform[0], rate_hz, MODEL_FS_HZ)
        decoding.append(middle - begin)
        resampling.append(time.process_time() - middle)
    return min(decoding), min(resampling)


def _row(label: str, rate_hz: int) -> tuple[str, ...]:
    decoding, resampling = cpu_seconds(encoded(rate_hz, *FORMATS[label]))
    resampled = "" if rate_hz == MODEL_FS_HZ else f"{CLIP_S / resampling:.0f}"
    both = CLIP_S / (decoding + (resampling if resampled else 0.0))
    return label, f"{rate_hz} Hz", f"{CLIP_S / decoding:.0f}", resampled, f"{both:.0f}"


def in_child(data: bytes, seconds: float) -> tuple[float, float]:
    """Return seconds of audio per CPU second, decoded here and in a child process."""
    repeats = round(CHILD_AUDIO_S / seconds)
    begin = time.process_time()
    for _ in range(repeats):
        decode(data)
    here = time.process_time() - begin
    children = DecoderPool()
    options: dict[str, Any] = {"start_s": None, "end_s": None, "channels": "mean"}
    spent = 0.0
    for _ in range(2):  # the first round starts the child
        before = _cpu_with_children()
        for _ in range(repeats):
            with children.open(io.BytesIO(data), uri="clip", limits=Limits(), **options) as reader:
                np.concatenate(list(reader), axis=1)
        spent = _cpu_with_children() - before
    children.close()
    return CHILD_AUDIO_S / here, CHILD_AUDIO_S / spent


def _cpu_with_children() -> float:
    processes = psutil.Process().children()
    times = [process.cpu_times() for process in processes]
    return time.process_time() + sum(each.user + each.system for each in times)


def _child_row(label: str, seconds: float) -> tuple[str, ...]:
    here, there = in_child(encoded(MODEL_FS_HZ, *FORMATS[label], seconds), seconds)
    return label, f"{seconds:g} s", f"{here:.0f}", f"{there:.0f}", f"{there / here:.2f}"


def main() -> None:
    """Measure and write the section."""
    note = (
        f"Seconds of audio per second of one core's time, {CLIP_S:g} s of generated speech, mono, "
        f"from memory: decoding with checksums of file and samples, and resampling to "
        f"{MODEL_FS_HZ} Hz (soxr_vhq)."
    )
    rows = [_row(label, rate_hz) for rate_hz in RATES_HZ for label in FORMATS]
    of_children = [_child_row(label, seconds) for label in FORMATS for seconds in (5.0, CLIP_S)]
    more = (
        "Seconds of audio per second of CPU time, that of both processes counted, without and with "
        f"`run.decode_in_child`; {MODEL_FS_HZ} Hz, mono, from memory.\n\n"
        f"{table(_CHILD_HEAD, of_children)}"
    )
    write_section("Decoding", _COMMAND, f"{note}\n\n{table(_HEAD, rows)}")
    write_section("Decoding in children", _COMMAND, more)


if __name__ == "__main__":
    main()
