"""How long before a span a model must begin so that the span's features are those of the whole.

A recording of a day could be divided over workers if each began its part a little early. The table
has the largest difference to the features of the whole signal within ten seconds of a span, as a
part of the stream's largest value there, by how much earlier the model began.
"""

from __future__ import annotations

import numpy as np

from amtcore.features.build import build_extractor
from benchmarks.report import table, write_section
from earmill.jobs.demo_audio import speech

MODELS = ("dau1997", "osses2021", "king2019", "paulick2024", "glasberg2002", "moore2016")
FS_HZ = 32000
START_S, SPAN_S = 60.0, 10.0
EARLY_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0)
# 70 dB SPL.
LEVEL_RMS = 10 ** (70 / 20) * 2e-5


def errors(model: str, signal: np.ndarray) -> dict[str, list[str]]:
    """Stream -> difference for each of `EARLY_S`."""
    extractor = build_extractor(model, fs_hz=FS_HZ)
    stop = round((START_S + SPAN_S) * FS_HZ)
    whole = extractor.extract([signal[:stop]])[0]
    rates = {info.name: info.frame_rate_hz for info in extractor.streams}
    found: dict[str, list[str]] = {name: [] for name in whole}
    for early_s in EARLY_S:
        part = extractor.extract([signal[round((START_S - early_s) * FS_HZ) : stop]])[0]
        for name, values in whole.items():
            begin, skipped = round(START_S * rates[name]), round(early_s * rates[name])
            wanted, got = values[begin:], part[name][skipped:]
            n = min(len(wanted), len(got))
            worst = np.abs(wanted[:n].astype(np.float64) - got[:n]).max()
            found[name].append(f"{worst / np.abs(wanted).max():.0e}")
    return found


def main() -> None:
    """Measure and write the section."""
    wave = speech(np.random.default_rng(14), FS_HZ, START_S + SPAN_S)
    signal = (LEVEL_RMS * wave / np.sqrt(np.mean(wave**2))).astype(np.float32)
    rows = []
    for model in MODELS:
        for name, each in errors(model, signal).items():
            rows.append([model, name, *each])
            print(rows[-1], flush=True)
    head = ["model", "stream", *(f"{early_s:g} s" for early_s in EARLY_S)]
    note = (
        f"Generated speech at 70 dB SPL, {FS_HZ} Hz, a span that begins after {START_S:g} s; "
        "float32, whose rounding is 6e-8."
    )
    write_section(
        "Spans begun early", "python -m benchmarks.span_warmup", f"{note}\n\n{table(head, rows)}"
    )


if __name__ == "__main__":
    main()
