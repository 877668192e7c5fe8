"""Run every benchmark that needs no GPU, each in its own process with cold caches."""

from __future__ import annotations

import subprocess
import sys

SCRIPTS = (
    "exactness",
    "startup",
    "scale",
    "crowd",
    "streamed_source",
    "workers",
    "one_recording",
    "models",
    "training",
    "lif",
    "loudness",
    "alternatives",
    "job",
    "stand_in_device",
    "eight_models",
    "stereo_job",
    "decoding",
    "long_files",
    "span_warmup",
    "path_length",
    "loader",
    "int8",
    "reader",
    "remote_reader",
    "cost",
)


def main() -> None:
    """Run all scripts in order; stop at the first that fails."""
    for script in SCRIPTS:
        subprocess.run([sys.executable, "-m", f"benchmarks.{script}"], check=True)


if __name__ == "__main__":
    main()
