"""What `earmill plan --sample` expects of a job against what the job then takes.

Three corpora of generated sound, as unlike as corpora are: many short clips; few long recordings,
which are streamed; mixed containers, rates and lengths that are resampled. Each is planned with a
sample, by the command, and run, by the command; the job itself says what it took.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from benchmarks.report import table, write_section
from earmill.jobs.demo_audio import speech
from earmill.jobs.estimate_text import NAMES, amount

VOICES, VOICE_S = 6, 20.0
SAMPLE, SEED = 48, 1
WANTED = {"time_s": 0.20, "stored_bytes": 0.05}
SHOWN = ("time_s", "cpu_s", "stored_bytes", "objects")
_HEAD = ("figure", "expected", "range", "actual", "off", "wanted within")
# libsndfile's Vorbis encoder overflows its stack on long writes.
WRITE_FRAMES = 4096


@dataclass(frozen=True)
class Corpus:
    """A corpus and its job.

    Args:
        name: For the table. make: Writes the files. extract, output, run: Sections of the job.
    """

    name: str
    make: Callable[[Path], None]
    extract: list[dict[str, Any]]
    output: dict[str, Any]
    run: dict[str, Any]


def _voices(rate_hz: int) -> list[np.ndarray]:
    return [speech(np.random.default_rng(i), rate_hz, VOICE_S) for i in range(VOICES)]


def _clip(rng: np.random.Generator, voice: np.ndarray, n: int) -> np.ndarray:
    """Speech at some level in some noise, of any length."""
    shifted = np.roll(voice, int(rng.integers(len(voice))))
    wave = np.resize(shifted, n)
    wave = 0.05 * rng.uniform(0.4, 1.6) * wave / np.sqrt(np.mean(wave**2) + 1e-12)
    return np.clip(wave + rng.uniform(1e-4, 4e-3) * rng.standard_normal(n), -1, 1)


def short_clips(folder: Path) -> None:
    """2400 clips of 1 to 9 s, FLAC of 16 kHz, three hours and a half."""
    voices = _voices(16000)
    for i in range(2400):
        rng = np.random.default_rng([1, i])
        n = int(16000 * rng.uniform(1.0, 9.0))
        soundfile.write(folder / f"{i:05d}.flac", _clip(rng, voices[i % VOICES], n), 16000)


def long_recordings(folder: Path) -> None:
    """12 recordings of 4 to 9 min, WAV of 44.1 kHz in stereo."""
    voices = _voices(44100)
    for i in range(12):
        rng = np.random.default_rng([2, i])
        n = int(44100 * rng.uniform(240, 540))
        left = _clip(rng, voices[i % VOICES], n)
        right = 0.7 * left + _clip(rng, voices[(i + 1) % VOICES], n) * 0.3
        stereo = np.stack([left, right], axis=1)
        soundfile.write(folder / f"{i:03d}.wav", stereo, 44100, subtype="PCM_16")


def mixed_files(folder: Path) -> None:
    """700 files of 2 to 30 s: MP3, Ogg Vorbis, FLAC, WAV at five rates; one in fifty is damaged."""
    kinds = ((44100, "mp3"), (48000, "ogg"), (22050, "mp3"), (32000, "flac"), (8000, "wav"))
    voices = {rate_hz: _voices(rate_hz) for rate_hz, _ in kinds}
    for i in range(700):
        rng = np.random.default_rng([3, i])
        rate_hz, kind = kinds[int(rng.integers(len(kinds)))]
        n = int(rate_hz * rng.uniform(2.0, 30.0))
        wave = _clip(rng, voices[rate_hz][i % VOICES], n)
        path = folder / f"{i:04d}.{kind}"
        formats = {"ogg": ("OGG", "VORBIS"), "mp3": ("MP3", "MPEG_LAYER_III")}
        major, subtype = formats.get(kind, (kind.upper(), "PCM_16"))
        with soundfile.SoundFile(path, "w", rate_hz, 1, subtype, format=major) as file:
            for first in range(0, n, WRITE_FRAMES):
                file.write(wave[first : first + WRITE_FRAMES])
        if i % 50 == 7:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])


CORPORA = {
    "short": Corpus(
        "short clips, FLAC 16 kHz; Dau1997, Zarr, local",
        short_clips,
        [{"model": "dau1997", "fs_hz": 16000}],
        {"formats": ["zarr"], "shard_seconds": 600},
        {"executor": "local"},
    ),
    "long": Corpus(
        "long recordings, WAV 44.1 kHz stereo; Paulick2024, Parquet, Ray",
        long_recordings,
        [{"model": "paulick2024", "fs_hz": 44100}],
        {"formats": ["parquet"], "shard_seconds": 600},
        {"executor": "ray"},
    ),
    "mixed": Corpus(
        "mixed files, MP3, Vorbis, FLAC, WAV, five rates; Osses2021 and mfcc, both formats, "
        "two workers",
        mixed_files,
        [{"model": "osses2021", "fs_hz": 22050}, {"model": "mfcc", "fs_hz": 16000}],
        {"formats": ["zarr", "parquet"], "shard_seconds": 600, "dtype": "float32"},
        {"executor": "local", "workers": 2, "threads_per_worker": 1},
    ),
}


def _command(*arguments: str) -> list[dict[str, Any]]:
    """The JSON lines of a command of its own process."""
    command = [sys.executable, "-m", "earmill.jobs.cli", *arguments, "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr or done.stdout}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def measure(corpus: Corpus, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plan with its sample, and the last event of the run."""
    job = folder / "job.yaml"
    spec = {
        "source": {"kind": "files", "uri": str(folder / "corpus")},
        "extract": corpus.extract,
        "output": {"uri": str(folder / "features"), **corpus.output},
        "run": corpus.run,
    }
    job.write_text(json.dumps(spec))  # JSON is YAML
    (plan,) = _command("plan", str(job), "--sample", str(SAMPLE), "--seed", str(SEED))
    *_, end = _command("extract", str(job))
    return plan, end


