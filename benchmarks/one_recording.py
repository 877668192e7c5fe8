"""One long recording: in order by one worker, and in spans by one and by two workers.

Each worker has one thread and one core, like a machine of a cluster. Time counts from the first
warm worker to the written index, and includes the warm-up of the second worker. The values of both
ways are compared.

    python -m benchmarks.one_recording [MINUTES]
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import soundfile

from benchmarks.report import table, write_section
from benchmarks.workers import summary_of
from earmill import Recordings, open_features
from earmill.jobs.demo_audio import speech

RATE_HZ, VOICE_S, MINUTES, SPAN_S = 16000, 60, 60, 600
ROUNDS = 3
# Runs by name: spans, workers, cores.
WAYS = {
    "in order, one worker, one core": (False, 1, 1),
    "in spans, one worker, one core": (True, 1, 1),
    "in spans, two workers, two cores": (True, 2, 2),
}
FIRST, LAST = next(iter(WAYS)), list(WAYS)[-1]


def write_recording(path: Path, minutes: int) -> None:
    """Write minutes of speech; each minute is the same clip, begun at another place."""
    voice = speech(np.random.default_rng(14), RATE_HZ, VOICE_S)
    voice = np.clip(0.05 * voice / np.sqrt(np.mean(voice**2)), -1, 1)
    with soundfile.SoundFile(path, "w", RATE_HZ, 1, subtype="PCM_16") as file:
        for minute in range(minutes):
            file.write(np.roll(voice, 7919 * minute))


def seconds_of(root: Path, way: str) -> float:
    """Run a job with the output `root/way` and return its wall seconds."""
    spans, workers, cores = WAYS[way]
    out = root / way.replace(" ", "-").replace(",", "")
    spec = {
        "source": {"kind": "files", "uri": str(root / "in")},
        "audio": {"spans": {"seconds": SPAN_S} if spans else None},
        "extract": [{"model": "dau1997"}],
        "output": {"uri": str(out), "formats": ["zarr"], "shard_seconds": SPAN_S},
        "run": {
            "executor": "local",
            "workers": workers,
            "threads_per_worker": 1,
            "device": "cpu",
        },
    }
    shutil.rmtree(out, ignore_errors=True)
    return float(summary_of(spec, root / "job.yaml", cores)["wall_s"])


def apart(root: Path) -> float:
    """Return the largest difference between the two ways, in float16 roundings."""
    whole, spans = (
        Recordings(open_features(root / way.replace(" ", "-").replace(",", "")))
        for way in (FIRST, LAST)
    )
    worst = 0.0
    for start_s in range(0, int(whole.seconds(0)), SPAN_S):
        one, two = (
            each.slice(0, start_s, start_s + SPAN_S).features["modulation"]
            for each in (whole, spans)
        )
        assert one.shape == two.shape
        step = np.spacing(np.abs(one)).clip(2.0**-24)
        worst = max(worst, float((np.abs(one.astype(np.float64) - two) / step).max()))
    return worst


def main(minutes: int) -> None:
    """Measure by turns and write the section."""
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "in").mkdir()
        write_recording(root / "in" / "day.flac", minutes)
        for _ in range(ROUNDS):
            for way in WAYS:
                took[way].append(seconds_of(root, way))
                print(way, took[way], os.getloadavg(), flush=True)
        worst = apart(root)
    least = {way: min(found) for way, found in took.items()}
    lines = [
        [way, f"{least[way]:.1f}", f"{max(took[way]):.1f}", f"{least[FIRST] / least[way]:.2f}"]
        for way in WAYS
    ]
    head = ["way", "s, least", "s, most", "times as fast"]
    note = (
        f"{minutes} minutes of FLAC at {RATE_HZ} Hz, Dau1997 at 44.1 kHz to Zarr, spans of "
        f"{SPAN_S} s, one thread a worker; {ROUNDS} rounds by turns. Load of the machine at the "
        f"end: {os.getloadavg()[0]:.1f}. Values of the last way differ from those in order by at "
        f"most {worst:g} roundings of float16."
    )
    command = "python -m benchmarks.one_recording"
    write_section("One long recording", command, f"{note}\n\n{table(head, lines)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else MINUTES)
