"""What watching a job costs: CPU time of one job with metrics, log lines and spans on and off.

Short clips through a cheap model, so that whatever is paid for a row or a shard shows. The ways
take turns, each round begins with another one, and a way's time is the least of its rounds. Time is
what the job itself counts from its first warm worker on, all its processes together; while metrics
are on, somebody scrapes them every second.

    python -m benchmarks.telemetry                 writes its section of RESULTS.md
    python -m benchmarks.telemetry PYTHON          also the job of another installation, all off
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path

import numpy as np
import soundfile

from benchmarks.report import table, write_section

CLIPS, CLIP_S, RATE_HZ = 1200, 1.0, 16000
SHARD_ROWS = 20
ROUNDS = 3
OFF, METRICS, ALL = "all off", "metrics and log lines", "the same and spans"
BEFORE = "all off, other installation"


def write_corpus(folder: Path) -> None:
    """Short distinct clips."""
    folder.mkdir(parents=True)
    for n in range(CLIPS):
        noise = np.random.default_rng(n).normal(0, 0.05, round(CLIP_S * RATE_HZ))
        soundfile.write(folder / f"{n:05d}.wav", noise, RATE_HZ)


def cpu_s(python: str, folder: Path, out: str, way: str) -> float:
    """Run the job in one way; CPU seconds of its work."""
    spec = {
        "source": {"kind": "files", "uri": str(folder / "corpus")},
        "extract": [{"model": "melspectrogram", "fs_hz": RATE_HZ}],
        "output": {"uri": str(folder / out), "formats": ["parquet"], "shard_rows": SHARD_ROWS},
        "run": {"executor": "local", "workers": 1, "threads_per_worker": 1},
    }
    job = folder / "job.json"
    job.write_text(json.dumps(spec))
    command = [python, "-m", "earmill.jobs.cli", "extract", str(job)]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    over, scraper = threading.Event(), None
    if way in (METRICS, ALL):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        command += ["--metrics", address, "--log-format", "json"]
        scraper = threading.Thread(target=_scrape, args=(address, over))
        scraper.start()
    else:
        command.append("--json")
    if way == ALL:
        environment["OTEL_TRACES_EXPORTER"] = "console"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment, cwd=folder
        )
    finally:
        over.set()
        if scraper is not None:
            scraper.join()
    (end,) = (
        event for event in map(json.loads, done.stdout.splitlines()) if event["event"] == "summary"
    )
    assert end["rows_ok"] == CLIPS, end
    return sum(seconds for part, seconds in end["cpu_s"].items() if part != "idle")


def _scrape(address: str, over: threading.Event) -> None:
    while not over.wait(1.0):
        with suppress(OSError), urllib.request.urlopen(f"http://{address}/metrics") as answer:
            answer.read()


def main() -> None:
    """Run all ways in turns and write the section."""
    ways = {OFF: sys.executable, METRICS: sys.executable, ALL: sys.executable}
    if len(sys.argv) > 1:
        ways[BEFORE] = sys.argv[1]
    times: dict[str, list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "corpus")
        for turn in range(ROUNDS):
            order = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
            for n, way in enumerate(order):
                times[way].append(cpu_s(ways[way], folder, f"out-{turn}-{n}", way))
                print(way, f"{times[way][-1]:.3f} s", flush=True)
    least = {way: min(found) for way, found in times.items()}
    rows = [
        [
            way,
            f"{1000 * seconds / CLIPS:.3f}",
            f"{seconds / least[OFF]:.3f}",
            f"{max(times[way]) / least[way]:.3f}",
        ]
        for way, seconds in least.items()
    ]
    head = ["way", "CPU ms a row", "of all off", "largest of its rounds / least"]
    body = (
        f"{CLIPS} clips of {CLIP_S:g} s, {SHARD_ROWS} a shard, melspectrogram to Parquet by one "
        f"process; least of {ROUNDS} rounds in turns; scraped every second with metrics on.\n\n"
        f"{table(head, rows)}"
    )
    write_section("Watching a job", "python -m benchmarks.telemetry", body)


if __name__ == "__main__":
    main()