def rows_of(end: dict[str, Any]) -> list[tuple[str, ...]]:
    """A line for each figure."""
    lines = []
    for name in SHOWN:
        value = end["estimate"][name]
        off = value["actual"] / value["expected"] - 1
        wanted = f"{WANTED[name]:.0%}" if name in WANTED else ""
        low, expected, high, actual = (
            amount(name, value[which]) for which in ("low", "expected", "high", "actual")
        )
        lines.append((NAMES[name], expected, f"{low} to {high}", actual, f"{off:+.1%}", wanted))
    return lines


def parts_of(plan: dict[str, Any], end: dict[str, Any]) -> str:
    """CPU seconds by part, expected and actual."""
    expected = plan["sample"]["cpu_parts"]
    return ", ".join(
        f"{part} {expected.get(part, 0.0):.1f} / {seconds:.1f}"
        for part, seconds in end["cpu_s"].items()
    )


def main() -> None:
    """Measure all, or those that are named; each has its section."""
    for name in sys.argv[1:] or CORPORA:
        corpus = CORPORA[name]
        with tempfile.TemporaryDirectory() as given:
            folder = Path(given)
            (folder / "corpus").mkdir()
            corpus.make(folder / "corpus")
            plan, end = measure(corpus, folder)
        sample = plan["sample"]
        body = (
            f"{corpus.name}: {plan['rows']:,} rows, {plan['hours']:.2f} h of audio. `earmill plan "
            f"--sample {SAMPLE} --seed {SEED}`, which tried "
            f"{sum(count for count, _ in sample['tried'].values())} rows in {sample['took_s']:.0f} "
            "s, then `earmill extract`; the job itself says what it took. Off is the actual figure "
            "over the expected one, less one.\n\n"
            f"{table(_HEAD, rows_of(end))}\n\nExpected to be bound by {sample['bound_by']}. CPU "
            f"seconds, expected / actual: {parts_of(plan, end)}."
        )
        write_section(f"Estimate: {name}", f"python -m benchmarks.estimate {name}", body)


if __name__ == "__main__":
    main()
