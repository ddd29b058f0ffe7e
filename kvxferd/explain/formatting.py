"""Ranks, layers and units as text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from kvxferd.ids import Rank
from kvxferd.layout import UnitRange


def merged_ranges(ranges: Iterable[UnitRange]) -> tuple[UnitRange, ...]:
    """Return the union of some ranges as the fewest ranges, ascending; empty ones are left out."""
    joined: list[UnitRange] = []
    for start, stop in sorted((held.start, held.stop) for held in ranges if held.start < held.stop):
        if joined and start <= joined[-1].stop:
            joined[-1] = UnitRange(joined[-1].start, max(stop, joined[-1].stop))
        else:
            joined.append(UnitRange(start, stop))
    return tuple(joined)


def format_numbers(numbers: Iterable[int]) -> str:
    """Return whole numbers as ranges, both ends included: ``0-3, 7``; many ranges end in their count."""
    return format_unit_ranges(UnitRange(number, number + 1) for number in numbers)


def format_unit_ranges(ranges: Iterable[UnitRange]) -> str:
    """Return units as `format_numbers` does. A hostile rank may hold a billion: they are not counted out."""
    joined = merged_ranges(ranges)
    texts = [str(a.start) if a.start + 1 == a.stop else f"{a.start}-{a.stop - 1}" for a in joined]
    if len(texts) <= 4:
        return ", ".join(texts)
    steps = {after.start - before.start for before, after in itertools.pairwise(joined)}
    if len(steps) == 1 and all(one.start + 1 == one.stop for one in joined):
        return f"{texts[0]}, {texts[1]}, ..., {texts[-1]}"
    return f"{sum(one.stop - one.start for one in joined)} of {joined[0].start}-{joined[-1].stop - 1}"


def format_ranks(ranks: Sequence[Rank]) -> str:
    """Return ranks stage by stage: ``pp0.tp0-3, pp1.tp0-3``, ``7 of pp0.tp0-14``."""
    stages: dict[int, list[int]] = {}
    for rank in ranks:
        stages.setdefault(rank.pp_rank, []).append(rank.tp_rank)
    texts = {pp: format_numbers(tps).replace(", ..., ", "..") for pp, tps in stages.items()}
    return ", ".join(_stage_ranks(pp, text) for pp, text in texts.items()) or "-"


def _stage_ranks(pp_rank: int, text: str) -> str:
    count, of, rest = text.partition(" of ")
    return f"{count} of pp{pp_rank}.tp{rest}" if of else f"pp{pp_rank}.tp{text.replace(', ', '+')}"


def format_units(units: Mapping[str, tuple[UnitRange, ...]]) -> str:
    """Return units, with components of equal units together: ``k v heads 0-3``."""
    together: dict[str, list[str]] = {}
    for name, held in units.items():
        together.setdefault(format_unit_ranges(held), []).append(name)
    return "; ".join(f"{_component_label(names)} {held}".strip() for held, names in together.items())


def _component_label(names: list[str]) -> str:
    return " ".join(names) + (" heads" if set(names) <= {"k", "v", "kv"} else "")
