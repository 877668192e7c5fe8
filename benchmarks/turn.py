"""Measurements of one checkout by a child of `benchmarks.turns`, printed as one JSON object.

It uses only names that old and new checkouts have. Times are the least of several runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

FS_HZ = 44100
SHORT_CLIPS, SHORT_S = 50_000, 0.2
ENCODED_CLIPS = 2000
ENCODER = """
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 64, 400, stride=160), nn.GELU(), nn.Conv1d(64, 64, 3),
            nn.GELU(), nn.Conv1d(64, 64, 3),
        )

    def forward(self, x):
        return self.layers(x)
"""
ENCODER_JOB: dict[str, Any] = {
    "model": "torch_module",
    "params": {"module": "small_encoder:Encoder", "channel_axis": True},
    "streams": {
        "encoded": {"width": 64, "hop_length": 160, "window_length": 1040, "frames_axis": 2}
    },
}


def least_s(run: Callable[[], object], repeats: int = 7) -> float:
    run()
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return min(found)


def models(folder: Path) -> Mapping[str, float]:
    """Return seconds of pooled features, whole outputs and training steps, on one thread."""
    import torch

    import amtcore
    from earmill.jobs.demo_audio import speech

    try:
        from amtcore.features.registry import build_extractor
    except ImportError:  # ca8dd45 has a module of its own
        from amtcore.features.build import build_extractor

    amtcore.set_num_threads(1)
    torch.set_num_threads(1)
    clip = speech(np.random.default_rng(0), FS_HZ, 4.0)
    clip = (0.05 * clip / np.sqrt(np.mean(clip**2))).astype(np.float32)
    found: dict[str, float] = {}
    for name, params in (
        ("dau1997", {}),
        ("osses2021", {}),
        ("king2019", {}),
        ("king2019", {"phase_insens": "none"}),
        ("paulick2024", {}),
        ("moore2016", {}),
        ("glasberg2002", {}),
        ("melspectrogram", {}),
    ):
        own_rate = name in ("moore2016", "glasberg2002", "melspectrogram")
        extractor = build_extractor(name, fs_hz=None if own_rate else FS_HZ, params=params)
        what = f"{name}{', bands' if params else ''}: features"
        found[what] = least_s(lambda e=extractor: e.extract([clip, clip]))
    x = torch.from_numpy(clip[:FS_HZ])[None]
    for name in ("Dau1997", "Osses2021", "King2019", "Paulick2024"):
        model, learnt = (getattr(amtcore, name)(FS_HZ, learnable=each) for each in (False, True))
        with torch.no_grad():
            found[f"{name}: output"] = least_s(lambda m=model: m(x))
        found[f"{name}: training step"] = least_s(lambda m=learnt: _step(m, x), repeats=5)
    for name in ("Glasberg2002", "Moore2016"):
        model = getattr(amtcore, name)(32000, learnable=True)
        ears = x if name == "Glasberg2002" else x[:, None].expand(1, 2, -1)
        found[f"{name}: training step"] = least_s(lambda m=model, e=ears: _step(m, e), repeats=5)
    return found


def stages(folder: Path) -> Mapping[str, float]:
    """Return seconds of forward, and of forward and backward, of stages on one thread."""
    import torch

    import amtcore

    amtcore.set_num_threads(1)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    wave = 0.05 * torch.randn(1, FS_HZ, generator=generator)
    channels = 0.05 * torch.rand(1, 31, FS_HZ, generator=generator)
    gammatone = amtcore.GammatoneFilterbank((80, 8000), FS_HZ, learnable=True)
    fc = gammatone.fc
    currents = 0.02 * torch.rand(4, 5000, 512, generator=generator)
    cases: dict[str, tuple[Any, Any]] = {
        "GammatoneFilterbank": (gammatone, wave),
        "DRNLFilterbank": (amtcore.DRNLFilterbank((80, 8000), FS_HZ, learnable=True), wave),
        "IHCEnvelope": (amtcore.IHCEnvelope(FS_HZ, learnable=True), channels),
        "IHCPaulick2024": (amtcore.IHCPaulick2024(FS_HZ, learnable=True), channels),
        "AdaptLoop": (amtcore.AdaptLoop(FS_HZ, learnable=True), channels),
        "ModulationFilterbank": (
            amtcore.ModulationFilterbank(FS_HZ, fc, learnable=True),
            channels[:, : len(fc)],
        ),
        "MiddleEarFilter": (amtcore.MiddleEarFilter(FS_HZ, learnable=True), wave),
        "HeadphoneFilter": (amtcore.HeadphoneFilter(FS_HZ, learnable=True), wave),
        "LIFExodus": (_Fresh(amtcore.LIFExodus((512, 512), tau_syn=0.01)), currents),
    }
    found: dict[str, float] = {}
    for name, (stage, x) in cases.items():
        with torch.no_grad():
            found[f"{name}: forward"] = least_s(lambda s=stage, i=x: s(i))
        found[f"{name}: with backward"] = least_s(lambda s=stage, i=x: _step(s, i), repeats=5)
    return found


class _Fresh:
    """A layer whose state is reset before each call."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.zero_grad = layer, layer.zero_grad

    def __call__(self, x: Any) -> Any:
        return self.layer.reset_state()(x)


