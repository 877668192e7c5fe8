"""Cascade of asymmetric resonators, inner hair cells and gain control (Lyon's CARFAC v2).

In a sample, the output of each channel's resonator is the input of the next channel:

    y[k] = g[k] (w[k] + h[k] n2[k]),   w[k + 1] = y[k].

This chain is one fused multiply-add a channel. Everything else works on 16 channels at once. The
hair cells of a sample run while the chain of the next sample waits for its own results. So a loop
over channels ends one sample, `_end_sample`, and begins the next, `_begin_sample`.

The gain control runs every `decimation[0]` samples, at positions counted from the signal's begin.
All state is in one row of numbers a clip, so chunks of any length give the bits of the whole.
There is no adjoint: the kernel computes on the CPU without gradients.
"""

from __future__ import annotations

import math
from typing import Any

from amtcore.kernels.vector.jit import kernel, part
from amtcore.kernels.vector.memory import aligned
from amtcore.kernels.vector.simd import (
    fma,
    vload_16,
    vmin,
    vsplat,
    vstore,
    where_greater_or_nan,
)

#: Channels of a vector; rows are padded to whole vectors.
STEP = 16
#: Rows of coefficients: of the resonators, and of the feedback. The health of each ear follows.
A, C, H, R1, ZR, GA, GB, GC, HEALTH = range(9)
#: Rows of an ear's state. Memory and accumulator of each stage of gain control follow.
(Z1, Z2, ZA, ZB, G, DZB, DG, INPUT, RIPPLE, DELAYED, AC, CAP1, CAP2, LOWPASS, SUM_NAP, SUM_BM,
 SUM_AGC, MEMORIES) = range(18)  # fmt: skip
#: Numbers of a model: velocity scale, offset of the velocity, 1 or 0 for linear filters, AC
#: coefficient, scale of the gain control's input, stage gain; from IHC on the hair cell's.
VELOCITY, OFFSET, LINEAR, AC_RATE, DETECT, STAGE_GAIN, IHC = range(7)
#: Numbers of a stage of gain control: rate, taps of channels k - 2 to k + 2, mixing of the ears.
RATE, TAPS, MIX, STAGE_NUMBERS = 0, 1, 6, 7
#: Whole numbers of a stage: decimation, product of decimations up to here, iterations.
DECIMATION, PERIOD, ITERATIONS, STAGE_COUNTS = range(4)
#: Hair cells.
TWO_CAP, ONE_CAP, JUST_HWR = range(3)
#: Offset and constant of the conductance, limit of the rectifier.
DETECT_OFFSET, DETECT_CONSTANT, RECTIFIER_LIMIT = 0.175, 0.1, 2.0
#: Outputs, as bits: sums of the firing rate, of squares of the membrane and of the gain control
#: over frames; and every sample of four stages.
POOL_NAP, POOL_BM, POOL_AGC, EVERY_SAMPLE = 1, 2, 4, 8
#: Rows of a sample in the output of every sample.
BM_OUT, NAP_OUT, ZB_OUT, ZA_OUT, SAMPLE_ROWS = range(5)


@part(forceinline=True)
def _begin_sample(s: Any, at: int, row: int, coef: Any, numbers: Any) -> None:
    """Ramp gain and damping, and turn the resonators of 16 channels, without their inputs."""
    gain = vload_16(s, G * row + at) + vload_16(s, DG * row + at)
    zb = vload_16(s, ZB * row + at) + vload_16(s, DZB * row + at)
    vstore(s, G * row + at, gain)
    vstore(s, ZB * row + at, zb)
    z1, z2 = vload_16(s, Z1 * row + at), vload_16(s, Z2 * row + at)
    one = vsplat(gain, 1.0)
    undamping = one
    if numbers[LINEAR] == 0.0:
        speed = z2 - vload_16(s, ZA * row + at)
        moved = fma(speed, vsplat(one, numbers[VELOCITY]), vsplat(one, numbers[OFFSET]))
        undamping = one / fma(moved, moved, one)
    radius = fma(zb, undamping, vload_16(coef, R1 * row + at))
    a, c = vload_16(coef, A * row + at), vload_16(coef, C * row + at)
    n2 = radius * fma(c, z1, a * z2)
    vstore(s, ZA * row + at, z2)
    vstore(s, Z1 * row + at, radius * (a * z1 - c * z2))
    vstore(s, Z2 * row + at, n2)
    vstore(s, RIPPLE * row + at, gain * (vload_16(coef, H * row + at) * n2))


