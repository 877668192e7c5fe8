"""What every test of this folder needs: a GPU. Elsewhere each is skipped, with the reason."""

from __future__ import annotations

import pytest
import torch

from amtcore.kernels.warp.driver.available import find_device, why_no_gpu


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU of this machine."""
    if reason := why_no_gpu():
        pytest.skip(reason)
    return find_device("cuda")


@pytest.fixture(autouse=True)
def on_a_gpu(device: torch.device) -> None:
    """Every test here, whether or not it asks for the device."""
