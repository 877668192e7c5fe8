"""Cochleagram against the stored reference arrays, closed forms and its own other routes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from amtcore import Cochleagram
from amtcore.errors import ParameterError
from amtcore.models.cochleagram import HalfCosineFilters, sinc_kernel
from amtcore.testing.models import ModelConformance

from ..compare import Tolerance, assert_close
from .golden_files import DTYPES, load, names

FILES = [name for name in names("cochleagram") if not name.endswith("design")]
STAGES = ("subbands", "envelope", "downsampled", "cochleagram")
EXACT = Tolerance(1e-10, "float64 transforms in another order", 1e-12)
SINGLE = Tolerance(1e-5, "float32 transforms", 1e-9)
POWER = Tolerance(1e-3, "the power magnifies rounding near 0", 1e-6)
SILENT_POWER = Tolerance(1e-2, "the power without offset magnifies rounding near 0", 1e-6)
CASES = [(name, stage) for name in FILES for stage in STAGES]


def _model(golden: dict[str, np.ndarray], **more: Any) -> Cochleagram:
    params = {k.removeprefix("param_"): v.item() for k, v in golden.items() if "param_" in k}
    if params.pop("nonlinearity", "power") != "power":
        raise ValueError("the stored files have a power law")
    pad = (params.pop("pad_left", 0), params.pop("pad_right", 0))
    return Cochleagram(golden["fs"].item(), str(golden["preset"]), pad=pad, **params, **more)


@functools.cache
def _outputs(name: str, dtype: torch.dtype) -> dict[str, np.ndarray]:
    golden = load(name)
    signal = torch.from_numpy(golden["input"])
    found = _model(golden, dtype=dtype).outputs(signal)
    plain = {"power": 1.0, "offset": 0.0}
    uncompressed = _model({k: v for k, v in golden.items() if k[6:] not in plain}, dtype=dtype,
                          compression="none")  # fmt: skip
    found["downsampled"] = uncompressed.outputs(signal, ("cochleagram",))["cochleagram"]
    return {key: values.double().numpy() for key, values in found.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "key"), CASES)
def test_stored_array(name: str, key: str, dtype: str) -> None:
    golden, got = load(name), _outputs(name, DTYPES[dtype])[key]
    stored = next(k for k in golden if k.partition("@")[0] == key)
    every = int(stored.partition("@")[2] or 1)
    tolerance = EXACT if dtype == "float64" else SINGLE
    if dtype == "float32" and key == "cochleagram":
        tolerance = POWER if golden["preset"] == "chcochleagram" else SILENT_POWER
    assert_close(got[::every, golden["sel"]], golden[stored], tolerance, f"{name} {key}")
    summary = f"{key}_mean" if key == "cochleagram" else f"{key}_rms"
    value = got.mean(0) if key == "cochleagram" else np.sqrt(np.square(got).mean(0))
    assert_close(value, golden[summary], tolerance, f"{name} {summary}")
    if key == "cochleagram":
        assert got.T.shape == tuple(golden["shape"])


@pytest.mark.parametrize("name", FILES)
def test_stored_frequencies(name: str) -> None:
    golden = load(name)
    model = _model(golden, dtype=torch.float64)
    np.testing.assert_allclose(model.fc.numpy(), golden["centre_freqs_hz"], rtol=1e-12)


@pytest.mark.parametrize("design", "abc")
def test_stored_filters(design: str) -> None:
    golden = load("cochleagram__design")
    samples, fs, n, low, high, s = (int(v) for v in golden[f"args_{design}"])
    filters = HalfCosineFilters(float(fs), n, low, high, s)
    found = np.zeros((len(filters.fc_hz()), samples // 2 + 1))
    for row, (first, gains) in zip(
        found, filters.responses(samples, torch.device("cpu")), strict=True
    ):
        row[first : first + len(gains)] = gains
    np.testing.assert_allclose(filters.fc_hz(), golden[f"centre_freqs_hz_{design}"], rtol=1e-12)
    np.testing.assert_allclose(
        found[golden[f"sel_{design}"]], golden[f"filters_{design}"], atol=1e-12
    )
    np.testing.assert_allclose(np.square(found).sum(0), 1.0, rtol=1e-13)


@pytest.mark.parametrize(("q", "size"), [(100, 1001), (80, 1001), (240, 801), (441, 2000)])
def test_stored_kernel(q: int, size: int) -> None:
    expected = load("cochleagram__design")[f"kaiser_sinc_{q}_{size}"]
    assert_close(sinc_kernel(q, size), expected, EXACT, f"kernel {q} {size}")
