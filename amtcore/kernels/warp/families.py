"""Kernels of the families that are no operations of a chain: rows of samples, frames, neurons.

Each is a function of addresses (of numbers where they end in _at) and sizes; a warp takes pieces of
the work from a queue. What they compute is in `families`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from amtcore.kernels.families.attack_release.cpu import smooth, smooth_adjoint
from amtcore.kernels.families.fir.cpu import TILE, tile, window_sum
from amtcore.kernels.families.roex.cpu import skirts, skirts_adjoint
from amtcore.kernels.families.roex.runner import ITEM_FRAMES
from amtcore.kernels.vector.simd import LANES, own_number, vload
from amtcore.kernels.vector.warp_lowering import lane_id
from amtcore.kernels.warp.device import integers_at, numbers_of, shared_rows, take, warp_id

Kernel = Callable[..., None]
#: Outputs with a stride that a warp makes in one go.
STRIDED = 32


def attack_release(double: bool) -> Kernel:
    """Rows (frame, row) of a clip; an item is one clip's group of lanes."""
    numbers = numbers_of(double)

    def kernel(
        queue: int, clips: int, groups: int, frames: int, x_at: int, y_at: int, coef_at: int,
        state_at: int,
    ) -> None:  # fmt: skip
        row = groups * LANES
        while True:
            item = take(queue)
            if item >= clips * groups:
                return
            clip, group = item // groups, item % groups
            x = numbers(x_at)[clip * frames * row :]
            y = numbers(y_at)[clip * frames * row :]
            state = numbers(state_at)[clip * row :]
            smooth(x, y, frames, row, group, numbers(coef_at), state)

    return kernel


def attack_release_adjoint(double: bool) -> Kernel:
    """The same with gradients, those of the rates by clip."""
    numbers = numbers_of(double)

    def kernel(
        queue: int, clips: int, groups: int, frames: int, x_at: int, y_at: int, gy_at: int,
        gx_at: int, coef_at: int, gcoef_at: int, state_at: int, gstate_at: int,
    ) -> None:  # fmt: skip
        row = groups * LANES
        while True:
            item = take(queue)
            if item >= clips * groups:
                return
            clip, group = item // groups, item % groups
            at = clip * frames * row
            smooth_adjoint(
                numbers(x_at)[at:], numbers(y_at)[at:], numbers(gy_at)[at:], numbers(gx_at)[at:],
                frames, row, group, numbers(coef_at), numbers(gcoef_at)[clip * 2 * row :],
                numbers(state_at)[clip * row :], numbers(gstate_at)[clip * row :],
            )  # fmt: skip

    return kernel


def fir(double: bool) -> Kernel:
    """TILE outputs an item, of rows that hold all samples of whole tiles."""
    numbers = numbers_of(double)

    def kernel(
        queue: int, rows: int, tiles: int, x_at: int, size: int, taps_at: int, length: int,
        y_at: int, count: int,
    ) -> None:  # fmt: skip
        made = shared_rows(numbers(y_at), TILE)
        taps, lane = numbers(taps_at)[:length], lane_id()
        while True:
            item = take(queue)
            if item >= rows * tiles:
                return
            row, begin = item // tiles, item % tiles * TILE
            tile(numbers(x_at)[row * size :], begin, taps, made)
            for part in range(0, TILE, LANES):
                if begin + part + lane < count:
                    y = numbers(y_at)[row * count + begin + part :]
                    y[lane] = own_number(vload(made, part))

    return kernel


def strided_fir(double: bool) -> Kernel:
    """STRIDED outputs an item, `stride` samples apart; taps as the processor pads them."""
    numbers = numbers_of(double)

    def kernel(
        queue: int, rows: int, parts: int, x_at: int, size: int, taps_at: int, length: int,
        y_at: int, count: int, stride: int,
    ) -> None:  # fmt: skip
        taps, lane = numbers(taps_at)[:length], lane_id()
        while True:
            item = take(queue)
            if item >= rows * parts:
                return
            row, begin = item // parts, item % parts * STRIDED
            x = numbers(x_at)[row * size :]
            for n in range(begin, min(begin + STRIDED, count)):
                value = window_sum(x, n * stride, taps)
                if lane == 0:
                    numbers(y_at)[row * count + n] = value

    return kernel


