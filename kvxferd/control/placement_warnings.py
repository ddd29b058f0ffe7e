"""Warnings about placements: ranks whose memory is read slowly or without proof, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvxferd.core.snapshot import EngineSnapshot, RankSnapshot
from kvxferd.telemetry.logs import SAME_NODE_TCP_WARNING


def placement_warnings(engines: Iterable[EngineSnapshot]) -> list[str]:
    """Return one sentence for each problem, however many ranks have it."""
    ranks = [(engine.engine_id, rank) for engine in engines for rank in engine.ranks]
    found: dict[str, list[str]] = {}
    for engine_id, rank in ranks:
        for problem in _problems(rank):
            found.setdefault(problem, []).append(f"{engine_id} {rank.rank}")
    return [f"{problem} ({_some(names)})" for problem, names in found.items()]


def _problems(rank: RankSnapshot) -> Iterator[str]:
    placement = rank.placement
    if placement is not None and placement.why:
        if placement.kind == "direct":
            yield (
                f"a rank's memory is not proved to be readable: {placement.why}; pulls of it may fail, and "
                "`kvxferd doctor` says more"
            )
        else:
            yield f"memory is reached the {placement.kind} way, not directly: {placement.why}"
    if any(lanes.slow for lanes in rank.lanes):
        yield SAME_NODE_TCP_WARNING


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
