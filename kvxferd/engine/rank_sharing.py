"""A rank's memory, shared and registered with the first placement that works."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from kvxferd.client import Client, RankHandle, Region
from kvxferd.engine.placement_search import PlacementSearch
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.memory.device import ResidentMemory


class SharedRank(Protocol):
    """A rank's memory in one placement."""

    @property
    def regions(self) -> Sequence[Region]:
        """The layout's regions."""

    def close(self) -> None:
        """Close the file descriptors. The memory is unchanged, and so is a rank that is registered."""


Shared = TypeVar("Shared", bound=SharedRank)


class RankSharing(Generic[Shared]):
    """One rank's memory, from its allocations to its registration. Used by one thread, at engine start."""

    def __init__(
        self,
        share: Callable[[str], Shared],
        search: PlacementSearch | None,
        log: logging.Logger,
    ) -> None:
        """Share the memory. `share` takes the placement; without a `search` there is one alone, "".

        Raises KvxferdError where no placement's part can be done in this process.
        """
        self._share_as = share
        self._search = search
        self._log = log
        self.shared = self._share()

    def register(
        self, connect: Callable[[], Client], spec: EngineSpec, layout: RankLayout, deadline: float
    ) -> RankHandle:
        """Register the rank by `deadline` (monotonic seconds), over a connection of its own. Blocks.

        Where the daemon, or this environment, refuses the placement, the memory is shared with the next one
        and registered again. A daemon that is busy is asked again. Raises KvxferdError.
        """
        while True:
            try:
                rank = _register_with_retries(connect(), spec, layout, self.shared.regions, deadline)
            except KvxferdError as error:
                if self._search is None:
                    raise
                self._search.fail(error)
                self.shared.close()
                self.shared = self._share()
                continue
            if self._search is not None:
                self._log.info("%s", self._search.report())
            return rank

    def _share(self) -> Shared:
        while True:
            try:
                return self._share_as("" if self._search is None else self._search.current)
            except KvxferdError as error:
                if self._search is None:
                    raise
                self._search.fail(error)


def _register_with_retries(
    connection: Client, spec: EngineSpec, layout: RankLayout, regions: Sequence[Region], deadline: float
) -> RankHandle:
    while True:
        try:
            left = max(1.0, deadline - time.monotonic())
            return _register(connection, spec, layout, regions, left)
        except EngineError as error:
            if error.code is not Code.BUSY or time.monotonic() + error.retry_after_s > deadline:
                connection.close()
                raise
            time.sleep(error.retry_after_s or 0.1)  # engine start: nothing else waits for this thread
        except BaseException:
            connection.close()
            raise


def _register(
    connection: Client, spec: EngineSpec, layout: RankLayout, regions: Sequence[Region], timeout_s: float
) -> RankHandle:
    """Register a rank, and start its mover here if no other process can map the memory."""
    resident_memory = {r.region: r.memory for r in regions if isinstance(r.memory, ResidentMemory)}
    if not resident_memory:
        return connection.register(spec, layout, regions, timeout_s)
    from kvxferd import resident  # imports the transfer library: only where it is needed

    return resident.register(connection, spec, layout, resident_memory, timeout_s)