@njit
def _is_finite(number: float) -> bool:
    return number - number == 0.0


@njit
def _all_finite(rate: Any, count: int) -> bool:
    for k in range(count):
        if not _is_finite(rate[k]):
            return False
    return True


@njit
def _present(
    intensity: Any, slope: Any, f_hz: Any, components: int, fine: bool, where: Any, i: Any, s: Any,
    f: Any,
) -> int:  # fmt: skip
    """As the processor's: silent components are left out, but not where a number that is none
    would make one of the sums it is part of."""
    count = 0
    for j in range(components):
        silent = intensity[j] == 0 and _is_finite(intensity[j]) and _is_finite(slope[j])
        if not (fine and silent):
            where[count] = j
            i[count], s[count], f[count] = intensity[j], slope[j], f_hz[j]
            count += 1
    for j in range(count, count + (-count) % LANES):
        i[j], s[j], f[j] = 0.0, 0.0, f_hz[components - 1]
    return count


def lower_skirt(double: bool) -> Kernel:
    """A few frames an item; `work` holds 3 rows of `room` numbers a warp."""
    numbers = numbers_of(double)

    def kernel(
        queue: int, frames: int, components: int, filters: int, intensity_at: int, slope_at: int,
        rate_at: int, fc_at: int, f_at: int, out_at: int, where: int, work_at: int, room: int,
    ) -> None:  # fmt: skip
        rate, fc_hz = numbers(rate_at)[:filters], numbers(fc_at)[:filters]
        f_hz, places = numbers(f_at), integers_at(where)[warp_id() * room :]
        work = numbers(work_at)[warp_id() * 3 * room :]
        i, s, f = work, work[room:], work[2 * room :]
        fine = _all_finite(rate, filters)
        while True:
            first = take(queue) * ITEM_FRAMES
            if first >= frames:
                return
            for n in range(first, min(first + ITEM_FRAMES, frames)):
                at = n * components
                count = _present(
                    numbers(intensity_at)[at:], numbers(slope_at)[at:], f_hz, components, fine,
                    places, i, s, f,
                )  # fmt: skip
                skirts(count, i, s, f, rate, fc_hz, numbers(out_at)[n * filters :])

    return kernel


def lower_skirt_adjoint(double: bool) -> Kernel:
    """The same with gradients, those of the rates by item; `work` holds 5 rows a warp."""
    numbers = numbers_of(double)

    def kernel(
        queue: int, frames: int, components: int, filters: int, intensity_at: int, slope_at: int,
        rate_at: int, fc_at: int, f_at: int, gout_at: int, gintensity_at: int, gslope_at: int,
        grate_at: int, where: int, work_at: int, room: int,
    ) -> None:  # fmt: skip
        rate, fc_hz = numbers(rate_at)[:filters], numbers(fc_at)[:filters]
        f_hz, places = numbers(f_at), integers_at(where)[warp_id() * room :]
        work = numbers(work_at)[warp_id() * 5 * room :]
        i, s, f, gi, gs = work, work[room:], work[2 * room :], work[3 * room :], work[4 * room :]
        fine, lane = _all_finite(rate, filters), lane_id()
        while True:
            item = take(queue)
            first = item * ITEM_FRAMES
            if first >= frames:
                return
            for n in range(first, min(first + ITEM_FRAMES, frames)):
                at = n * components
                count = _present(
                    numbers(intensity_at)[at:], numbers(slope_at)[at:], f_hz, components, fine,
                    places, i, s, f,
                )  # fmt: skip
                for j in range(lane, count + LANES, LANES):
                    gi[j] = gs[j] = 0.0
                skirts_adjoint(
                    count, i, s, f, rate, fc_hz, numbers(gout_at)[n * filters :], gi, gs,
                    numbers(grate_at)[item * filters :],
                )  # fmt: skip
                gintensity, gslope = numbers(gintensity_at)[at:], numbers(gslope_at)[at:]
                for j in range(lane, count, LANES):
                    gintensity[places[j]] = gi[j]
                    gslope[places[j]] = gs[j]

    return kernel
