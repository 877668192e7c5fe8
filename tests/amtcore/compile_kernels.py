"""Compiles the kernels into their cache, so that test runs side by side do not each do it.

`python -m tests.amtcore.compile_kernels`: every model and its pooled streams, forward and backward.
"""

from __future__ import annotations

import gc

import numpy as np
import torch

from amtcore.features.registry import BUILT_IN, build_extractor, get_model
from tests.amtcore.model_cases import CASES, leaves


def compile_models() -> None:
    """One short signal through every model and back."""
    for case in CASES.values():
        for dtype in (torch.float32, torch.float64):
            model = case.build(dtype=dtype, learnable=True)
            outputs = leaves(model(case.signal(1, dtype=dtype)))
            sum((y.square().sum() for y in outputs), torch.zeros(())).backward()


def compile_streams() -> None:
    """One short clip through every feature stream of the models."""
    for name in BUILT_IN:
        model = get_model(name)
        clip = np.random.default_rng(0).standard_normal(round(model.default_fs_hz / 4))
        for dtype in ("float32", "float64"):
            options = {each: {"gain": 1.0} if each == "spikes" else {} for each in model.streams}
            extractor = model.build(model.default_fs_hz, {}, options, dtype)
            signal = clip.astype(dtype)
            extractor.extract([signal])


def compile_for_gpus() -> None:
    """One clip through the interpreter: its scheduler, and the kernel that most tests take."""
    dau = build_extractor("dau1997", backend="interpreted")
    dau.extract([np.zeros(1000, np.float32)])


if __name__ == "__main__":
    gc.set_threshold(100_000)  # what a compiler makes is hardly garbage before it ends
    compile_models()
    compile_streams()
    compile_for_gpus()
