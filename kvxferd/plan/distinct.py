"""The distinct values of an array, in order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def distinct(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return what `np.unique` does, which first imports `numpy.ma`: 10 ms of a mover's first pull."""
    ordered = np.sort(values)
    is_new = np.ones(len(ordered), dtype=bool)
    is_new[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_new]
