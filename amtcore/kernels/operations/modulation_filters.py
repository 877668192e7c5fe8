"""The filters that end a chain, several of them per channel.

A filter bank's table has a row for each filter: kind, first coefficient row, first state row, and
the state row of its frame statistic. A filter reads one block and writes another:

    forward  (row, x, y, n, coef, state)
    adjoint  (row, x, gy, gx, n, coef, gcoef, state, gstate, scratch); `gx` is added to
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amtcore.errors import ParameterError
from amtcore.kernels.operation import over_time
from amtcore.kernels.operations.one_pole import turned, with_real
from amtcore.kernels.operations.sections import (
    state_variable,
    state_variable_section,
    state_variable_section_adjoint,
)
from amtcore.kernels.vector.jit import part
from amtcore.kernels.vector.simd import (
    LANES,
    fma,
    vabs,
    vload,
    vmax,
    vsplat,
    vsqrt,
    vstore,
    where_greater_or_nan,
)

#: Coefficient rows and state rows of one section.
FILTER_COEFS, FILTER_STATES = 6, 2

# Kinds.
BANK_STATE_VARIABLE = 0
BANK_REAL = 1
BANK_MODULUS = 2
BANK_IDENTITY = 3
BANK_TWO_SECTIONS = 4


def modulation_bank(
    x: Tensor, coef: Tensor, state: Tensor, kinds: list[int], offsets: list[int]
) -> tuple[Tensor, Tensor]:
    """Filters of all channels side by side: filter w of channel f takes x[:, f].

    Args:
        x: (batch, channel, time).
        coef: (filter, 6); the complex kinds use pole real, pole imaginary, input gain, output
            gain, the state-variable kind its six; (filter, 12) for two sections in series.
        state: (batch, filter, 2), or 4 for two sections.
        kinds: Kind of the m-th filter of every channel, one of `FILTERS`.
        offsets: (channel + 1), cuts the filters into channels.
    Returns:
        y (batch, filter, time) and the state after the last sample.
    """
    outputs, states = [], []
    for channel in range(x.shape[1]):
        for w in range(offsets[channel], offsets[channel + 1]):
            kind, part = kinds[w - offsets[channel]], slice(w, w + 1)
            source, before = x[:, channel : channel + 1], state[:, part]
            if kind == BANK_STATE_VARIABLE:
                y, after = state_variable(source, coef[part], before)
            elif kind == BANK_TWO_SECTIONS:
                middle, first = state_variable(source, coef[part, :6], before[..., :2])
                y, second = state_variable(middle, coef[part, 6:], before[..., 2:])
                after = torch.cat((first, second), -1)
            else:
                y, after = _complex_filter(source, coef[w], before, kind == BANK_MODULUS)
            outputs.append(y)
            states.append(after)
    return torch.cat(outputs, 1), torch.cat(states, 1)


def _complex_filter(x: Tensor, coef: Tensor, state: Tensor, modulus: bool) -> tuple[Tensor, Tensor]:
    """y = g_out (Re z | |z|) with z[t] = p z[t-1] + g_in x[t]."""
    z, samples = state, []
    for sample in x.unbind(-1):
        z = with_real(turned(coef[0], coef[1], z), coef[2] * sample)
        size = torch.linalg.vector_norm(z, dim=-1) if modulus else z[..., 0]
        samples.append(coef[3] * size)
    return over_time(samples, state), z


@part
def modulation_block(
    x: Any, y: Any, n: int, modulus: bool, coef: Any, c: int, state: Any, s: int
) -> None:
    """One complex modulation filter: `x` in, `y` its real part or its scaled modulus.

    Coefficient rows from `c`: pole real, pole imaginary, input gain, output gain.
    """
    p_re, p_im = vload(coef, c * LANES), vload(coef, (c + 1) * LANES)
    gain, scale = vload(coef, (c + 2) * LANES), vload(coef, (c + 3) * LANES)
    minus_p_im = vsplat(coef, 0.0) - p_im
    z_re, z_im = vload(state, s * LANES), vload(state, (s + 1) * LANES)
    for t in range(n):
        new_re = fma(p_re, z_re, fma(minus_p_im, z_im, vload(x, t * LANES) * gain))
        z_im = fma(p_re, z_im, p_im * z_re)
        z_re = new_re
        if modulus:
            vstore(y, t * LANES, scale * vsqrt(fma(z_re, z_re, z_im * z_im)))
        else:
            vstore(y, t * LANES, scale * z_re)
    vstore(state, s * LANES, z_re)
    vstore(state, (s + 1) * LANES, z_im)


@part
def modulation_adjoint(
    x: Any, gy: Any, gx: Any, n: int, modulus: bool, coef: Any, gcoef: Any, c: int,
    state: Any, gstate: Any, s: int, scratch: Any,
) -> None:  # fmt: skip
    """Gradients of one complex modulation filter; `gx` is added to.

    With z[t] = p z[t-1] + a x[t]:  l[t] = b gy[t] (1 or z/|z|) + p* l[t+1],  gx = a Re l,
    ga = sum of x Re l,  gb = sum of gy (Re z or |z|). The modulus has gradient 0 at z = 0.
    """
    p_re, p_im = vload(coef, c * LANES), vload(coef, (c + 1) * LANES)
    gain, scale = vload(coef, (c + 2) * LANES), vload(coef, (c + 3) * LANES)
    zero, tiny = vsplat(coef, 0.0), vsplat(coef, 1e-30)
    minus_p_im = zero - p_im
    z_re, z_im = vload(state, s * LANES), vload(state, (s + 1) * LANES)
    vstore(scratch, 0, z_re)
    vstore(scratch, LANES, z_im)
    for t in range(n):
        new_re = fma(p_re, z_re, fma(minus_p_im, z_im, vload(x, t * LANES) * gain))
        z_im = fma(p_re, z_im, p_im * z_re)
        z_re = new_re
        vstore(scratch, 2 * (t + 1) * LANES, z_re)
        vstore(scratch, 2 * (t + 1) * LANES + LANES, z_im)
    gp_re, gp_im = vload(gcoef, c * LANES), vload(gcoef, (c + 1) * LANES)
    g_gain, g_scale = vload(gcoef, (c + 2) * LANES), vload(gcoef, (c + 3) * LANES)
    # Gradient that reaches z[t] from later samples: p* l[t+1].
    later_re, later_im = vload(gstate, s * LANES), vload(gstate, (s + 1) * LANES)
    for t in range(n - 1, -1, -1):
        upstream = vload(gy, t * LANES)
        z_re, z_im = vload(scratch, 2 * (t + 1) * LANES), vload(scratch, (2 * t + 3) * LANES)
        direct = upstream * scale
        if modulus:
            size = vsqrt(fma(z_re, z_re, z_im * z_im))
            g_scale = fma(upstream, size, g_scale)
            direct = direct / vmax(size, tiny)
            l_re, l_im = fma(direct, z_re, later_re), fma(direct, z_im, later_im)
        else:
            g_scale = fma(upstream, z_re, g_scale)
            l_re, l_im = direct + later_re, later_im
        z_re, z_im = vload(scratch, 2 * t * LANES), vload(scratch, (2 * t + 1) * LANES)
        gp_re = fma(l_re, z_re, fma(l_im, z_im, gp_re))
        gp_im = fma(l_im, z_re, fma(zero - l_re, z_im, gp_im))
        g_gain = fma(vload(x, t * LANES), l_re, g_gain)
        # Where a channel has no such filter the gain is 0, and l may be NaN although gy is 0.
        l_re = where_greater_or_nan(vabs(gain), zero, l_re, zero)
        vstore(gx, t * LANES, fma(gain, l_re, vload(gx, t * LANES)))
        later_re = fma(p_re, l_re, p_im * l_im)
        later_im = fma(p_re, l_im, minus_p_im * l_re)
    vstore(gstate, s * LANES, later_re)
    vstore(gstate, (s + 1) * LANES, later_im)
    vstore(gcoef, c * LANES, gp_re)
    vstore(gcoef, (c + 1) * LANES, gp_im)
    vstore(gcoef, (c + 2) * LANES, g_gain)
    vstore(gcoef, (c + 3) * LANES, g_scale)


@dataclass(frozen=True)
class BankFilter:
    """One kind of filter.

    `forward` and `adjoint` are parts with the signatures above. `taped` is the number of scratch
    rows a sample that the adjoint needs.
    """

    name: str
    forward: Any
    adjoint: Any
    taped: int


@part(forceinline=True)
def _state_variable(row: Any, x: Any, y: Any, n: int, coef: Any, state: Any) -> None:
    state_variable_section(x, y, n, False, coef, row[1], state, row[2])


@part(forceinline=True)
def _state_variable_adjoint(
    row: Any, x: Any, gy: Any, gx: Any, n: int, coef: Any, gcoef: Any, state: Any, gstate: Any,
    scratch: Any,
) -> None:  # fmt: skip
    state_variable_section_adjoint(
        x, gy, gx, n, False, True, coef, gcoef, row[1], state, gstate, row[2], scratch
    )


@part(forceinline=True)
def _real(row: Any, x: Any, y: Any, n: int, coef: Any, state: Any) -> None:
    modulation_block(x, y, n, False, coef, row[1], state, row[2])


@part(forceinline=True)
def _real_adjoint(
    row: Any, x: Any, gy: Any, gx: Any, n: int, coef: Any, gcoef: Any, state: Any, gstate: Any,
    scratch: Any,
) -> None:  # fmt: skip
    modulation_adjoint(x, gy, gx, n, False, coef, gcoef, row[1], state, gstate, row[2], scratch)


@part(forceinline=True)
def _modulus(row: Any, x: Any, y: Any, n: int, coef: Any, state: Any) -> None:
    modulation_block(x, y, n, True, coef, row[1], state, row[2])


@part(forceinline=True)
def _modulus_adjoint(
    row: Any, x: Any, gy: Any, gx: Any, n: int, coef: Any, gcoef: Any, state: Any, gstate: Any,
    scratch: Any,
) -> None:  # fmt: skip
    modulation_adjoint(x, gy, gx, n, True, coef, gcoef, row[1], state, gstate, row[2], scratch)


@part(forceinline=True)
def _identity(row: Any, x: Any, y: Any, n: int, coef: Any, state: Any) -> None:
    for t in range(n):
        vstore(y, t * LANES, vload(x, t * LANES))


@part(forceinline=True)
def _identity_adjoint(
    row: Any, x: Any, gy: Any, gx: Any, n: int, coef: Any, gcoef: Any, state: Any, gstate: Any,
    scratch: Any,
) -> None:  # fmt: skip
    for t in range(n):
        vstore(gx, t * LANES, vload(gx, t * LANES) + vload(gy, t * LANES))


@part(forceinline=True)
def _two_sections(row: Any, x: Any, y: Any, n: int, coef: Any, state: Any) -> None:
    c, s = row[1], row[2]
    state_variable_section(x, y, n, False, coef, c, state, s)
    state_variable_section(y, y, n, False, coef, c + FILTER_COEFS, state, s + FILTER_STATES)


@part(forceinline=True)
def _two_sections_adjoint(
    row: Any, x: Any, gy: Any, gx: Any, n: int, coef: Any, gcoef: Any, state: Any, gstate: Any,
    scratch: Any,
) -> None:  # fmt: skip
    """Run both adjoints; `state` is unchanged.

    A section's adjoint uses the first half of the scratch. The second half holds the signal between
    the sections and its gradient.
    """
    c, s = row[1], row[2]
    middle = scratch[2 * n * LANES : 3 * n * LANES]
    g_middle = scratch[3 * n * LANES : 4 * n * LANES]
    i1, i2 = vload(state, s * LANES), vload(state, (s + 1) * LANES)
    state_variable_section(x, middle, n, False, coef, c, state, s)
    vstore(state, s * LANES, i1)
    vstore(state, (s + 1) * LANES, i2)
    state_variable_section_adjoint(
        middle, gy, g_middle, n, False, False, coef, gcoef, c + FILTER_COEFS, state, gstate,
        s + FILTER_STATES, scratch,
    )  # fmt: skip
    state_variable_section_adjoint(
        x, g_middle, gx, n, False, True, coef, gcoef, c, state, gstate, s, scratch
    )


FILTERS: dict[int, BankFilter] = {
    BANK_STATE_VARIABLE: BankFilter(
        "second-order section", _state_variable, _state_variable_adjoint, 2
    ),
    BANK_REAL: BankFilter("real part of a complex section", _real, _real_adjoint, 2),
    BANK_MODULUS: BankFilter("modulus of a complex section", _modulus, _modulus_adjoint, 2),
    BANK_IDENTITY: BankFilter("identity", _identity, _identity_adjoint, 0),
    BANK_TWO_SECTIONS: BankFilter("two sections", _two_sections, _two_sections_adjoint, 4),
}


def filter_states(coefs: int) -> int:
    """Return the number of state values of a filter with `coefs` coefficients."""
    return coefs // FILTER_COEFS * FILTER_STATES


def get_filter(kind: int) -> BankFilter:
    """Return a kind of filter by its code; raise if there is none."""
    if kind not in FILTERS:
        known = ", ".join(f"{kind} {each.name}" for kind, each in FILTERS.items())
        raise ParameterError(f"a bank has no filter of kind {kind}: expected one of {known}")
    return FILTERS[kind]
