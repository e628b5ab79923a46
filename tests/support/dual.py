"""Computes gradients of formulas with dual numbers (forward-mode differentiation) in plain floats, exact up to
rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Dual:
    """A value and its derivative with respect to one variable."""

    value: float
    slope: float = 0.0

    def __add__(self, other: Dual | float) -> Dual:
        other = dual(other)
        return Dual(self.value + other.value, self.slope + other.slope)

    def __mul__(self, other: Dual | float) -> Dual:
        other = dual(other)
        return Dual(self.value * other.value, self.slope * other.value + self.value * other.slope)

    def __neg__(self) -> Dual:
        return self * -1.0

    def __sub__(self, other: Dual | float) -> Dual:
        return self + -dual(other)

    def __truediv__(self, other: float) -> Dual:
        return self * (1.0 / other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: float) -> Dual:
        return dual(other) - self


def dual(x: Dual | float) -> Dual:
    """Convert a number to a dual number with derivative 0."""
    return x if isinstance(x, Dual) else Dual(float(x))


def exp(x: Dual) -> Dual:
    """Compute e^x."""
    return Dual(math.exp(x.value), math.exp(x.value) * x.slope)


def clip(x: Dual, low: float, high: float) -> Dual:
    """Clip x; outside the bounds the derivative is 0."""
    return x if low <= x.value <= high else Dual(min(max(x.value, low), high))


def least(x: Dual, y: Dual) -> Dual:
    """Return the smaller of two numbers."""
    return x if x.value <= y.value else y


def most(x: Dual, y: Dual) -> Dual:
    """Return the larger of two numbers."""
    return x if x.value >= y.value else y
