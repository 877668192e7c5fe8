"""Bounds of constants that are learnt, and what an optimiser sees of them.

    value = lowest + (highest - lowest) sigmoid(rate raw)

Whatever `raw` is, the value lies between its bounds. Far below the highest bound the value moves
by a percentage (1e-3 of raw is 0.1 %), as a logarithm would; `unit` sets the step of values that
have a scale of their own, such as decibels. A denominator is bounded as a whole, by its reflection
coefficients (Levinson's recursion backwards), which are below 1 exactly where it is stable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from amtcore.errors import ParameterError

#: Bounds of frequencies and bandwidths in cycles a sample: below them a pole rounds to the unit
#: circle in float32, above them the bilinear transform does.
LEAST_CYCLES, MOST_CYCLES = 1e-7, 0.5 * (1.0 - 1e-5)
#: Beyond this the sigmoid is its limit; a value that starts on a bound stays there.
_SATURATED, _AT_BOUND = 50.0, 64.0
#: Rounding of a bound to float32.
_ROUNDING = 1e-6
#: Reflection coefficients stay this far from 1, and the first coefficient in e^-4 .. e^4.
_LEAST_DAMPING, _MOST_LOG = 1e-6, 4.0
#: A slope of tanh that is rounding.
_HELD = 1e-14


class Limit(Protocol):
    """Bounds of one constant; all tensors are float64."""

    def check(self, name: str, value: Tensor) -> None:
        """Raise where a value is out of bounds."""

    def raw(self, value: Tensor) -> Tensor:
        """What the optimiser sees of a value."""

    def value(self, raw: Tensor) -> Tensor:
        """The inverse of `raw`, within the bounds for any finite `raw`."""

    def within(self, value: Tensor) -> Tensor:
        """A value of `value` that rounding may have put out of bounds."""

    def gradient(self, raw: Tensor, of_raw: Tensor) -> Tensor:
        """The gradient by the value from the gradient by `raw`; 0 where a bound holds the value."""


@dataclass(frozen=True)
class Range:
    """Each value lies between two bounds.

    Args:
        lowest: Lower bound.
        highest: Upper bound.
        unit: Change of the value per change of `raw` half-way between the bounds; None is a
            quarter of their distance, a plain logit.
    """

    lowest: float
    highest: float
    unit: float | None = None

    @property
    def _rate(self) -> float:
        return 1.0 if self.unit is None else 4.0 * self.unit / (self.highest - self.lowest)

    def check(self, name: str, value: Tensor) -> None:
        """Raise where a value is out of bounds."""
        low, high = (end * _ROUNDING for end in (abs(self.lowest), abs(self.highest)))
        good = (value >= self.lowest - low) & (value <= self.highest + high)
        if not bool(good.all()):
            wrong = float(value[~good].flatten()[0])
            raise ParameterError(
                f"{name} must lie between {self.lowest:g} and {self.highest:g}, got {wrong:g}"
            )

    def raw(self, value: Tensor) -> Tensor:
        """What the optimiser sees of a value."""
        share = (value - self.lowest) / (self.highest - self.lowest)
        return torch.logit(share.clamp(0.0, 1.0)).clamp(-_AT_BOUND, _AT_BOUND) / self._rate

    def value(self, raw: Tensor) -> Tensor:
        """The inverse of `raw`."""
        turned = raw * self._rate
        inside = self.lowest + (self.highest - self.lowest) * torch.sigmoid(turned)
        return torch.where(turned > -_SATURATED, inside, self.lowest)

    def within(self, value: Tensor) -> Tensor:
        """The nearest value within the bounds."""
        return value.clamp(self.lowest, self.highest)

    def gradient(self, raw: Tensor, of_raw: Tensor) -> Tensor:
        """The gradient by the value from the gradient by `raw`."""
        share = torch.sigmoid(raw * self._rate)
        slope = self._rate * (self.highest - self.lowest) * share * (1.0 - share)
        return torch.where(raw.abs() * self._rate < _SATURATED, of_raw / slope, 0.0)


@dataclass(frozen=True)
class StableDenominator:
    """Denominators a0 + a1 / z (+ a2 / z^2) whose roots lie inside the unit circle."""

    def _reflections(self, value: Tensor) -> tuple[Tensor, ...]:
        a = value / value[0]
        return (a[1],) if len(a) == 2 else (a[1] / (1.0 + a[2]), a[2])

    def check(self, name: str, value: Tensor) -> None:
        """Raise where the filter is unstable."""
        inside = [k.abs() <= 1.0 - 0.5 * _LEAST_DAMPING for k in self._reflections(value)]
        inside.append(value[0].log().abs() <= _MOST_LOG)
        if not all(bool(each) for each in inside):
            raise ParameterError(
                f"{name} must be the denominator of a stable filter, its first value between "
                f"{math.exp(-_MOST_LOG):.2g} and {math.exp(_MOST_LOG):.2g}, got {value.tolist()}"
            )

    def raw(self, value: Tensor) -> Tensor:
        """The logarithm of the first coefficient and the reflection coefficients, unbounded."""
        most = 1.0 - _LEAST_DAMPING
        shares = (k / most for k in self._reflections(value))
        edge = 1.0 - 1e-9
        first = torch.atanh((value[0].log() / _MOST_LOG).clamp(-edge, edge)) * _MOST_LOG
        return torch.stack([first, *(torch.atanh(k.clamp(-edge, edge)) for k in shares)])

    def value(self, raw: Tensor) -> Tensor:
        """The inverse of `raw`."""
        first = torch.exp(_MOST_LOG * torch.tanh(raw[0] / _MOST_LOG))
        k = (1.0 - _LEAST_DAMPING) * torch.tanh(raw[1:])
        others = (k[0],) if len(k) == 1 else (k[0] * (1.0 + k[1]), k[1])
        return first * torch.stack((torch.ones_like(first), *others))

    def within(self, value: Tensor) -> Tensor:
        """The value itself: rounding is less than the damping that is left."""
        return value

    def gradient(self, raw: Tensor, of_raw: Tensor) -> Tensor:
        """The gradient by the value from the gradient by `raw`."""
        first, k = torch.tanh(raw[0] / _MOST_LOG), torch.tanh(raw[1:])
        value = self.value(raw)
        # value = first (1, k) or first (1, k0 (1 + k1), k1), solved from its far end: a matrix
        # would be inverted by a library that makes the CPU wait for the device.
        most = 1.0 - _LEAST_DAMPING
        others = _unless_held(of_raw[1:], most * (1.0 - k.square())) / value[0]
        if len(others) == 2:
            nearer = others[0] / (1.0 + most * k[1])
            others = torch.stack((nearer, others[1] - most * k[0] * nearer))
        along = _unless_held(of_raw[0], 1.0 - first.square())
        return torch.cat((((along - (value[1:] * others).sum()) / value[0])[None], others))


def _unless_held(of_raw: Tensor, slope: Tensor) -> Tensor:
    """A gradient by what a sigmoid bounds; 0 where the bound holds it."""
    return torch.where(slope > _HELD, of_raw / slope, 0.0)


#: Time constants in s.
SECONDS = Range(1e-6, 1e3)
#: Levels and gains in dB; a step of 1e-3 of the optimiser is 0.01 dB.
DECIBELS = Range(-200.0, 300.0, 10.0)


def frequencies(fs: float) -> Range:
    """Frequencies in Hz at which a filter can be at this sampling rate."""
    return Range(LEAST_CYCLES * fs, MOST_CYCLES * fs)


def bandwidths(fs: float) -> Range:
    """Bandwidths in Hz of a pole at this sampling rate."""
    return Range(LEAST_CYCLES * fs, 2.0 * fs)


def around(value: float, factor: float = 1e3) -> Range:
    """Positive values up to so many times larger or smaller."""
    return Range(value / factor, value * factor)
