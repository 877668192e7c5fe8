"""Times real time of the models of frames on one core, beside programs that others offer.

Every case runs in a process of its own on one thread: ten seconds of noise, the best of several
runs, then ten minutes for the peak memory. Programs that are not installed are left out:
`uv pip install pyloudnorm mosqito pystoi` and SRMRpy from its repository.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.report import peak_mb, reset_peak_mb, table, write_section

SECONDS, LONG_S, REPEATS, MOST_S = 10.0, 600.0, 3, 20.0
#: Model, parameters and streams of each case.
OURS: Mapping[str, tuple[str, Mapping[str, Any], tuple[str, ...]]] = {
    "zwicker: n": ("zwicker", {}, ("n",)),
    "zwicker: n, n_spec, sharpness": ("zwicker", {}, ("n", "n_spec", "sharpness")),
    "roughness": ("roughness", {}, ("r",)),
    "programme_loudness": ("programme_loudness", {}, ("integrated", "true_peak")),
    "srmr, fast": ("srmr", {"fast": True}, ("score",)),
    "srmr": ("srmr", {}, ("score",)),
    "stoi": ("stoi", {}, ("stoi",)),
    "stoi, estoi": ("stoi", {}, ("stoi", "estoi")),
    "carfac": ("carfac", {}, ("nap",)),
    "auditory_nerve": ("auditory_nerve", {}, ("rates",)),
    "cochleagram": ("cochleagram", {}, ("cochleagram",)),
    "auditory_spectrogram": ("auditory_spectrogram", {}, ("spectrogram",)),
    "rate_scale": ("rate_scale", {}, ("rate_scale",)),
    "modulation_spectrum": ("modulation_spectrum", {}, ("energy",)),
    "king2019": ("king2019", {}, ("modulation",)),
    "dau1997": ("dau1997", {}, ("modulation",)),
}


def _ours(name: str, seconds: float) -> Callable[[], object]:
    from amtcore import set_num_threads
    from amtcore.features.registry import build_extractor

    set_num_threads(1)
    model, params, streams = OURS[name]
    extractor = build_extractor(model, params=params, streams=dict.fromkeys(streams))
    clip = _noise(extractor.fs_hz, seconds, min(extractor.input_channels))
    return lambda: extractor.extract([clip])


def _noise(fs_hz: float, seconds: float, channels: int = 1) -> np.ndarray:
    axes = (round(fs_hz * seconds),) if channels == 1 else (channels, round(fs_hz * seconds))
    return (0.05 * np.random.default_rng(0).standard_normal(axes)).astype(np.float32)


def _pyloudnorm(seconds: float) -> Callable[[], object]:
    import pyloudnorm

    clip, meter = _noise(48000, seconds).astype(float), pyloudnorm.Meter(48000)
    return lambda: meter.integrated_loudness(clip)


def _mosqito_loudness(seconds: float) -> Callable[[], object]:
    from mosqito.sq_metrics import loudness_zwtv

    clip = _noise(48000, seconds).astype(float)
    return lambda: loudness_zwtv(clip, 48000)


def _mosqito_roughness(seconds: float) -> Callable[[], object]:
    from mosqito.sq_metrics import roughness_dw

    clip = _noise(48000, seconds).astype(float)
    return lambda: roughness_dw(clip, 48000)


def _pystoi(extended: bool) -> Callable[[float], Callable[[], object]]:
    def prepared(seconds: float) -> Callable[[], object]:
        from pystoi import stoi

        clean, noise = _noise(16000, seconds, 2)
        return lambda: stoi(clean, clean + noise, 16000, extended=extended)

    return prepared


def _srmrpy(fast: bool) -> Callable[[float], Callable[[], object]]:
    def prepared(seconds: float) -> Callable[[], object]:
        from srmrpy import srmr

        clip = _noise(16000, seconds).astype(float)
        return lambda: srmr(clip, 16000, fast=fast)

    return prepared


#: By name: the package, what it is compared with, and how it is prepared.
OTHERS: Mapping[str, tuple[str, Callable[[float], Callable[[], object]]]] = {
    "pyloudnorm: integrated": ("pyloudnorm", _pyloudnorm),
    "MoSQITo: loudness_zwtv": ("mosqito", _mosqito_loudness),
    "MoSQITo: roughness_dw": ("mosqito", _mosqito_roughness),
    "pystoi": ("pystoi", _pystoi(False)),
    "pystoi, extended": ("pystoi", _pystoi(True)),
    "SRMRpy, fast": ("srmrpy", _srmrpy(True)),
    "SRMRpy": ("srmrpy", _srmrpy(False)),
}


def measured(name: str) -> dict[str, float | None]:
    """Return the least seconds of a run, and the peak memory of ten minutes if that is no wait."""
    prepared = OTHERS[name][1] if name in OTHERS else lambda seconds: _ours(name, seconds)
    run, found = prepared(SECONDS), []
    run()
    begun = time.perf_counter()
    while len(found) < REPEATS and (not found or time.perf_counter() - begun < MOST_S):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    if min(found) * LONG_S / SECONDS > MOST_S:
        return {"s": min(found), "mb": None}
    run = prepared(LONG_S)
    before = reset_peak_mb()
    run()
    return {"s": min(found), "mb": peak_mb() - before}


def main() -> None:
    """Measure every case in a process of its own, and write the section."""
    names = [*OURS, *(n for n, (pack, _) in OTHERS.items() if importlib.util.find_spec(pack))]
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    rows = []
    for name in names:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.sound_models", name],
            env=os.environ | one, stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
        made = json.loads(done.stdout.splitlines()[-1])
        memory = "not measured" if made["mb"] is None else f"{made['mb']:.0f}"
        rows.append((name, f"{SECONDS / made['s']:.3g}", memory))
        print(*rows[-1])
    note = (
        f"Noise of {SECONDS:g} s at the model's usual rate, float32 (float64 for other programs), "
        f"one thread, the best of {REPEATS}. Memory is what ten minutes take beside the program."
    )
    head = ("model or program", "times real time", "MB for ten minutes")
    write_section(
        "Sound quality, cochleas, modulation", "python -m benchmarks.sound_models",
        f"{note}\n\n{table(head, rows)}",
    )  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(measured(sys.argv[1])))
    else:
        main()
