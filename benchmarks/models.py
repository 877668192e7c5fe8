"""Speed of every time-domain model against a plain loop and scipy, in seconds of audio per second.

Features are pooled to 100 Hz by `build_extractor(...).extract`, as in a job. The plain loop is the
project's reference backend at full rate, on 20 ms; its cost is per sample, so its rate is scaled to
a second. The scipy pipelines run on one second.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from amtcore import set_num_threads
from amtcore.features.filterbank_model import FilterbankModel
from amtcore.features.registry import build_extractor, get_model
from amtcore.models.time_domain import TimeDomainModel
from benchmarks.kernel import BATCH, CLIP_S, FS_HZ, LOOP_S, clips_of, rate_of
from benchmarks.report import table, write_section
from benchmarks.scipy_models import PIPELINES

THREADS = 2
_SCIPY_S = 1.0
_HEAD = ("model", "wanted", "speech", "noise", "plain loop", "scipy", "against loop, scipy")


@dataclass(frozen=True)
class Case:
    """A model with its parameters and its wanted speed."""

    label: str
    model: str
    wanted: str
    params: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("Dau1997", "dau1997", ""),
    Case("Osses2021", "osses2021", "80"),
    Case("King2019, phase_insens='none'", "king2019", "100", {"phase_insens": "none"}),
    Case("King2019, Hilbert envelope", "king2019", "15"),
    Case("Paulick2024", "paulick2024", "20"),
)


def signals_of(model: Any, kind: str) -> list[np.ndarray]:
    """Return the clips in the model's unit: an amplitude of 1 is 2 Pa if RMS 1 is 100 dB SPL."""
    scale = np.float32(2.0 if model.input_unit == "pa" else 1.0)
    return [scale * clip for clip in clips_of(kind)]


def _loop_rate(model: Any) -> float:
    """Return the rate of the reference backend in float32, after a call on a few samples."""
    for stage in model.modules():
        if hasattr(stage, "backend"):
            stage.backend = "reference"
    x = torch.from_numpy(signals_of(model, "speech")[0][: int(LOOP_S * FS_HZ)])
    with torch.no_grad():
        model(x[:50])
        return rate_of(lambda: model(x), LOOP_S, repeats=1)


def _scipy_rate(case: Case, model: Any) -> float | None:
    """Return the rate of the scipy pipeline; None if scipy has no such recurrences."""
    if case.model not in PIPELINES:
        return None
    samples = int(_SCIPY_S * FS_HZ)
    wave = signals_of(model, "speech")[0][samples : 2 * samples].astype(np.float64)
    _check(case, wave, np.asarray(PIPELINES[case.model](model, wave)))
    return rate_of(lambda: PIPELINES[case.model](model, wave), _SCIPY_S, repeats=2)


def _check(case: Case, wave: np.ndarray, pooled: np.ndarray) -> None:
    """Check that the baseline computes the same features."""
    ours = build_extractor(case.model, fs_hz=FS_HZ, params=case.params, dtype="float64")
    (frames,) = ours.extract([wave])[0].values()
    error = np.linalg.norm(frames.T - pooled) / np.linalg.norm(pooled)
    if not error < 1e-3:
        raise SystemExit(f"{case.label}: the scipy pipeline differs by {error:.1e}")


def _module(case: Case) -> TimeDomainModel:
    found = get_model(case.model)
    assert isinstance(found, FilterbankModel)
    return found.module(FS_HZ, case.params)


def _row(case: Case) -> tuple[str, ...]:
    model = _module(case)
    extractor = build_extractor(case.model, fs_hz=FS_HZ, params=case.params, threads=THREADS)
    rates = []
    for kind in ("speech", "noise"):
        clips = signals_of(model, kind)
        extractor.extract(clips)
        rates.append(rate_of(lambda c=clips: extractor.extract(c), BATCH * CLIP_S))
    scipy = _scipy_rate(case, model)
    loop = _loop_rate(model)
    return (
        case.label,
        case.wanted,
        *(f"{rate:.0f}" for rate in rates),
        f"{loop:.4f}",
        "" if scipy is None else f"{scipy:.2f}",
        f"{rates[0] / loop:.0f}" + ("" if scipy is None else f", {rates[0] / scipy:.0f}"),
    )


def main() -> None:
    """Measure and write the section."""
    set_num_threads(THREADS)
    torch.set_num_threads(THREADS)
    begin = time.perf_counter()
    rows = [_row(case) for case in CASES]
    note = (
        f"Seconds of audio per second, {THREADS} threads, float32, {FS_HZ} Hz, {BATCH} clips of "
        f"{CLIP_S:g} s at 74 dB SPL, pooled to 100 Hz; best of five runs. The plain loop is the "
        f'same model with `backend="reference"` on {1000 * LOOP_S:g} ms, extrapolated to a '
        "second. The scipy pipelines (one thread, float64, one second of speech) make the same "
        "features with `lfilter` and `sosfilt` and, for the adaptation loops, a numpy loop over "
        "samples with all channels at once; Paulick2024's hair cell leaves nothing to `lfilter`. "
        f"The whole section took {time.perf_counter() - begin:.0f} s."
    )
    write_section("Models", "python -m benchmarks.models", note + "\n\n" + table(_HEAD, rows))


if __name__ == "__main__":
    main()
