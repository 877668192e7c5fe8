"""From tensors to the kernels of rows, frames and neurons on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from amtcore.kernels.backends.warp_launch import start, warps_of
from amtcore.kernels.families.fir.cpu import TILE
from amtcore.kernels.families.fir.reference import windows
from amtcore.kernels.families.lif.cpu import BETA
from amtcore.kernels.families.lif.runner import starts_shape
from amtcore.kernels.families.roex.runner import ITEM_FRAMES
from amtcore.kernels.vector.lanes import groups_of, pack_tensor, unpack_tensor
from amtcore.kernels.vector.simd import LANES
from amtcore.kernels.warp import families, neurons
from amtcore.kernels.warp.compiler import compiled
from amtcore.kernels.warp.launching import Kernel, Launcher

Gradients = tuple[Tensor, Tensor, Tensor]


def _is_double(x: Tensor) -> bool:
    return x.dtype == torch.float64


def _parts(total: int, size: int) -> int:
    return -(-total // size)


def fir(launcher: Launcher, x: Tensor, taps: Tensor, stride: int, first: int, count: int) -> Tensor:
    """See `families.fir.reference`."""
    rows, length, y = x.shape[0], taps.shape[0], x.new_empty(x.shape[0], count)
    if rows == 0 or count == 0:
        return y
    double, response = _is_double(x), taps.detach().flip(0)
    if stride == 1:
        parts = _parts(count, TILE)
        seen = windows(x.detach(), first, parts * TILE + length - 1).contiguous()
        kernel = compiled("fir", double, lambda: families.fir(double), warps_of(double))
        given = response.contiguous(), length, y, count
    else:
        parts, whole = _parts(count, families.STRIDED), _parts(length, LANES) * LANES
        seen = windows(x.detach(), first, (count - 1) * stride + whole).contiguous()
        # Above 0 where the last vector of taps is taps, see the processor's kernel.
        marks = (torch.arange(LANES, device=x.device) < length + LANES - whole).to(x.dtype)
        response = torch.cat((torch.nn.functional.pad(response, (0, whole - length)), marks))
        kernel = compiled(
            "strided_fir", double, lambda: families.strided_fir(double), warps_of(double)
        )
        given = response, whole + LANES, y, count, stride  # type: ignore[assignment]
    warps = min(launcher.resident_warps(kernel), rows * parts)
    start(launcher, kernel, warps, rows, parts, seen, seen.shape[1], *given)
    return y


def _padded(values: Tensor) -> Tensor:
    """Rows of whole lane groups, (.., channel) -> (.., group LANES), in new memory."""
    missing = -values.shape[-1] % LANES
    return torch.nn.functional.pad(values.detach(), (0, missing)).clone(
        memory_format=torch.contiguous_format
    )


def attack_release(
    launcher: Launcher, x: Tensor, coef: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """See `families.attack_release.reference`."""
    (batch, frames, channels), double = x.shape, _is_double(x)
    rows, rates, last = _padded(x), _padded(coef.T), _padded(state)
    out, groups = torch.empty_like(rows), groups_of(channels)
    if batch * groups:
        kernel = compiled(
            "attack_release", double, lambda: families.attack_release(double), warps_of(double)
        )
        warps = min(launcher.resident_warps(kernel), batch * groups)
        start(launcher, kernel, warps, batch, groups, frames, rows, out, rates, last)
    return out[..., :channels].contiguous(), last[..., :channels].contiguous()


def attack_release_adjoint(
    launcher: Launcher, x: Tensor, coef: Tensor, state: Tensor, y: Tensor, gy: Tensor,
    gstate: Tensor,
) -> Gradients:  # fmt: skip
    """Gradients of `attack_release` with respect to x, coef and state."""
    (batch, frames, channels), double = x.shape, _is_double(x)
    rows, outs, upstream, rates = _padded(x), _padded(y), _padded(gy), _padded(coef.T)
    first, g_state, g_rows = _padded(state), _padded(gstate), torch.empty_like(rows)
    g_rates, groups = rates.new_zeros(batch, *rates.shape), groups_of(channels)
    if batch * groups:
        kernel = compiled(
            "attack_release_adjoint",
            double,
            lambda: families.attack_release_adjoint(double),
            warps_of(double),
        )
        warps = min(launcher.resident_warps(kernel), batch * groups)
        start(
            launcher, kernel, warps, batch, groups, frames, rows, outs, upstream, g_rows, rates,
            g_rates, first, g_state,
        )  # fmt: skip
    g_coef = g_rates[..., :channels].sum(0).T.contiguous()
    return g_rows[..., :channels].contiguous(), g_coef, g_state[..., :channels].contiguous()


def _skirt_launch(launcher: Launcher, kernel: Kernel, like: Tensor, frames: int, rows: int,
                  *arguments: Tensor | int) -> None:  # fmt: skip
    """Launch with memory of the warps' own: places of components, and `rows` rows of numbers."""
    room = like.shape[1] + 2 * LANES
    warps = min(launcher.resident_warps(kernel), _parts(frames, ITEM_FRAMES))
    where = torch.empty(warps * room, dtype=torch.int64, device=like.device)
    work = like.new_empty(warps * rows * room)
    start(launcher, kernel, warps, frames, like.shape[1], *arguments, where, work, room)


