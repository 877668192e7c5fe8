"""Channels as lanes: values packed in groups of LANES and back."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.kernels.vector.simd import LANES


def groups_of(channels: int) -> int:
    """Return the number of lane groups for this many channels."""
    return -(-channels // LANES)


def pack(values: Tensor) -> NDArray[Any]:
    """(.., channel, value) -> (.., group, value * LANES); missing channels repeat the last one."""
    packed: NDArray[Any] = pack_tensor(values).numpy()
    return packed


def pack_tensor(values: Tensor) -> Tensor:
    """`pack` to a new tensor on the device of the values."""
    channels = values.shape[-2]
    groups = groups_of(channels)
    wanted = torch.arange(groups * LANES, device=values.device).clamp(max=channels - 1)
    lanes = values.detach()[..., wanted, :].unflatten(-2, (groups, LANES)).transpose(-1, -2)
    return lanes.flatten(-2).contiguous()


def unpack(packed: NDArray[Any], channels: int) -> Tensor:
    """The inverse of `pack`: (.., group, value * LANES) -> (.., channel, value)."""
    return unpack_tensor(torch.from_numpy(packed), channels)


def unpack_tensor(packed: Tensor, channels: int) -> Tensor:
    """`unpack` of a tensor, on its device."""
    values = packed.shape[-1] // LANES
    lanes = packed.unflatten(-1, (values, LANES)).transpose(-1, -2)
    return lanes.flatten(-3, -2)[..., :channels, :].contiguous()
