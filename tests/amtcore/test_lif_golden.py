"""Every stored array of the integrate-and-fire reference: values and gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from amtcore import LIFExodus

from ..compare import Tolerance, assert_close
from .golden_files import DTYPES, load, names

FILES = names("lif")
STATES = {
    "float32": Tolerance(1e-5, "single-precision potentials and currents"),
    "float64": Tolerance(5e-5, "the reference's own single precision: decay factors and sums"),
}
GRADIENTS = Tolerance(1e-4, "single-precision sums over time")
LEARNED = ("tau_mem", "tau_syn", "bias", "threshold")


def _layer(golden: dict[str, np.ndarray], dtype: torch.dtype, backend: str | None) -> LIFExodus:
    constants = {key: float(golden[key]) for key in (*LEARNED, "learning_window", "dt")}
    most = int(golden["max_spikes"]) or math.inf
    shape = tuple(int(size) for size in golden["shape"])
    return LIFExodus(shape, **constants, max_spikes_per_dt=most, dtype=dtype, backend=backend)


def test_files_are_there() -> None:
    assert FILES == ["lif__a", "lif__b", "lif__c"]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FILES)
def test_stored_arrays(name: str, dtype: str, backend: str) -> None:
    golden = load(name)
    layer = _layer(golden, DTYPES[dtype], backend)
    x = torch.from_numpy(golden["x"]).to(DTYPES[dtype]).requires_grad_()
    spikes, _, records = layer.evolve(x, record=True)
    assert np.array_equal(spikes.detach().numpy(), golden["spikes"])
    assert records["spikes"] is spikes
    for key in ("vmem", "isyn"):
        assert_close(records[key].detach(), golden[key], STATES[dtype], f"{name} {key}")
    (spikes * torch.from_numpy(golden["grad_out"])).sum().backward()
    assert_close(x.grad, golden["grad_x"], GRADIENTS, f"{name} grad_x")
    for key in LEARNED:
        assert_close(getattr(layer, key).grad, golden[f"grad_{key}"], GRADIENTS, f"{name} {key}")


@pytest.mark.parametrize("name", FILES)
def test_float32_equals_the_reference_program_bit_for_bit(name: str) -> None:
    """Both round the same operations in the same order; a fused one would show here first."""
    golden = load(name)
    _, _, records = _layer(golden, torch.float32, None).evolve(golden["x"], record=True)
    for key in ("spikes", "vmem", "isyn"):
        assert np.array_equal(records[key].detach().numpy(), golden[key]), key
