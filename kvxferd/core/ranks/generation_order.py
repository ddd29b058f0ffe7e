"""The order in which an engine's generations started.

A rank connects again after a restart of the daemon, and a generation that has been replaced is still running
then for a moment. By the order of arrival alone it would replace the one that replaced it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvxferd.ids import EngineId, EngineKey, Generation

# 4 MB of the longest names. An entry that is pushed out costs that engine the order of its generations alone.
MAX_ENGINES, MAX_GENERATIONS = 1024, 8


class GenerationOrder:
    """The latest generations of each engine, in the order in which this daemon or an earlier one met them."""

    def __init__(self) -> None:
        self._met: OrderedDict[EngineId, list[Generation]] = OrderedDict()

    def add(self, key: EngineKey) -> None:
        """Add a generation as the newest, if it is new."""
        met = self._met.setdefault(key.engine_id, [])
        self._met.move_to_end(key.engine_id)
        if key.generation not in met:
            met.append(key.generation)
            del met[:-MAX_GENERATIONS]
        if len(self._met) > MAX_ENGINES:
            self._met.popitem(last=False)

    def sort(self, keys: Iterable[EngineKey]) -> list[EngineKey]:
        """Return generations of one engine, the oldest first; unknown ones stay before known ones."""

        def position(key: EngineKey) -> int:
            met = self._met.get(key.engine_id, [])
            return met.index(key.generation) if key.generation in met else -1

        return sorted(keys, key=position)
