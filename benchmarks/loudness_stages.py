"""CPU time of the loudness models by stage, beside a bound and an earlier commit; one thread.

The bound is the cost of a complete computation. It has two parts: the transforms of the six windows
for every frame, as FFTs or as the products here, whichever costs less; and one exponential for
every node below a channel. (Kernels skip nodes that add nothing.) The earlier commit `BEFORE` and
this tree are measured by turns, with the same script in processes of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from amtcore import get_num_threads, set_num_threads
from amtcore.features.registry import build_extractor
from amtcore.kernels.vector.elementary import vdecay
from amtcore.kernels.vector.simd import LANES, vload, vsplat, vsum
from amtcore.kernels.vector.threads import parallel_for
from amtcore.models.glasberg2002 import Glasberg2002
from amtcore.models.loudness import LoudnessModel
from amtcore.models.moore2016 import Moore2016
from amtcore.stages.spectrum import faintest, inaudible
from benchmarks.report import table

#: The last commit before frames were folded and components met at nodes.
BEFORE = "db1605b"
_TURNS = 3
_SECONDS, _FRAMES_S = 4.0, 1000
_HEAD = ("model", "signal", "ear", "spectra", "nodes", "level per ERB", "patterns",
         "specific loudness", "the rest", "all", "bound: FFTs (products) + exp",
         "over bound", "all before", "faster")  # fmt: skip
SignalOf = Callable[[str, int, float], np.ndarray]


def _least_ms(call: Callable[[], Any], repeats: int = 40) -> float:
    """Return the least CPU time of a call."""
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
    """Return the time of the exponentials of every node below a channel, for a second."""
    excitation: Any = getattr(model, "excitation", None) or model.get_submodule(
        "excitation_pattern"
    )
    pairs = int((excitation.nodes_hz[:, None] < excitation.fc).sum())
    values = np.linspace(-30.0, 0.0, 32 * LANES, dtype=np.float32)
    return ears * _FRAMES_S * _least_ms(lambda: _exponentials(values, 50 * pairs)) / 50


def _ffts_ms(ears: int) -> float:
    """Return the time of the six windows' FFTs for a second of frames, 1 ms apart."""
    total = 0.0
    for length in (2048, 1024, 512, 256, 128, 64):
        frames = torch.randn(ears * 128, length)
        total += _least_ms(lambda frames=frames: torch.fft.rfft(frames))
    return total * _FRAMES_S / 128


def _stages_ms(model: LoudnessModel, block: Tensor) -> dict[str, float]:
    """Return the times of the stages for a second, from (block, ear, time) of 128 frames."""
    spectrum, made = model.running_spectrum, {}
    response = model.ear.response(model.ear.taps(), block.shape[-1])
    heard = model.ear.filter_by(block, response)
    intensity = spectrum.intensities(heard)
    if isinstance(model, Moore2016):
        filters: Any = model.excitation
        of_nodes = lambda: filters.at_nodes(intensity, faintest(intensity))  # noqa: E731
        levels = lambda: filters.levels_db(of_nodes(), "between_nodes", "fc")  # noqa: E731
    else:
        assert isinstance(model, Glasberg2002)
        filters, bands = model.excitation_pattern, model.erb_integration
        of_nodes = lambda: bands.at_nodes(intensity[:, 0], inaudible(intensity))  # noqa: E731
        levels = lambda: bands.of_nodes(of_nodes())  # noqa: E731
    nodes, levels_db = of_nodes(), levels()
    excitation = filters.pattern(nodes, levels_db)
    law: Any = model.get_submodule("specific_loudness")
    made["ear"] = _least_ms(lambda: model.ear.filter_by(block, response))
    made["spectra"] = _least_ms(lambda: spectrum.intensities(heard))
    made["nodes"] = _least_ms(of_nodes)
    made["level"] = _least_ms(levels) - made["nodes"]
    made["patterns"] = _least_ms(lambda: filters.pattern(nodes, levels_db))
    made["law"] = _least_ms(lambda: law(excitation))
    return {name: ms * _FRAMES_S / (128 * len(block)) for name, ms in made.items()}


#: Script that prints the least CPU time of a second of audio in ms, for every clip.
_WHOLE = """
import json, sys, time
import numpy as np
from amtcore import set_num_threads
from amtcore.features.registry import build_extractor
streams = {"short_term_loudness": {}, "long_term_loudness": {}}
made = {}
for key, path in json.loads(sys.argv[1]).items():
    clip = np.load(path)
    extractor = build_extractor(key.split()[0], streams=streams, threads=1)
    extractor.extract([clip])
    times = []
    for _ in range(6):
        begin = time.process_time()
        extractor.extract([clip])
        times.append(time.process_time() - begin)
    made[key] = 1e3 * min(times) * 32000 / clip.shape[-1]
print(json.dumps(made))
"""


def _whole_ms(tree: Path, clips: dict[str, str]) -> dict[str, float]:
    """Return the times of every model and signal, with the code of a work tree."""
    done = subprocess.run(
        [sys.executable, "-c", _WHOLE, json.dumps(clips)], cwd=tree, check=True,
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tree)},
    )  # fmt: skip
    return json.loads(done.stdout)


def _before_and_now(clips: dict[str, str]) -> list[dict[str, float]]:
    """Return the least times of `BEFORE` and of this tree, measured by turns."""
    here = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder) / "before"
        git = ["git", "-C", str(here), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(there), BEFORE], check=True)
        try:
            turns = [[_whole_ms(tree, clips) for tree in (there, here)] for _ in range(_TURNS)]
        finally:
            subprocess.run([*git, "remove", "--force", str(there)], check=True)
    return [{key: min(turn[i][key] for turn in turns) for key in clips} for i in range(2)]


def _stages_of(name: str, clip: np.ndarray) -> dict[str, float]:
    """Return the times by stage, and the parts of the bound."""
    model: Any = build_extractor(name, threads=1)._module  # type: ignore[attr-defined]
    signal = torch.from_numpy(clip).reshape(1, -1, clip.shape[-1])
    grid, made = model.grid(), {}

    def measure(_: int) -> None:
        with torch.no_grad():
            segments, _state = grid.split(signal, grid.start(signal))
            # The model processes blocks of one ear in pairs.
            blocks = [segment.x for segment in segments[4 : 4 + 2 // signal.shape[1]]]
            made.update(_stages_ms(model, torch.cat(blocks)))
            made["ffts"] = _ffts_ms(signal.shape[1])
            made["exponentials"] = _exponentials_ms(model, signal.shape[1])

    # On a thread of the kernels, like the blocks.
    parallel_for(measure, 1)
    return made


def _row(key: str, clip: np.ndarray, before: float, now: float) -> tuple[str, ...]:
    made = _stages_of(key.split()[0], clip)
    ffts, exponentials = made.pop("ffts"), made.pop("exponentials")
    bound = min(ffts, made["spectra"]) + exponentials
    return (
        *key.split(), *(f"{ms:.1f}" for ms in made.values()),
        f"{max(now - sum(made.values()), 0.0):.1f}", f"{now:.1f}",
        f"{ffts:.1f} ({made['spectra']:.1f}) + {exponentials:.1f}", f"{now / bound:.1f}",
        f"{before:.1f}", f"{before / now:.2f}",
    )  # fmt: skip


def stages_table(signal_of: SignalOf) -> str:
    """Return a table of CPU milliseconds per second of audio by stage, for models and signals."""
    clips = {
        f"{name} {kind}": signal_of(kind, ears, _SECONDS)
        for name, ears in (("moore2016", 2), ("glasberg2002", 1))
        for kind in ("noise", "speech")
    }
    with tempfile.TemporaryDirectory() as folder:
        paths = {key: f"{folder}/{i}.npy" for i, key in enumerate(clips)}
        for key, path in paths.items():
            np.save(path, clips[key])
        before, now = _before_and_now(paths)
    threads, of_torch = get_num_threads(), torch.get_num_threads()
    try:
        set_num_threads(1)
        torch.set_num_threads(1)
        rows = [_row(key, clip, before[key], now[key]) for key, clip in clips.items()]
    finally:
        set_num_threads(threads)
        torch.set_num_threads(of_torch)
    return table(_HEAD, rows)