@part(forceinline=True)
def _ripple(s: Any, at: int, row: int, delayed: bool, w: float) -> float:
    """Run the chain through 16 channels, and return the input of the next channel."""
    gain, ripple, inputs, last = s[G * row :], s[RIPPLE * row :], s[INPUT * row :], s[:]
    if delayed:
        last = s[DELAYED * row :]
        for k in range(at, at + STEP):
            inputs[k] = w
            y = fma(gain[k], w, ripple[k])
            w = last[k]
            last[k] = y
        return w
    for k in range(at, at + STEP):
        inputs[k] = w
        w = fma(gain[k], w, ripple[k])
    return w


@part(forceinline=True)
def _conductance(bm: Any) -> Any:
    zero = vsplat(bm, 0.0)
    z = bm + vsplat(bm, DETECT_OFFSET)
    z = where_greater_or_nan(z, zero, z, zero)
    square = z * z
    cube = square * z
    return cube / (cube + (square + vsplat(bm, DETECT_CONSTANT)))


@part(forceinline=True)
def _hair_cell(s: Any, at: int, row: int, kind: int, bm: Any, numbers: Any) -> Any:
    """Firing rate of 16 channels; `numbers` are the hair cell's alone."""
    zero, one = vsplat(bm, 0.0), vsplat(bm, 1.0)
    if kind == JUST_HWR:
        return vmin(where_greater_or_nan(bm, zero, bm, zero), vsplat(bm, RECTIFIER_LIMIT))
    lowpass, gain, rest = vsplat(bm, numbers[0]), vsplat(bm, numbers[1]), vsplat(bm, numbers[2])
    charge = vload_16(s, CAP1 * row + at)
    flow = _conductance(bm) * charge
    charge = fma(one - charge, vsplat(bm, numbers[4]), charge - flow * vsplat(bm, numbers[3]))
    vstore(s, CAP1 * row + at, charge)
    smoothed = vload_16(s, LOWPASS * row + at)
    if kind == TWO_CAP:
        second = vload_16(s, CAP2 * row + at)
        flow = (one - charge) * second
        second = fma(one - second, vsplat(bm, numbers[6]), second - flow * vsplat(bm, numbers[5]))
        vstore(s, CAP2 * row + at, second)
        smoothed = fma(lowpass, gain * flow - smoothed, smoothed)
    else:
        first = vload_16(s, CAP2 * row + at)
        first = fma(lowpass, gain * flow - first, first)
        vstore(s, CAP2 * row + at, first)
        smoothed = fma(lowpass, first - smoothed, smoothed)
    vstore(s, LOWPASS * row + at, smoothed)
    return smoothed - rest


@part(forceinline=True)
def _end_sample(
    s: Any, at: int, row: int, kind: int, numbers: Any, wanted: int, out: Any, to: int
) -> None:
    """Add the inputs of 16 channels to their resonators, and run their hair cells."""
    w = vload_16(s, INPUT * row + at)
    y = fma(vload_16(s, G * row + at), w, vload_16(s, RIPPLE * row + at))
    vstore(s, Z1 * row + at, vload_16(s, Z1 * row + at) + w)
    ac = vload_16(s, AC * row + at)
    bm = y - ac
    vstore(s, AC * row + at, fma(bm, vsplat(bm, numbers[AC_RATE]), ac))
    nap = _hair_cell(s, at, row, kind, bm, numbers[IHC:])
    total = (MEMORIES + 1) * row + at
    vstore(s, total, fma(nap, vsplat(nap, numbers[DETECT]), vload_16(s, total)))
    if wanted & POOL_NAP:
        vstore(s, SUM_NAP * row + at, vload_16(s, SUM_NAP * row + at) + nap)
    if wanted & POOL_BM:
        vstore(s, SUM_BM * row + at, fma(bm, bm, vload_16(s, SUM_BM * row + at)))
    if wanted & EVERY_SAMPLE:
        vstore(out, to + BM_OUT * row + at, bm)
        vstore(out, to + NAP_OUT * row + at, nap)


