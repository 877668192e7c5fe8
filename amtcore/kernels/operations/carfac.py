"""Cascade of asymmetric resonators, inner hair cells and gain control (Lyon's CARFAC v2).

In a sample, the output of each channel's resonator is the input of the next channel:

    y[k] = g[k] (w[k] + h[k] n2[k]),   w[k + 1] = y[k].

This chain is one fused multiply-add a channel. Everything else works on 16 channels at once. The
hair cells of a sample run while the chain of the next sample waits for its own results. So a loop
over channels ends one sample, `_end_sample`, and begins the next, `_begin_sample`.

The gain control runs every `decimation[0]` samples, at positions counted from the signal's begin.
All state is in one array of numbers, so chunks of any length give the bits of the whole. Numbers of
16 channels lie together: constant offsets leave no addresses to be computed. There is no adjoint:
the kernel computes on the CPU without gradients.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

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

#: Channels of a vector; channels are padded to whole vectors.
STEP = 16
#: Coefficients: of the resonators, of the feedback, and gain before the hair cells. The health of
#: each ear follows.
A, C, H, R1, ZR, GA, GB, GC, CELL_GAIN, HEALTH = range(10)
#: State of an ear. Memory and accumulator of each stage of gain control follow.
(Z1, Z2, ZA, ZB, G, DZB, DG, INPUT, RIPPLE, DELAYED, AC, CAP1, CAP2, LOWPASS, SUM_NAP, SUM_BM,
 SUM_AGC, MEMORIES) = range(18)  # fmt: skip
#: Numbers of a model: scale and offset of the velocity, both 0 for linear filters; AC coefficient;
#: scale of the gain control's input, gain of its stages; numbers of the hair cell, else 0.
(VELOCITY, OFFSET, AC_RATE, DETECT, STAGE_GAIN, LOWPASS_RATE, GAIN, REST, OUT1, IN1, OUT2, IN2,
 NUMBERS) = range(13)  # fmt: skip
#: Numbers of a stage of gain control: rate, taps of channels k - 2 to k + 2, mixing of the ears.
RATE, TAPS, MIX, STAGE_NUMBERS = 0, 1, 6, 7
#: Whole numbers of a stage: decimation, product of decimations up to here, iterations.
DECIMATION, PERIOD, ITERATIONS, STAGE_COUNTS = range(4)
#: Hair cells.
TWO_CAP, ONE_CAP, JUST_HWR = range(3)
#: Offset and constant of the conductance, limit of the rectifier.
DETECT_OFFSET, DETECT_CONSTANT, RECTIFIER_LIMIT = 0.175, 0.1, 2.0
#: Rows of a sample in the output of every sample.
BM_OUT, NAP_OUT, ZB_OUT, ZA_OUT, SAMPLE_ROWS = range(5)


@part(forceinline=True)
def _load(s: Any, base: int, name: int) -> Any:
    return vload_16(s, base + name * STEP)


@part(forceinline=True)
def _store(s: Any, base: int, name: int, value: Any) -> None:
    vstore(s, base + name * STEP, value)


@part(forceinline=True)
def _begin_sample(s: Any, base: int, coef: Any, at: int, numbers: Any) -> None:
    """Ramp gain and damping, and turn the resonators of 16 channels, without their inputs."""
    gain = _load(s, base, G) + _load(s, base, DG)
    zb = _load(s, base, ZB) + _load(s, base, DZB)
    _store(s, base, G, gain)
    _store(s, base, ZB, zb)
    z1, z2, one = _load(s, base, Z1), _load(s, base, Z2), vsplat(gain, 1.0)
    speed = z2 - _load(s, base, ZA)
    moved = fma(speed, vsplat(one, numbers[VELOCITY]), vsplat(one, numbers[OFFSET]))
    undamping = one / fma(moved, moved, one)
    radius = fma(zb, undamping, _load(coef, at, R1))
    a, c = _load(coef, at, A), _load(coef, at, C)
    n2 = radius * fma(c, z1, a * z2)
    _store(s, base, ZA, z2)
    _store(s, base, Z1, radius * (a * z1 - c * z2))
    _store(s, base, Z2, n2)
    _store(s, base, RIPPLE, gain * (_load(coef, at, H) * n2))


@part(forceinline=True)
def _place(at: int, name: int) -> Any:
    """Return the index of one number; a signed index would cost a test for counts from the end."""
    return np.uintp(at + name * STEP)


@part(forceinline=True)
def _ripple(s: Any, base: int, w: Any, delayed: bool) -> Any:
    """Run the chain through 16 channels from the input of the first; return the next input.

    With delay, the input of a channel is the last sample of the channel before.
    """
    for k in range(base, base + STEP):
        s[_place(k, INPUT)] = w
        y = fma(s[_place(k, G)], w, s[_place(k, RIPPLE)])
        w = s[_place(k, DELAYED)] if delayed else y
        if delayed:
            s[_place(k, DELAYED)] = y
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
def _discharged(charge: Any, flow: Any, out: float, into: float) -> Any:
    """Return the charge of a capacitor after one sample."""
    missing = vsplat(charge, 1.0) - charge
    return fma(missing, vsplat(charge, into), charge - flow * vsplat(charge, out))


@part(forceinline=True)
def _hair_cell(
    kind: int, bm: Any, charge: Any, other: Any, smoothed: Any, lowpass: float, gain: float,
    out1: float, in1: float, out2: float, in2: float,
) -> Any:  # fmt: skip
    """Return the state of the hair cells of 16 channels after a sample.

    It takes no arrays: numba counts references of arrays at every branch.
    """
    if kind == JUST_HWR:
        zero = vsplat(bm, 0.0)
        rectified = where_greater_or_nan(bm, zero, bm, zero)
        smoothed = vmin(rectified, vsplat(bm, RECTIFIER_LIMIT))
    else:
        flow = _conductance(bm) * charge
        charge = _discharged(charge, flow, out1, in1)
        if kind == TWO_CAP:
            flow = (vsplat(bm, 1.0) - charge) * other
            other = _discharged(other, flow, out2, in2)
            current = vsplat(bm, gain) * flow
        else:
            other = fma(vsplat(bm, lowpass), vsplat(bm, gain) * flow - other, other)
            current = other
        smoothed = fma(vsplat(bm, lowpass), current - smoothed, smoothed)
    return charge, other, smoothed


@part(forceinline=True)
def _end_sample(s: Any, base: int, coef: Any, at: int, kind: int, numbers: Any) -> Any:
    """Add the inputs of 16 channels to their resonators, and run their hair cells.

    Returns the motion of the membrane and the firing rate. There is no branch, see `_hair_cell`.
    """
    w = _load(s, base, INPUT)
    y = fma(_load(s, base, G), w, _load(s, base, RIPPLE))
    _store(s, base, Z1, _load(s, base, Z1) + w)
    ac = _load(s, base, AC)
    bm = y - ac
    _store(s, base, AC, fma(bm, vsplat(bm, numbers[AC_RATE]), ac))
    heard = bm * _load(coef, at, CELL_GAIN)
    charge, other, smoothed = _hair_cell(
        kind, heard, _load(s, base, CAP1), _load(s, base, CAP2), _load(s, base, LOWPASS),
        numbers[LOWPASS_RATE], numbers[GAIN], numbers[OUT1], numbers[IN1], numbers[OUT2],
        numbers[IN2],
    )  # fmt: skip
    _store(s, base, CAP1, charge)
    _store(s, base, CAP2, other)
    _store(s, base, LOWPASS, smoothed)
    nap = smoothed - vsplat(bm, numbers[REST])
    detected = fma(nap, vsplat(nap, numbers[DETECT]), _load(s, base, MEMORIES + 1))
    _store(s, base, MEMORIES + 1, detected)
    _store(s, base, SUM_NAP, _load(s, base, SUM_NAP) + nap)
    _store(s, base, SUM_BM, fma(bm, bm, _load(s, base, SUM_BM)))
    return bm, nap


@part
def _run_samples(
    x: Any, begin: int, count: int, s: Any, size: int, coef: Any, width: int, numbers: Any,
    kind: int, delayed: bool, every: bool, out: Any, to: int, pitch: int,
) -> None:  # fmt: skip
    """Run `count` samples of one ear from `begin` on; outputs of samples are `pitch` apart."""
    groups = s.shape[0] // size
    row, w = groups * STEP, x[begin]
    for i in range(count + 1):
        if i < count:
            w = x[begin + i]
        for group in range(groups):
            base, here = group * size, to + i * pitch + group * STEP
            if i > 0:
                bm, nap = _end_sample(s, base, coef, group * width, kind, numbers)
                if every:
                    vstore(out, here - pitch + BM_OUT * row, bm)
                    vstore(out, here - pitch + NAP_OUT * row, nap)
            if i < count:
                _begin_sample(s, base, coef, group * width, numbers)
                if every:
                    vstore(out, here + ZB_OUT * row, vload_16(s, base + ZB * STEP))
                    vstore(out, here + ZA_OUT * row, vload_16(s, base + ZA * STEP))
                w = _ripple(s, base, w, delayed)


@part
def _smooth(m: Any, channels: int, taps: Any, s: Any, size: int, name: int) -> None:
    """Smooth the memory `name` of the state over channels once; `m` is room for it and margins.

    Channels beyond the ends are repeated. The program that this follows takes m[1], not m[0], two
    steps below m[1], and m[N - 2], not m[N - 1], two steps above m[N - 1].
    """
    for group in range(s.shape[0] // size):
        vstore(m, (group + 1) * STEP, _load(s, group * size, name))
    low, high = STEP, STEP + channels - 1
    m[low - 1] = m[low - 2] = m[low]
    m[high + 1], m[high + 2] = m[high], m[high - 1]
    for group in range(s.shape[0] // size):
        at = (group + 1) * STEP - 2
        total = vload_16(m, at)
        total = total * vsplat(total, taps[0])
        for k in range(1, 5):
            total = fma(vload_16(m, at + k), vsplat(total, taps[k]), total)
        _store(s, group * size, name, total)
    s[name * STEP + 1] += taps[0] * (m[low + 1] - m[low])


@part
def _update_ear(
    s: Any, size: int, channels: int, due: int, numbers: Any, agc: Any, counts: Any, m: Any
) -> None:
    """Update the `due` first stages of an ear's gain control, without the other ear.

    Accumulators hold means of their inputs between the two loops.
    """
    stages = counts.shape[0] // STAGE_COUNTS
    for stage in range(due):
        name = MEMORIES + 2 * stage + 1
        for base in range(0, s.shape[0], size):
            value = _load(s, base, name)
            value = value / vsplat(value, counts[stage * STAGE_COUNTS + DECIMATION])
            _store(s, base, name, value)
            if stage + 1 < stages:
                _store(s, base, name + 2, _load(s, base, name + 2) + value)
    for stage in range(due - 1, -1, -1):
        name, own = MEMORIES + 2 * stage, agc[stage * STAGE_NUMBERS :]
        for base in range(0, s.shape[0], size):
            value, before = _load(s, base, name + 1), _load(s, base, name)
            _store(s, base, name + 1, vsplat(value, 0.0))
            if stage + 1 < stages:
                value = fma(_load(s, base, name + 2), vsplat(value, numbers[STAGE_GAIN]), value)
            _store(s, base, name, fma(value - before, vsplat(value, own[RATE]), before))
        for _ in range(counts[stage * STAGE_COUNTS + ITERATIONS]):
            _smooth(m, channels, own[TAPS:], s, size, name)


@part
def _mix_ears(state: Any, size: int, due: int, agc: Any) -> None:
    """Move the memories of the `due` first stages towards their mean over ears."""
    ears, end = state.shape
    for stage in range(due):
        mix, name = agc[stage * STAGE_NUMBERS + MIX], MEMORIES + 2 * stage
        for base in range(0, end if mix > 0.0 else 0, size):
            mean = _load(state[0], base, name)
            for ear in range(1, ears):
                mean = mean + _load(state[ear], base, name)
            mean = mean / vsplat(mean, ears)
            for ear in range(ears):
                own = _load(state[ear], base, name)
                _store(state[ear], base, name, fma(mean - own, vsplat(own, mix), own))


@part
def _close_loop(s: Any, size: int, coef: Any, width: int, ear: int, decimation: int) -> None:
    """Set the ramps of gain and damping that lead to the undamping of the gain control."""
    for group in range(s.shape[0] // size):
        base, at = group * size, group * width
        memory = _load(s, base, MEMORIES)
        u = (vsplat(memory, 1.0) - memory) * _load(coef, at, HEALTH + ear)
        gain = fma(fma(_load(coef, at, GA), u, _load(coef, at, GB)), u, _load(coef, at, GC))
        steps = vsplat(u, decimation)
        _store(s, base, DZB, (_load(coef, at, ZR) * u - _load(s, base, ZB)) / steps)
        _store(s, base, DG, (gain - _load(s, base, G)) / steps)


@part
def _store_frame(s: Any, size: int, length: int, out: Any, to: int) -> None:
    """Store mean firing rate, RMS of the membrane and mean gain control; empty their sums."""
    row = s.shape[0] // size * STEP
    for k in range(row):
        at = k // STEP * size + k % STEP
        nap, bm, agc = at + SUM_NAP * STEP, at + SUM_BM * STEP, at + SUM_AGC * STEP
        out[to + k] = s[nap] / length
        out[to + row + k] = math.sqrt(s[bm] / length)
        out[to + 2 * row + k] = s[agc] / length
        s[nap] = s[bm] = s[agc] = 0.0


@kernel
def run_clip(
    x: Any, position: int, state: Any, channels: int, coef: Any, numbers: Any, agc: Any,
    counts: Any, kind: int, delayed: bool, closed: bool, every: bool, hop: Any, frames: Any,
    samples: Any, memories: Any,
) -> None:  # fmt: skip
    """Run the next samples of one clip.

    Args:
        x: (ear, time).
        position: Samples of the clip before these.
        state: (ear, group * state * STEP), changed in place.
        channels: Channels, at least 4; `row` below is the same padded to whole groups of STEP.
        coef: (group * coefficient * STEP), flat.
        numbers, agc, counts: As the constants above say, flat; `counts` are integers.
        kind: The hair cell.
        delayed: True if a channel's input is the last sample of the channel before.
        closed: True if the gain control acts on the filters.
        every: True if outputs of every sample are wanted.
        hop: Samples of a frame, as numerator and denominator.
        frames: (frame, ear, 3, row), flat: the frames that these samples complete.
        samples: (time, ear, SAMPLE_ROWS, row), flat; empty without `every`.
        memories: (update, ear, stage, row), flat; as `samples`.
    """
    (ears, n), stages = x.shape, counts.shape[0] // STAGE_COUNTS
    size, width = (MEMORIES + 2 * stages) * STEP, (HEALTH + ears) * STEP
    row = state.shape[1] // size * STEP
    m, pitch = aligned(row + 2 * STEP, coef), ears * SAMPLE_ROWS * row
    m[:] = 0.0
    decimation, num, den = counts[DECIMATION], hop[0], hop[1]
    frame, done, update, t = position * den // num, 0, 0, 0
    while t < n:
        begin, end = -(-frame * num // den), -(-(frame + 1) * num // den)
        count = min(decimation - position % decimation, n - t, end - position)
        for ear in range(ears):
            _run_samples(
                x[ear], t, count, state[ear], size, coef, width, numbers, kind, delayed, every,
                samples, t * pitch + ear * SAMPLE_ROWS * row, pitch,
            )  # fmt: skip
        position, t = position + count, t + count
        is_due, is_end = position % decimation == 0, position == end
        if is_due or is_end:
            # Samples that the memory has acted on since its last update, in this frame.
            acted = position - max((position - 1) // decimation * decimation, begin)
            for ear in range(ears):
                for base in range(0, state.shape[1], size):
                    own, total = _load(state[ear], base, MEMORIES), _load(state[ear], base, SUM_AGC)
                    _store(state[ear], base, SUM_AGC, fma(own, vsplat(own, acted), total))
        if is_due:
            due = 1
            while due < stages and position % counts[due * STAGE_COUNTS + PERIOD] == 0:
                due += 1
            for ear in range(ears):
                _update_ear(state[ear], size, channels, due, numbers, agc, counts, m)
            if ears > 1:
                _mix_ears(state, size, due, agc)
            for ear in range(ears):
                if closed:
                    _close_loop(state[ear], size, coef, width, ear, decimation)
                for stage in range(stages if every else 0):
                    to = ((update * ears + ear) * stages + stage) * row
                    for group in range(row // STEP):
                        own = _load(state[ear], group * size, MEMORIES + 2 * stage)
                        vstore(memories, to + group * STEP, own)
            update += 1
        if is_end:
            for ear in range(ears):
                _store_frame(state[ear], size, end - begin, frames, (done * ears + ear) * 3 * row)
            done, frame = done + 1, frame + 1
