"""Division of heads over tensor-parallel ranks and of layers over pipeline stages, as engines do it."""

from __future__ import annotations

from kvxferd.layout.tensors import UnitRange


def balanced_share(total: int, parts: int, index: int) -> tuple[int, int]:
    """Return the half-open range of part `index` of `total` items in `parts`; larger parts come first."""
    share, rest = divmod(total, parts)
    start = index * share + min(index, rest)
    return start, start + share + (1 if index < rest else 0)


def shard_units(num_units: int, tp_size: int, tp_rank: int) -> tuple[UnitRange, ...]:
    """Return the units that a tensor-parallel rank holds of a global axis of `num_units`.

    Shards are balanced, larger ones first. With more ranks than units each rank holds one,
    ``tp_rank * num_units // tp_size``, so neighbours hold copies. Returns ``()`` for no units.
    """
    if num_units == 0:
        return ()
    if tp_size > num_units:
        unit = tp_rank * num_units // tp_size
        return (UnitRange(unit, unit + 1),)
    return (UnitRange(*balanced_share(num_units, tp_size, tp_rank)),)


def stage_layers(num_layers: int, pp_size: int, pp_rank: int) -> tuple[int, int]:
    """Return the half-open range of layers of a pipeline stage: even, the remainder to the first stages."""
    return balanced_share(num_layers, pp_size, pp_rank)
