"""What every test of this folder needs: a GPU. Elsewhere each is skipped, with the reason."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from amtcore.kernels.gpu.device import find_device, why_no_gpu


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU of this machine."""
    if reason := why_no_gpu():
        pytest.skip(reason)
    return find_device("cuda")


@pytest.fixture(autouse=True)
def on_a_gpu(device: torch.device) -> None:
    """Every test here, whether or not it asks for the device."""


@contextmanager
def refusing_to_wait() -> Iterator[None]:
    """Torch raises at its operations that wait for the device; so no later test is in this mode."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
