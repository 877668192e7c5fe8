"""Cases of the built-in operations, for the conformance tests."""

from __future__ import annotations

import torch

from amtcore.kernels.operation import Example


def _adaptation() -> list[Example]:
    rest = 1e-5 ** (0.5 ** torch.arange(1, 6, dtype=torch.float64))
    m = (1 - rest**2) * 10 - 1
    loops = torch.stack((0.02 * torch.rand(5, dtype=torch.float64), m, -2 / m), 1).flatten()
    fixed = torch.stack((rest[0] ** 2, rest[-1], 100 / (1 - rest[-1])))
    coef = torch.cat((fixed, loops)).repeat(5, 1)
    x = torch.randn(5, 300, dtype=torch.float64).square()
    return [Example(argument, coef, rest.repeat(5, 1), x) for argument in (10, 11)]


def _broken_stick() -> list[Example]:
    examples = []
    for knee in (0.4, 0.0):
        exponent = 0.2 + 0.5 * torch.rand(5, dtype=torch.float64)
        gain = 1 + torch.rand(5, dtype=torch.float64)
        above = gain * knee ** (1 - exponent) if knee else gain
        coef = torch.stack((gain, above, exponent, torch.full_like(gain, knee)), 1)
        x = torch.randn(5, 300, dtype=torch.float64)
        examples.append(Example(0, coef, coef.new_zeros(5, 0), x))
    return examples


def _square() -> list[Example]:
    gain = 0.5 + torch.rand(5, 1, dtype=torch.float64)
    return [Example(0, gain, gain[:, :0], torch.randn(5, 300, dtype=torch.float64))]


def _hair_cell() -> list[Example]:
    """Rows near the model's, and inputs that open and close the channels."""
    rows = torch.tensor(
        [0.57, -3.0, 1.25, -7.0, 0.054, 0.072, 0.006, 0.147, 1e-4], dtype=torch.float64
    )
    coef = rows * (0.9 + 0.2 * torch.rand(5, 9, dtype=torch.float64))
    x = torch.randn(5, 300, dtype=torch.float64)
    x[:3, 200:] *= 30.0
    return [Example(0, coef, 0.01 * torch.randn(5, 1, dtype=torch.float64), x)]


def _cascades(orders: tuple[int, ...]) -> list[Example]:
    angle = torch.rand(5, dtype=torch.float64)
    coef = torch.stack((0.9 * angle.cos(), 0.9 * angle.sin(), angle), 1)
    x = torch.randn(5, 300, dtype=torch.float64)
    states = [torch.randn(5, 2 * order, dtype=torch.float64) for order in orders]
    return [Example(order, coef, state, x) for order, state in zip(orders, states, strict=True)]


def _first_order() -> list[Example]:
    coef = 0.9 * torch.rand(5, 3, dtype=torch.float64)
    x, state = torch.randn(5, 300, dtype=torch.float64), torch.rand(5, 1, dtype=torch.float64)
    return [Example(argument, coef, state, x) for argument in (0, 1)]


def _state_variable() -> list[Example]:
    g, k = torch.rand(5, dtype=torch.float64), 0.5 + torch.rand(5, dtype=torch.float64)
    a1 = 1 / (1 + g * (g + k))
    coef = torch.stack((a1, g * a1, g * g * a1, *torch.rand(3, 5, dtype=torch.float64)), 1)
    x, state = torch.randn(5, 300, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    return [Example(argument, coef, state, x) for argument in (0, 1)]


#: Examples by the operation's name.
EXAMPLES = {
    "adaptation": _adaptation,
    "broken_stick": _broken_stick,
    "square": _square,
    "hair_cell": _hair_cell,
    "one_pole_cascade": lambda: _cascades((4, 3)),
    "pole_zero_cascade": lambda: _cascades((3,)),
    "first_order": _first_order,
    "state_variable": _state_variable,
}