def lower_skirt(
    launcher: Launcher, intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor
) -> Tensor:
    """See `families.roex.reference`."""
    double, frames = _is_double(intensity), len(intensity)
    out = intensity.new_empty(frames, len(rate))
    if out.numel():
        kernel = compiled(
            "lower_skirt", double, lambda: families.lower_skirt(double), warps_of(double)
        )
        given = (t.detach().contiguous() for t in (intensity, slope, rate, fc_hz, f_hz))
        _skirt_launch(launcher, kernel, intensity, frames, 3, len(rate), *given, out)
    return out


def lower_skirt_adjoint(
    launcher: Launcher, intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor,
    f_hz: Tensor, gout: Tensor,
) -> Gradients:  # fmt: skip
    """Gradients of `lower_skirt` with respect to intensity, slope and rate."""
    double, frames = _is_double(intensity), len(intensity)
    g_intensity = torch.zeros_like(intensity, memory_format=torch.contiguous_format)
    g_slope = torch.zeros_like(g_intensity)
    g_rate = rate.new_zeros(_parts(frames, ITEM_FRAMES), len(rate))
    if g_rate.numel():
        kernel = compiled(
            "lower_skirt_adjoint",
            double,
            lambda: families.lower_skirt_adjoint(double),
            warps_of(double),
        )
        given = (t.detach().contiguous() for t in (intensity, slope, rate, fc_hz, f_hz, gout))
        _skirt_launch(
            launcher, kernel, intensity, frames, 5, len(rate), *given, g_intensity, g_slope, g_rate
        )
    return g_intensity, g_slope, g_rate.sum(0)


def lif(
    launcher: Launcher, x: Tensor, coef: Tensor, state: Tensor, max_spikes: float, record: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See `families.lif.runner`. Numbers that are none are not looked for, which would mean to wait
    for the device: they stay in the state and in what it drives."""
    (batch, steps, _), count, synapses = x.shape, coef.shape[0], coef.shape[1] - BETA
    recorded, double, groups = steps if record else 0, _is_double(x), groups_of(count)
    spikes, vmem = x.new_empty(batch, steps, count), x.new_empty(batch, recorded, count)
    isyn = x.new_empty(batch, recorded, count, synapses)
    starts = x.new_empty(starts_shape(batch, steps if keep else 0, count, synapses))
    packed = pack_tensor(state)
    if batch * groups and steps:
        key = double, synapses, record
        kernel = compiled("lif", key, lambda: neurons.forward(*key), warps_of(double))
        warps = min(launcher.resident_warps(kernel), batch * groups)
        start(
            launcher, kernel, warps, batch, groups, steps, count, starts.shape[2],
            x.detach().contiguous(), pack_tensor(coef), packed, spikes, vmem, isyn, starts,
            x.new_full((1,), max_spikes), recorded,
        )  # fmt: skip
    return spikes, vmem, isyn, unpack_tensor(packed, count), starts


def lif_adjoint(
    launcher: Launcher, x: Tensor, coef: Tensor, starts: Tensor, max_spikes: float, record: bool,
    gspikes: Tensor, gvmem: Tensor, gisyn: Tensor, gstate: Tensor,
) -> Gradients:  # fmt: skip
    """Gradients of `lif` with respect to x, coef and state."""
    (batch, steps, _), count, synapses = x.shape, coef.shape[0], coef.shape[1] - BETA
    double, groups, gx = _is_double(x), groups_of(count), torch.zeros_like(x).contiguous()
    packed, packed_gstate = pack_tensor(coef), pack_tensor(gstate)
    gcoef = packed.new_zeros(batch, *packed.shape)
    if batch * groups and steps:
        key = double, synapses, record
        kernel = compiled("lif_adjoint", key, lambda: neurons.adjoint(*key), warps_of(double))
        warps = min(launcher.resident_warps(kernel), batch * groups)
        start(
            launcher, kernel, warps, batch, groups, steps, count, x.detach().contiguous(), packed,
            gcoef, starts.detach().contiguous(), packed_gstate, gspikes.detach().contiguous(),
            gvmem.detach().contiguous(), gisyn.detach().contiguous(), gx,
            x.new_full((1,), max_spikes), x.new_empty(warps * neurons.work_rows(synapses) * LANES),
            gvmem.shape[1],
        )  # fmt: skip
    return gx, unpack_tensor(gcoef, count).sum(0), unpack_tensor(packed_gstate, count)
