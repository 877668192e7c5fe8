"""CARFAC as a plain loop over samples, from its equations alone, for rates and settings without
reference data. It reads the constants of a module and shares no code with the kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from amtcore.models.carfac import CARFAC

Array = np.ndarray[Any, Any]


def rows_of(groups: Any, channels: int) -> Array:
    """(.., group, row, 16) as (.., row, channel)."""
    rows = np.asarray(groups).swapaxes(-2, -3)
    return rows.reshape(*rows.shape[:-2], -1)[..., :channels]


def smooth(m: Array, low: float, high: float, five_taps: bool) -> Array:
    """One iteration of the smoothing over channels."""
    n, middle, out = len(m), 1.0 - low - high, np.empty_like(m)
    for k in range(n):
        down, up = m[max(k - 1, 0)], m[min(k + 1, n - 1)]
        if five_taps:
            down += m[{0: 0, 1: 1}.get(k, k - 2)]
            up += m[{n - 2: n - 1, n - 1: n - 2}.get(k, k + 2)]
            out[k] = low / 2 * down + middle * m[k] + high / 2 * up
        else:
            out[k] = low * down + middle * m[k] + high * up
    return out


def conductance(x: Array) -> Array:
    """Conductance of the hair cell."""
    z = np.maximum(0.0, x + 0.175)
    return z**3 / (z**3 + z**2 + 0.1)


def run(model: CARFAC, x: Array) -> dict[str, Array]:
    """Run signals (ear, time) through a float64 module of the hair cell with two capacitors."""
    n, (ears, length) = model.n_channels, x.shape
    a, c, h, r1, zr, ga, gb, gc, cell_gain = rows_of(model.coef, n)[:9]
    health = rows_of(model.coef, n)[9:]
    start = rows_of(model.start, n)
    numbers = model.numbers.tolist()
    vel, off, k_ac, detect, stage_gain, k_lp, gain, rest, out1, in1, out2, in2 = numbers
    agc, counts = model.agc.numpy(), model.counts.numpy()
    stages = len(counts)
    zero = np.zeros((ears, n))
    z1, z2, za, zy, ac, dzb, dg = (zero.copy() for _ in range(7))
    zb, g, p = start[:, 3].copy(), start[:, 4].copy(), np.full((ears, n), rest)
    c1, c2 = start[:, 11].copy(), start[:, 12].copy()
    memory, total = np.zeros((stages, ears, n)), np.zeros((stages, ears, n))
    phase = [[0] * stages for _ in range(ears)]
    made: dict[str, list[Array]] = {"bm": [], "nap": [], "agc_zb": [], "ohc_za": [], "agc": []}

    def feed(ear: int, s: int, u: Array) -> list[int]:
        total[s, ear] += u
        phase[ear][s] = (phase[ear][s] + 1) % int(counts[s, 0])
        if phase[ear][s]:
            return []
        u = total[s, ear] / counts[s, 0]
        total[s, ear] = 0.0
        due = feed(ear, s + 1, u) if s + 1 < stages else []
        if s + 1 < stages:
            u = u + stage_gain * memory[s + 1, ear]
        rate, taps = agc[s, 0], agc[s, 1:6]
        low, high = taps[:2].sum(), taps[3:].sum()
        m = memory[s, ear] + rate * (u - memory[s, ear])
        for _ in range(counts[s, 2]):
            m = smooth(m, low, high, taps[0] != 0 or taps[4] != 0)
        memory[s, ear] = m
        return [s, *due]

    for t in range(length):
        g, zb = g + dg, zb + dzb
        v = z2 - za
        r = r1 + zb / (1.0 + (vel * v + off) ** 2)
        za = z2
        z1, z2 = r * (a * z1 - c * z2), r * (c * z1 + a * z2)
        y = np.zeros((ears, n))
        for ear in range(ears):
            w = x[ear, t]
            for k in range(n):
                z1[ear, k] += w
                y[ear, k] = g[ear, k] * (w + h[k] * z2[ear, k])
                w = zy[ear, k] if model.delay_per_stage else y[ear, k]
        zy, bm = y, y - ac
        ac = ac + k_ac * bm
        q = conductance(cell_gain * bm) * c1
        c1 = c1 - q * out1 + (1.0 - c1) * in1
        q2 = (1.0 - c1) * c2
        c2 = c2 - q2 * out2 + (1.0 - c2) * in2
        p = p + k_lp * (gain * q2 - p)
        nap = p - rest
        *_, due = [feed(ear, 0, detect * nap[ear]) for ear in range(ears)]
        for s in due:
            mean = memory[s].mean(0) if ears > 1 else memory[s]
            memory[s] += agc[s, 6] * (mean - memory[s])
        if due:
            made["agc"].append(memory.copy())
            if not model.open_loop:
                u = (1.0 - memory[0]) * health
                dzb = (zr * u - zb) / counts[0, 0]
                dg = (ga * u**2 + gb * u + gc - g) / counts[0, 0]
        for name, value in (("bm", bm), ("nap", nap), ("agc_zb", zb), ("ohc_za", za)):
            made[name].append(value.copy())
    arrays = {name: np.array(made[name]) for name in ("bm", "nap", "agc_zb", "ohc_za")}
    found = {name: array.transpose(1, 2, 0) for name, array in arrays.items()}
    return {**found, "agc_memory": np.array(made["agc"]).transpose(2, 1, 3, 0)}
