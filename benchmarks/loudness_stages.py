"""Where the time of the loudness models goes, against a bound; processor time on one thread.

The bound is what nobody leaves out who computes these models: the six windows' transforms of every
frame, as whole FFTs or as the products here, whichever costs less, and one exponential for every
node below a channel. The yardstick is the six FFTs alone: `BEFORE` states the time before frames
were folded and components met at nodes in yardsticks, measured in turns with this code in one run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from amtcore import get_num_threads, set_num_threads
from amtcore.features.build import build_extractor
from amtcore.kernels.ops.roex import lower_skirt
from amtcore.kernels.vector.elementary import vdecay
from amtcore.kernels.vector.simd import LANES, vload, vsplat, vsum
from amtcore.kernels.vector.threads import parallel_for
from amtcore.models.glasberg2002 import Glasberg2002
from amtcore.models.loudness import LoudnessModel
from amtcore.models.moore2016 import Moore2016
from amtcore.stages.base import product
from amtcore.stages.spectrum import faintest, inaudible, level_db
from benchmarks.report import table

#: Processor time of a second of audio in yardsticks at commit db1605b, by model and signal.
BEFORE = {
    ("moore2016", "noise"): 0.0,
    ("moore2016", "speech"): 0.0,
    ("glasberg2002", "noise"): 0.0,
    ("glasberg2002", "speech"): 0.0,
}
_SECONDS, _REPEATS = 4.0, 12
_FRAMES_S = 1000
_HEAD = ("model", "signal", "ear", "spectra", "nodes", "level per ERB", "slopes below",
         "slopes above, dB", "specific loudness", "the rest", "all", "bound: FFTs (products) + exp",
         "over bound", "in FFTs: before, now", "faster")  # fmt: skip
SignalOf = Callable[[str, int, float], np.ndarray]


def _least_ms(call: Callable[[], Any], repeats: int = 40) -> float:
    """Processor time of the quickest call."""
    call()
    best = float("inf")
    for _ in range(repeats):
        begin = time.thread_time()
        call()
        best = min(best, time.thread_time() - begin)
    return 1e3 * best


@njit
def _exponentials(values: Any, count: int) -> float:
    total = vsplat(values, 0.0)
    for _ in range(0, count, len(values)):
        for at in range(0, len(values), LANES):
            total = total + vdecay(vload(values, at))
    return vsum(total)


def _exponentials_ms(model: LoudnessModel, ears: int) -> float:
    """Of every node below a channel, for a second."""
    excitation: Any = getattr(model, "excitation", None) or model.get_submodule(
        "excitation_pattern"
    )
    pairs = int((excitation.nodes_hz[:, None] < excitation.fc).sum())
    values = np.linspace(-30.0, 0.0, 32 * LANES, dtype=np.float32)
    return ears * _FRAMES_S * _least_ms(lambda: _exponentials(values, 50 * pairs)) / 50


def ffts_ms(ears: int) -> float:
    """The yardstick: the six windows' FFTs of a second of frames, 1 ms apart."""
    total = 0.0
    for length in (2048, 1024, 512, 256, 128, 64):
        frames = torch.randn(ears * 128, length)
        total += _least_ms(lambda frames=frames: torch.fft.rfft(frames))
    return total * _FRAMES_S / 128


def _stages_ms(model: LoudnessModel, block: Tensor) -> dict[str, float]:
    """Of a second, from one block of 128 frames."""
    spectrum, made = model.running_spectrum, {}
    response = model.ear.response(model.ear.taps(), block.shape[-1])
    heard = model.ear.filter_by(block, response)
    intensity = spectrum.intensities(heard)
    if isinstance(model, Moore2016):
        filters: Any = model.excitation
        of_nodes = lambda: filters.at_nodes(intensity, faintest(intensity))  # noqa: E731
        weights = filters.derived("between_nodes", "fc")
        levels = lambda: level_db(product(of_nodes(), weights))  # noqa: E731
    else:
        assert isinstance(model, Glasberg2002)
        filters, bands = model.excitation_pattern, model.erb_integration
        of_nodes = lambda: bands.at_nodes(intensity[:, 0], inaudible(intensity))  # noqa: E731
        levels = lambda: filters.levels_at_nodes(bands.of_nodes(of_nodes()))  # noqa: E731
    nodes, slopes = of_nodes(), filters.relative_slope(levels())
    excitation = filters.pattern(nodes, levels())
    rows = nodes.flatten(0, -2), slopes.flatten(0, -2)
    rate = filters.derived("rate", "lower_slope_base", "fc")
    law: Any = model.get_submodule("specific_loudness")
    made["ear"] = _least_ms(lambda: model.ear.filter_by(block, response))
    made["spectra"] = _least_ms(lambda: spectrum.intensities(heard))
    made["nodes"] = _least_ms(of_nodes)
    made["level"] = _least_ms(levels) - made["nodes"]
    made["below"] = _least_ms(lambda: lower_skirt(*rows, rate, filters.fc, filters.nodes_hz))
    whole = _least_ms(lambda: filters.pattern(nodes, levels()))
    made["above"] = whole - made["level"] - made["nodes"] - made["below"]
    made["law"] = _least_ms(lambda: law(excitation))
    return {name: ms * _FRAMES_S / 128 for name, ms in made.items()}


def _row(name: str, kind: str, ears: int, signal_of: SignalOf) -> tuple[str, ...]:
    streams: dict[str, dict[str, Any]] = {"short_term_loudness": {}, "long_term_loudness": {}}
    extractor: Any = build_extractor(name, streams=streams, threads=1)
    clip, model = signal_of(kind, ears, _SECONDS), extractor._module
    stages: dict[str, float] = {}

    def measure(_: int) -> None:
        with torch.no_grad():
            signal = torch.from_numpy(clip).reshape(1, ears, -1)
            grid = model.grid()
            segments, _state = grid.split(signal, grid.start(signal))
            stages.update(_stages_ms(model, segments[len(segments) // 2].x))

    # On a thread of the kernels, as blocks are.
    parallel_for(measure, 1)
    best = float("inf")
    for _ in range(_REPEATS):
        begin = time.process_time()
        extractor.extract([clip])
        best = min(best, time.process_time() - begin)
    every, ffts, exps = 1e3 * best / _SECONDS, ffts_ms(ears), _exponentials_ms(model, ears)
    bound, before = min(ffts, stages["spectra"]) + exps, BEFORE[name, kind]
    return (
        name, kind, *(f"{ms:.1f}" for ms in stages.values()),
        f"{every - sum(stages.values()):.1f}", f"{every:.1f}",
        f"{ffts:.1f} ({stages['spectra']:.1f}) + {exps:.1f}", f"{every / bound:.1f}",
        f"{before:.2f}, {every / ffts:.2f}", f"{before * ffts / every:.2f}",
    )  # fmt: skip


def stages_table(signal_of: SignalOf) -> str:
    """Milliseconds of processor time for a second of audio, by stage; all models and signals."""
    threads, torchs = get_num_threads(), torch.get_num_threads()
    try:
        set_num_threads(1)
        torch.set_num_threads(1)
        rows = [
            _row(name, kind, ears, signal_of)
            for name, ears in (("moore2016", 2), ("glasberg2002", 1))
            for kind in ("noise", "speech")
        ]
    finally:
        set_num_threads(threads)
        torch.set_num_threads(torchs)
    return table(_HEAD, rows)
