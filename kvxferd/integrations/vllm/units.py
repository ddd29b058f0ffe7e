"""The heads, groups or channels of the whole model that a rank holds, by vLLM's rules of division."""

from __future__ import annotations

from kvxferd.layout import UnitRange


def unit_range_of_rank(local: int, total: int, tp_size: int, tp_rank: int) -> UnitRange:
    """Return the units that a rank with `local` of `total` units holds.

    vLLM divides evenly, and gives neighbours a copy of one unit each where there are more ranks
    than units. Raises ValueError where `local` fits neither rule.
    """
    if local == total:
        return UnitRange(0, total)
    if total >= tp_size and local * tp_size == total:
        return UnitRange(tp_rank * local, (tp_rank + 1) * local)
    if total < tp_size and local == 1 and tp_size % total == 0:
        unit = tp_rank * total // tp_size
        return UnitRange(unit, unit + 1)
    raise ValueError(f"{local} of {total} are held by rank {tp_rank} of {tp_size}")
