"""Speed of alternatives: torchaudio's features, scipy's filters, a plain loop.

One run, one set of clips, all cores. Models make different amounts of numbers. So the table has the
numbers of a second of audio, and two costs: of a second of audio, and of a million numbers. CPU
time covers the whole process with its threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from amtcore import Dau1997, set_num_threads
from amtcore.features.registry import build_extractor
from benchmarks.kernel import BATCH, CLIP_S, FS_HZ, LOOP_S, clips_of
from benchmarks.report import table, write_section
from benchmarks.scipy_models import PIPELINES

THREADS = 2
REPEATS = 5
SCIPY_S = 1.0
N_FFT, HOP, N_MELS, N_MFCC = 2048, 441, 80, 20
_HEAD = (
    "features",
    "numbers per second of audio",
    "audio s per s",
    "audio s per CPU s",
    "million numbers per s",
    "million numbers per CPU s",
)
OURS = ("dau1997", "osses2021", "king2019", "paulick2024", "glasberg2002", "moore2016")


@dataclass(frozen=True)
class Measured:
    """The best of several runs.

    Args:
        audio_s: Seconds of audio in a run.
        numbers: Output values of a run.
        wall_s: Least wall time.
        cpu_s: Least CPU time.
    """

    audio_s: float
    numbers: int
    wall_s: float
    cpu_s: float

    def row(self, name: str) -> tuple[str, ...]:
        """Return the row of the table."""
        millions = self.numbers / 1e6
        return (
            name,
            f"{self.numbers / self.audio_s:.0f}",
            f"{self.audio_s / self.wall_s:.4g}",
            f"{self.audio_s / self.cpu_s:.4g}",
            f"{millions / self.wall_s:.3g}",
            f"{millions / self.cpu_s:.3g}",
        )


def measure(run: Callable[[], int], audio_s: float, repeats: int = REPEATS) -> Measured:
    """Time a function that returns the number of its output values."""
    numbers = run()
    walls, cpus = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return Measured(audio_s, numbers, min(walls), min(cpus))


def _of_torchaudio(clips: list[np.ndarray]) -> list[tuple[str, Callable[[], int]]]:
    """Return runs that extract clip by clip, as for clips of different lengths."""
    import torchaudio

    mel = torchaudio.transforms.MelSpectrogram(FS_HZ, n_fft=N_FFT, hop_length=HOP, n_mels=N_MELS)
    melkwargs = {"n_fft": N_FFT, "hop_length": HOP, "n_mels": N_MELS}
    mfcc = torchaudio.transforms.MFCC(FS_HZ, n_mfcc=N_MFCC, melkwargs=melkwargs)
    waves = [torch.from_numpy(clip) for clip in clips]

    def log_mel() -> int:
        return sum((mel(wave) + 1e-10).log().numel() for wave in waves)

    def cepstra() -> int:
        return sum(mfcc(wave).numel() for wave in waves)

    return [("torchaudio log MelSpectrogram", log_mel), ("torchaudio MFCC", cepstra)]


def _of_earmill(name: str, clips: list[np.ndarray]) -> Callable[[], int]:
    """Return a run at the model's own rate; clips are cut to the same number of seconds."""
    fs_hz = 32000 if name == "moore2016" else FS_HZ
    extractor = build_extractor(name, fs_hz=fs_hz, threads=THREADS)
    # 74 dB SPL: an RMS of 1 is 100 dB SPL, or 2 Pa.
    scale = np.float32(2.0 if extractor.input_unit == "pa" else 1.0)
    clips = [scale * clip[: int(CLIP_S * fs_hz)] for clip in clips]

    def run() -> int:
        found = extractor.extract(clips)
        return sum(frames.size for features in found for frames in features.values())

    return run


def _of_scipy(clip: np.ndarray) -> Callable[[], int]:
    model = Dau1997(FS_HZ)
    wave = clip[: int(SCIPY_S * FS_HZ)].astype(np.float64)
    return lambda: PIPELINES["dau1997"](model, wave).size


def _of_plain_loop(clip: np.ndarray) -> Callable[[], int]:
    """Return a run at full rate; it counts the numbers that pooling would leave."""
    model = Dau1997(FS_HZ)
    for stage in (model.filterbank, model.ihc, model.adaptation, model.modulation):
        stage.backend = "reference"
    wave = torch.from_numpy(clip[: int(LOOP_S * FS_HZ)])
    kept = round(LOOP_S * 100) * int(model.modulation.offsets[-1])

    def run() -> int:
        model(wave)
        return kept

    return run


def main() -> None:
    """Measure and write the section."""
    set_num_threads(THREADS)
    torch.set_num_threads(THREADS)
    clips = clips_of("speech")
    total_s = BATCH * CLIP_S
    with torch.no_grad():
        rows = [measure(run, total_s).row(name) for name, run in _of_torchaudio(clips)]
        rows += [measure(_of_earmill(name, clips), total_s).row(f"earmill {name}") for name in OURS]
        rows.append(measure(_of_scipy(clips[0]), SCIPY_S, 2).row("scipy, the filters of Dau1997"))
        rows.append(measure(_of_plain_loop(clips[0]), LOOP_S, 1).row("plain loop of Dau1997"))
    note = (
        f"{BATCH} clips of {CLIP_S:g} s of speech at {FS_HZ} Hz, float32, {THREADS} threads; "
        f"best of {REPEATS} runs. torchaudio: {N_MELS} bands, {N_MFCC} coefficients, windows of "
        f"{N_FFT}, hops of {HOP}, clip by clip. earmill: every default stream at 100 Hz or "
        f"as the model has it, mono. scipy: one thread, float64, {SCIPY_S:g} s of one clip. Plain "
        f"loop: {1000 * LOOP_S:g} ms of one clip, at full rate."
    )
    command = "python -m benchmarks.alternatives"
    write_section(
        "Against what one would pick instead", command, note + "\n\n" + table(_HEAD, rows)
    )


if __name__ == "__main__":
    main()
