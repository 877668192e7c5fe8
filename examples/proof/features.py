"""Features of the corpus by `earmill`, and what a network reads of them by `open_features`.

Three jobs on one manifest. The learnable front-end reads its samples from a dataset as well: a
module that cuts a signal into frames makes rows of samples, decoded and scaled like the others'.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import earmill
from examples.proof.words import LABELS, RATE_HZ

HOP = 160
FRAME_RATE_HZ = RATE_HZ / HOP
EXTRACTS: Mapping[str, Mapping[str, Any]] = {
    "log-mel": {
        "model": "melspectrogram",
        "params": {"n_mels": 64, "hop_length": HOP},
        "streams": {"mel": {}},
    },
    "dau1997": {
        "model": "dau1997",
        "streams": {"modulation": {"frame_rate_hz": FRAME_RATE_HZ, "pool": "mean"}},
    },
    "samples": {
        "model": "torch_module",
        "params": {"module": "examples.proof.features:Frames", "compile": False},
        "streams": {"wave": {"width": HOP, "hop_length": HOP}},
    },
}


class Frames(nn.Module):
    """(1, sample) to (1, frame, HOP): nothing is computed."""

    def forward(self, wave: Tensor) -> Tensor:
        """A signal in frames that follow each other; what is left at the end is dropped."""
        frames = wave.shape[-1] // HOP
        return wave[..., : frames * HOP].reshape(1, frames, HOP)


@dataclass(frozen=True)
class Cost:
    """What a job took: model_cpu_s, job_cpu_s of processor time, bytes of data files."""

    audio_s: float
    model_cpu_s: float
    job_cpu_s: float
    nbytes: int


@dataclass(frozen=True)
class Part:
    """Rows of a split: values (row, column, frame), labels as numbers, and the manifest's lines."""

    values: Tensor
    labels: Tensor
    rows: list[dict[str, Any]]

    @property
    def snr_db(self) -> np.ndarray:
        """Of each row; infinity is clean."""
        return np.array([row["snr_db"] for row in self.rows])


def extract(name: str, manifest: Path, output: Path) -> Cost:
    """Run the job of a kind of features, with one worker of two threads."""
    end = earmill.extract(
        {
            "name": f"proof-{name}",
            "source": {"kind": "manifest", "uri": str(manifest)},
            "audio": {"calibration": {"rms1_db_spl": 100}},
            "extract": [{"fs_hz": RATE_HZ, **EXTRACTS[name]}],
            "output": {"uri": str(output), "formats": ["parquet"], "dtype": "float32"},
            "run": {"executor": "local", "workers": 1, "threads_per_worker": 2, "device": "cpu"},
        }
    )
    spent = sum(seconds for part, seconds in end.cpu_s.items() if part != "idle")
    files = [file for file in (output / "data").rglob("*") if file.is_file()]
    nbytes = sum(os.path.getsize(file) for file in files)
    return Cost(end.seconds, end.cpu_s["model"], spent, nbytes)


def read(output: Path) -> dict[str, Part]:
    """Every split, through the reader; rows in the order of their ids."""
    dataset = earmill.open_features(str(output))
    (stream,) = dataset.streams
    splits: dict[str, dict[str, tuple[Tensor, dict[str, Any]]]] = {}
    for row in dataset:
        values = torch.as_tensor(np.array(row.features[stream], dtype=np.float32))
        splits.setdefault(row.extra["split"], {})[row.row_id] = (values.T, dict(row.extra))
    return {split: _part([rows[name] for name in sorted(rows)]) for split, rows in splits.items()}


def _part(rows: list[tuple[Tensor, dict[str, Any]]]) -> Part:
    lines = [line for _, line in rows]
    labels = torch.tensor([LABELS.index(line["label"]) for line in lines])
    return Part(torch.stack([values for values, _ in rows]).contiguous(), labels, lines)