def _step(model: Any, x: Any) -> None:
    import torch

    model.zero_grad()
    out = model(x.detach().clone().requires_grad_())
    outs = list(out.values()) if isinstance(out, dict) else out
    outs = outs if isinstance(outs, (list, tuple)) else [outs]
    torch.stack([each.abs().mean() for each in outs]).sum().backward()


def reader(folder: Path) -> Mapping[str, float]:
    """Return MB/s (features as stored) of an hour of Dau1997's streams in order."""
    from benchmarks.feature_sets import hour, write_set
    from earmill import open_features

    streams, made = hour()
    rows = list(made)
    size = sum(values.nbytes for row in rows for values in row.streams.values())
    write_set(folder, streams, rows)
    del rows

    def read(fmt: str) -> None:
        # A row has its values once it is there.
        for _ in open_features(folder, format=fmt):
            pass

    return {f"{fmt} in order": size / 1e6 / least_s(lambda f=fmt: read(f), 4) for fmt in FORMATS}


FORMATS = ("zarr", "parquet")


def loader(folder: Path) -> Mapping[str, float]:
    """Return rows/s of training batches of 16, with no and two workers."""
    import torch

    from benchmarks.feature_sets import features, write_set
    from earmill import FeatureLoader, open_features

    torch.set_num_threads(1)
    streams, made = features(2.0, ["modulation"])
    rows = list(made)
    write_set(folder, streams, rows)
    found = {}
    for fmt in FORMATS:
        for workers in (0, 2):
            ds = open_features(folder, format=fmt, cache_bytes=64 * 2**20)
            stream = ds.iterable(seed=1, batch_size=16, window_bytes=32 * 2**20)
            options: dict[str, Any] = {"persistent_workers": True} if workers else {}
            batches = FeatureLoader(stream, num_workers=workers, **options)
            best = least_s(lambda b=batches: sum(1 for _ in b), 5)
            found[f"{fmt}, {workers} workers"] = len(rows) / best
    return found


def short_clips(folder: Path) -> Mapping[str, float]:
    """Return CPU ms a row of a job of short clips, and the driver's peak memory in MB."""
    import soundfile

    rng = np.random.default_rng(0)
    (folder / "audio").mkdir()
    for n in range(SHORT_CLIPS):
        wave = 0.05 * rng.standard_normal(int(SHORT_S * 16000))
        soundfile.write(folder / f"audio/{n:06d}.wav", wave, 16000, subtype="PCM_16")
    spec = {"model": "dau1997", "fs_hz": 16000, "streams": {"modulation": {"frame_rate_hz": 100}}}
    spent = _job(folder, spec)
    return {"CPU ms a row": 1e3 * spent["cpu_s"] / SHORT_CLIPS, "driver MB": spent["driver_mb"]}


def torch_module(folder: Path) -> Mapping[str, float]:
    """Return rows/s of a job of a small convolutional encoder."""
    import soundfile

    rng = np.random.default_rng(0)
    (folder / "audio").mkdir()
    for n in range(ENCODED_CLIPS):
        wave = 0.05 * rng.standard_normal(int(rng.uniform(1, 15) * 16000))
        soundfile.write(folder / f"audio/{n:06d}.flac", wave, 16000, subtype="PCM_16")
    (folder / "small_encoder.py").write_text(ENCODER)
    spec = ENCODER_JOB | {"fs_hz": 16000}
    return {"rows/s": ENCODED_CLIPS / _job(folder, spec)["seconds"]}


def _job(folder: Path, extract: Mapping[str, Any]) -> dict[str, float]:
    """Run a job by processes of this machine; return its seconds, CPU seconds and memory."""
    import os
    import resource

    job = {
        "source": {"kind": "files", "uri": str(folder / "audio")},
        "extract": [dict(extract)],
        "output": {"uri": str(folder / "features"), "formats": ["zarr"]},
        "run": {"executor": "local"},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    driver = subprocess.Popen(
        [str(Path(sys.executable).with_name("earmill")), "extract", str(folder / "job.yaml")],
        env=env, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    most = 0.0
    while driver.poll() is None:
        try:
            status = Path(f"/proc/{driver.pid}/status").read_text()
            most = max(most, float(status.partition("VmRSS:")[2].split()[0]) / 1024)
        except (OSError, IndexError):
            pass
        time.sleep(0.2)
    if driver.returncode:
        raise SystemExit(f"the job ended with {driver.returncode}")
    seconds = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_s": cpu_s, "driver_mb": most}


MEASURES: dict[str, Callable[[Path], Mapping[str, float]]] = {
    function.__name__: function
    for function in (models, stages, reader, loader, short_clips, torch_module)
}

if __name__ == "__main__":
    # Forked workers import nothing of this module.
    print(json.dumps(MEASURES[sys.argv[1]](Path(sys.argv[2]))))
