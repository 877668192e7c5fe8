"""Warm-up that a model needs before a span, to compute the features of the whole recording.

The first table has the largest difference in ten seconds of a span, relative to the largest value
of the stream there, for several warm-up times. The second table has the difference after the
warm-up of a job with `audio.spans`. It includes the worst signal found: noise of 95 dB SPL until
the warm-up begins, and silence or near silence after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from amtcore.features.feature_model import Extractor
from amtcore.features.registry import build_extractor
from benchmarks.report import table, write_section
from earmill.jobs.demo_audio import speech
from earmill.pipeline.spec.spans import SpansSpec, warm_up_s

HILBERT: Mapping[str, Any] = {}
BANDS: Mapping[str, Any] = {"params": {"phase_insens": "none"}}
SPIKES: Mapping[str, Any] = {"streams": {"adaptation": {}, "spikes": {}}}
MODELS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "dau1997": ("dau1997", {}),
    "dau1997, spikes": ("dau1997", SPIKES),
    "osses2021": ("osses2021", {}),
    "king2019, Hilbert envelopes": ("king2019", HILBERT),
    "king2019, bands": ("king2019", BANDS),
    "paulick2024": ("paulick2024", {}),
    "glasberg2002": ("glasberg2002", {}),
    "moore2016": ("moore2016", {}),
    "melspectrogram": ("melspectrogram", {"params": {"n_fft": 1024}}),
}
ONLY_FLOAT32 = ("melspectrogram",)
FS_HZ = 32000
START_S, SPAN_S = 60, 10
EARLY_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0)
# Level of the speech; level of the worst case's noise; levels after the noise, relative to it.
SPEECH_DB, NOISE_DB = 70.0, 95.0
QUIET = (0.0, 1e-3)
# Full scale in dB SPL, as in jobs.
FULL_DB = 100.0


def signal_of(extractor: Extractor, wave: np.ndarray, level_db: float) -> np.ndarray:
    """Return the wave at a level, in the model's unit."""
    unit = 2e-5 if extractor.input_unit == "pa" else 10 ** (-FULL_DB / 20)
    return unit * 10 ** (level_db / 20) * wave / np.sqrt(np.mean(wave**2))


def dense(values: Any) -> np.ndarray:
    """Return frames, or counts of events, in float64."""
    return np.asarray(values.dense() if hasattr(values, "dense") else values, np.float64)


def ends(extractor: Extractor, signal: np.ndarray, early_s: float) -> Iterator[tuple[Any, ...]]:
    """Yield each stream with its frames from START_S: of the whole, of the span, and before."""
    stop = (START_S + SPAN_S) * FS_HZ
    as_typed = signal[:stop].astype(extractor.dtype)
    whole = extractor.extract([as_typed])[0]
    part = extractor.extract([as_typed[round((START_S - early_s) * FS_HZ) :]])[0]
    for info in extractor.streams:
        all_frames, frames = dense(whole[info.name]), dense(part[info.name])
        begin, skipped = (round(s * info.frame_rate_hz) for s in (START_S, early_s))
        count = min(len(all_frames) - begin, len(frames) - skipped)
        yield (
            info.name,
            all_frames[begin:][:count],
            frames[skipped:][:count],
            np.abs(all_frames).max(),
        )


def by_how_early(wave: np.ndarray) -> list[list[str]]:
    """Return the rows of the first table."""
    rows = []
    for name, (model, options) in MODELS.items():
        extractor = build_extractor(model, fs_hz=FS_HZ, **options)
        signal = signal_of(extractor, wave, SPEECH_DB)
        found: dict[str, list[str]] = {info.name: [] for info in extractor.streams}
        for early_s in EARLY_S:
            for stream, wanted, got, _ in ends(extractor, signal, early_s):
                worst = np.abs(wanted - got).max() / np.abs(wanted).max()
                found[stream].append(f"{worst:.0e}")
        rows += [[name, stream, *cells] for stream, cells in found.items()]
        print(rows[-1], flush=True)
    return rows


def after_warm_up(wave: np.ndarray) -> list[list[str]]:
    """Return the rows of the second table."""
    rng, rows = np.random.default_rng(95), []
    for name, (model, options) in MODELS.items():
        one = build_extractor(model, fs_hz=FS_HZ, **options)
        two = one
        if model not in ONLY_FLOAT32:
            two = build_extractor(model, fs_hz=FS_HZ, dtype="float64", **options)
        if one.memory_s is None:
            rows += [[name, info.name, "whole clips", *["no spans"] * 5] for info in one.streams]
            continue
        early_s = warm_up_s(SpansSpec(seconds=10_000), [one], [name])
        spoken = signal_of(one, wave, SPEECH_DB)
        cut = (START_S - early_s) * FS_HZ
        noise = signal_of(one, rng.standard_normal(len(wave)), NOISE_DB)
        for number, info in enumerate(one.streams):
            cells = [f"{_worst(one, number, spoken, early_s):.0e}"]
            hard = [np.concatenate((noise[:cut], quiet * noise[cut:])) for quiet in QUIET]
            for extractor in (two, one):
                worst = max(_worst(extractor, number, each, early_s) for each in hard)
                cells.append("" if model in ONLY_FLOAT32 and extractor is two else f"{worst:.0e}")
            own = max(_apart(one, two, number, each) for each in hard)
            cells.append("" if one is two else f"{own:.0e}")
            rows.append([name, info.name, f"{one.memory_s:.3g} s", f"{early_s} s", *cells])
            print(rows[-1], flush=True)
    return rows


def _worst(extractor: Extractor, number: int, signal: np.ndarray, early_s: float) -> float:
    _, wanted, got, largest = list(ends(extractor, signal, early_s))[number]
    return float(np.abs(wanted - got).max() / largest)


def _apart(one: Extractor, two: Extractor, number: int, signal: np.ndarray) -> float:
    """Return the difference between float32 and float64 there."""
    (_, a, _, largest), (_, b, _, _) = (list(ends(e, signal, 0.0))[number] for e in (one, two))
    return float(np.abs(a - b).max() / largest)


def main() -> None:
    """Measure and write both sections."""
    wave = speech(np.random.default_rng(14), FS_HZ, START_S + SPAN_S)
    head = ["model", "stream", *(f"{early_s:g} s" for early_s in EARLY_S)]
    first = table(head, by_how_early(wave))
    head = [
        "model",
        "stream",
        "forgets with",
        "warm-up",
        "speech, float32",
        "worst, float64",
        "worst, float32",
        "float32 from float64 there",
    ]
    second = table(head, after_warm_up(wave))
    note = (
        f"Generated speech at {SPEECH_DB:g} dB SPL, {FS_HZ} Hz, a span that begins after "
        f"{START_S:g} s; float32, whose rounding is 6e-8. Of the stream's largest value there, "
        "by how much earlier the model began:"
    )
    warm = (
        "After the warm-up that `audio.spans` takes, of the stream's largest value (of spikes: of "
        f"the most in a step). Worst: {NOISE_DB:g} dB of noise until the warm-up begins, then "
        "silence, or 60 dB less. In float32 the adaptation loops stand still a little before they "
        "have settled, in order as in spans: the last column is how far that is from float64:"
    )
    command = "python -m benchmarks.span_warmup"
    write_section("Spans begun early", command, f"{note}\n\n{first}")
    write_section("Spans after their warm-up", command, f"{warm}\n\n{second}")


if __name__ == "__main__":
    main()