@part
def _run_samples(
    x: Any, begin: int, count: int, s: Any, row: int, coef: Any, numbers: Any, kind: int,
    delayed: bool, wanted: int, out: Any, to: int, pitch: int,
) -> None:  # fmt: skip
    """Run `count` samples of one ear from `begin` on; outputs of samples are `pitch` apart."""
    for i in range(count):
        w = x[begin + i]
        for at in range(0, row, STEP):
            if i > 0:
                _end_sample(s, at, row, kind, numbers, wanted, out, to - pitch)
            _begin_sample(s, at, row, coef, numbers)
            w = _ripple(s, at, row, delayed, w)
            if wanted & EVERY_SAMPLE:
                vstore(out, to + ZB_OUT * row + at, vload_16(s, ZB * row + at))
                vstore(out, to + ZA_OUT * row + at, vload_16(s, ZA * row + at))
        to += pitch
    for at in range(0, row, STEP):
        _end_sample(s, at, row, kind, numbers, wanted, out, to - pitch)


@part
def _smooth(m: Any, row: int, channels: int, taps: Any, iterations: int, s: Any, to: int) -> None:
    """Smooth a memory over channels from `m`, which has a margin of STEP, to s[to : to + row].

    Channels beyond the ends are repeated. The program that this follows takes m[1], not m[0], two
    steps below m[1], and m[N - 2], not m[N - 1], two steps above m[N - 1].
    """
    for i in range(iterations):
        if i > 0:
            for at in range(0, row, STEP):
                vstore(m, STEP + at, vload_16(s, to + at))
        low, high = STEP, STEP + channels - 1
        m[low - 1] = m[low - 2] = m[low]
        m[high + 1], m[high + 2] = m[high], m[high - 1]
        for at in range(0, row, STEP):
            total = vload_16(m, STEP + at - 2)
            total = total * vsplat(total, taps[0])
            for k in range(1, 5):
                total = fma(vload_16(m, STEP + at + k - 2), vsplat(total, taps[k]), total)
            vstore(s, to + at, total)
        s[to + 1] += taps[0] * (m[low + 1] - m[low])


@part
def _update_ear(
    s: Any, row: int, channels: int, due: int, numbers: Any, agc: Any, counts: Any, room: Any
) -> None:
    """Update the `due` first stages of an ear's gain control, without the other ear."""
    stages = counts.shape[0] // STAGE_COUNTS
    means, margin = room[: stages * row], room[stages * row :]
    for stage in range(due):
        total = (MEMORIES + 2 * stage + 1) * row
        for at in range(0, row, STEP):
            value = vload_16(s, total + at)
            value = value / vsplat(value, counts[stage * STAGE_COUNTS + DECIMATION])
            vstore(means, stage * row + at, value)
            vstore(s, total + at, vsplat(value, 0.0))
            if stage + 1 < stages:
                vstore(s, total + 2 * row + at, vload_16(s, total + 2 * row + at) + value)
    for stage in range(due - 1, -1, -1):
        memory = (MEMORIES + 2 * stage) * row
        own = agc[stage * STAGE_NUMBERS :]
        for at in range(0, row, STEP):
            value, before = vload_16(means, stage * row + at), vload_16(s, memory + at)
            if stage + 1 < stages:
                slower = vload_16(s, memory + 2 * row + at)
                value = fma(slower, vsplat(value, numbers[STAGE_GAIN]), value)
            value = fma(value - before, vsplat(value, own[RATE]), before)
            vstore(margin, STEP + at, value)
        iterations = counts[stage * STAGE_COUNTS + ITERATIONS]
        _smooth(margin, row, channels, own[TAPS:], iterations, s, memory)


@part
def _mix_ears(state: Any, row: int, due: int, agc: Any) -> None:
    """Move the memories of the `due` first stages towards their mean over ears."""
    ears = state.shape[0]
    for stage in range(due):
        mix = agc[stage * STAGE_NUMBERS + MIX]
        memory = (MEMORIES + 2 * stage) * row
        for at in range(memory, memory + row if mix > 0 else memory, STEP):
            mean = vload_16(state[0], at)
            for ear in range(1, ears):
                mean = mean + vload_16(state[ear], at)
            mean = mean / vsplat(mean, ears)
            for ear in range(ears):
                own = vload_16(state[ear], at)
                vstore(state[ear], at, fma(mean - own, vsplat(own, mix), own))


@part
def _close_loop(s: Any, row: int, coef: Any, health: Any, decimation: int) -> None:
    """Set the ramps of gain and damping that lead to the undamping of the gain control."""
    for at in range(0, row, STEP):
        memory = vload_16(s, MEMORIES * row + at)
        u = (vsplat(memory, 1.0) - memory) * vload_16(health, at)
        gain = fma(vload_16(coef, GA * row + at), u, vload_16(coef, GB * row + at))
        gain = fma(gain, u, vload_16(coef, GC * row + at))
        steps = vsplat(u, decimation)
        zb = vload_16(coef, ZR * row + at) * u
        vstore(s, DZB * row + at, (zb - vload_16(s, ZB * row + at)) / steps)
        vstore(s, DG * row + at, (gain - vload_16(s, G * row + at)) / steps)


