"""How a cost grows: the exponent of the power law through it."""

from __future__ import annotations

import math
from collections.abc import Sequence


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return the slope of log(cost) over log(size), by least squares: 0 is flat, 1 linear, 2 quadratic."""
    xs, ys = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    if spread == 0:
        raise ValueError("cannot fit sizes that are all the same")
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread
