"""The interface of the node that HTTP serves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec
from aiohttp import web

from kvxferd.core.ownerships import Disownable
from kvxferd.core.snapshot import NodeSnapshot, Record
from kvxferd.ids import Endpoint, EngineId, EngineKey, PullId, TransferId
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.telemetry.history import HistoryPage, HistoryQuery
from kvxferd.telemetry.metrics import Metrics
from kvxferd.telemetry.notable_records import NotableRecords
from kvxferd.telemetry.samples import Samples
from kvxferd.telemetry.warnings.warning_list import NodeWarning


class ReloadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a reload of the configuration has changed."""

    changed: list[str]  # settings
    ignored: list[str]  # settings that differ too, but need a restart
    dropped_peers: list[Endpoint]  # peers that this node was connected to
    closed_sessions: int
    closed_connections: int | None = 0  # from peers; None: closed later, as no descriptor was free


class NodeApi(Protocol):
    """The node as HTTP uses it."""

    config_path: str  # of the file with the daemon's settings; "": there is none

    def snapshot_steps(self) -> Iterator[NodeSnapshot | None]:
        """Yield None where the loop may run other work, and at last the node's state."""
        ...

    def readiness(self) -> list[str]:
        """Return why the node cannot take registrations and pulls; empty if it can."""
        ...

    def warnings(self) -> list[NodeWarning]:
        """Return what an operator should fix although the node works, oldest first."""
        ...

    def history(self) -> list[Record]:
        """Return the last records, oldest first."""
        ...

    def search_history(self, query: HistoryQuery) -> HistoryPage:
        """Return the records that the query finds. Raises KvxferdError(bad-request)."""
        ...

    def notable_records(self) -> NotableRecords:
        """Return failed and slow pulls and expired leases, of longer than the history."""
        ...

    def samples(self) -> Samples:
        """Return what the node did in each of the last seconds."""
        ...

    def layouts(self, engine_id: EngineId) -> list[tuple[EngineSpec, RankLayout]]:
        """Return an engine's ranks, registered here or learnt from a peer; none for an unknown engine."""
        ...

    def topologies(self) -> list[dict[str, Any]]:
        """Return the terms of each stage of the remote engines that local ranks know, the last used first."""
        ...

    def drop_peer(self, endpoint: str) -> list[Endpoint]:
        """Forget the daemon of that endpoint, with or without its key. Return the forgotten endpoints."""
        ...

    def disown(self, engine_id: EngineId) -> Disownable:
        """Forget the owner of an engine id and its absent ranks. Return what was forgotten; falsy if nothing.

        Raises EngineError(rank-taken) while every recorded rank is registered here.
        """
        ...

    def cancel_transfer(self, transfer_id: TransferId, engine_id: EngineId | None) -> list[EngineKey]:
        """Release a transfer published here, of that engine or (None) of every one. Return those engines."""
        ...

    def cancel_pull(self, number: PullId) -> bool:
        """End a pull of a local rank. False: no pull of that number can be ended."""
        ...

    async def wait_drained(self) -> NodeSnapshot:
        """Return the node's state at the end of the drain."""
        ...

    def reload(self) -> ReloadResult:
        """Read the configuration again. Raises ConfigError if it is invalid; then nothing changes."""
        ...

    def drain(self) -> None:
        """Start to drain: refuse new work, and stop once running work has ended. Idempotent."""
        ...


NODE_API: web.AppKey[NodeApi] = web.AppKey("node api")
METRICS: web.AppKey[Metrics] = web.AppKey("metrics", Metrics)