@part
def _store_frame(s: Any, row: int, length: int, out: Any, to: int) -> None:
    """Store mean firing rate, RMS of the membrane and mean gain control; empty their sums."""
    for k in range(row):
        out[to + k] = s[SUM_NAP * row + k] / length
        out[to + row + k] = math.sqrt(s[SUM_BM * row + k] / length)
        out[to + 2 * row + k] = s[SUM_AGC * row + k] / length
    s[SUM_NAP * row : MEMORIES * row] = 0.0


@kernel
def run_clip(
    x: Any, position: int, state: Any, channels: int, coef: Any, numbers: Any, agc: Any,
    counts: Any, kind: int, delayed: bool, closed: bool, wanted: int, hop: Any, frames: Any,
    samples: Any, memories: Any,
) -> None:  # fmt: skip
    """Run the next samples of one clip.

    Args:
        x: (ear, time).
        position: Samples of the clip before these.
        state: (ear, row of the state * channel), changed in place.
        channels: Channels, at least 4; `row` below is the same padded to whole vectors.
        coef: (row of coefficients * channel), flat.
        numbers, agc, counts: As the constants above say, flat; `counts` are integers.
        kind: The hair cell.
        delayed: True if a channel's input is the last sample of the channel before.
        closed: True if the gain control acts on the filters.
        wanted: Bits of outputs.
        hop: Samples of a frame, as numerator and denominator.
        frames: (frame, ear, 3, channel), flat: the frames that these samples complete.
        samples: (time, ear, SAMPLE_ROWS, channel), flat; empty unless EVERY_SAMPLE is wanted.
        memories: (update, ear, stage, channel), flat; as `samples`.
    """
    (ears, n), stages = x.shape, counts.shape[0] // STAGE_COUNTS
    row = coef.shape[0] // (HEALTH + ears)
    room, pitch = aligned((stages + 3) * row + 2 * STEP, coef), ears * SAMPLE_ROWS * row
    room[:] = 0.0
    decimation, num, den = counts[DECIMATION], hop[0], hop[1]
    frame, done, update, t = position * den // num, 0, 0, 0
    if not closed:
        for ear in range(ears):
            state[ear, DZB * row : (DG + 1) * row] = 0.0
    while t < n:
        begin, end = -(-frame * num // den), -(-(frame + 1) * num // den)
        count = min(decimation - position % decimation, n - t, end - position)
        for ear in range(ears):
            to = t * pitch + ear * SAMPLE_ROWS * row
            _run_samples(
                x[ear], t, count, state[ear], row, coef, numbers, kind, delayed, wanted, samples,
                to, pitch,
            )  # fmt: skip
        position, t = position + count, t + count
        is_due, is_end = position % decimation == 0, position == end
        if wanted & POOL_AGC and (is_due or is_end):
            # Samples that the memory has acted on since its last update, in this frame.
            acted = position - max((position - 1) // decimation * decimation, begin)
            for ear in range(ears):
                for at in range(0, row, STEP):
                    total, own = (
                        vload_16(state[ear], SUM_AGC * row + at),
                        vload_16(state[ear], MEMORIES * row + at),
                    )
                    vstore(state[ear], SUM_AGC * row + at, fma(own, vsplat(own, acted), total))
        if is_due:
            due = 1
            while due < stages and position % counts[due * STAGE_COUNTS + PERIOD] == 0:
                due += 1
            for ear in range(ears):
                _update_ear(state[ear], row, channels, due, numbers, agc, counts, room)
            if ears > 1:
                _mix_ears(state, row, due, agc)
            for ear in range(ears):
                s = state[ear]
                if closed:
                    _close_loop(s, row, coef, coef[(HEALTH + ear) * row :], decimation)
                if wanted & EVERY_SAMPLE:
                    for stage in range(stages):
                        to = ((update * ears + ear) * stages + stage) * row
                        for at in range(0, row, STEP):
                            own = vload_16(s, (MEMORIES + 2 * stage) * row + at)
                            vstore(memories, to + at, own)
            update += 1
        if is_end:
            for ear in range(ears):
                _store_frame(state[ear], row, end - begin, frames, (done * ears + ear) * 3 * row)
            done, frame = done + 1, frame + 1
