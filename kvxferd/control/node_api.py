"""What HTTP knows of the node that it serves, and the form of its answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec
from aiohttp import web

from kvxferd.core.ownerships import Disownable
from kvxferd.core.snapshot import NodeSnapshot, Record
from kvxferd.ids import Endpoint, EngineId, EngineKey, PullId, TransferId
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.telemetry.metrics import Metrics


class ReloadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What reading the configuration again has changed."""

    changed: list[str]  # settings
    ignored: list[str]  # settings that differ too, and need a restart
    dropped_peers: list[Endpoint]  # that this node asked
    closed_sessions: int
    closed_connections: int | None = 0  # of peers to this node; None: to be closed, no descriptor was left


class NodeApi(Protocol):
    """What HTTP knows of the node it serves."""

    def snapshot_steps(self) -> Iterator[NodeSnapshot | None]:
        """Yield everything; before it None, where the loop may turn."""
        ...

    def readiness(self) -> list[str]:
        """Return why the node is not ready to take registrations and pulls; empty when it is."""
        ...

    def warnings(self) -> list[str]:
        """Return what an operator should mend although the node works."""
        ...

    def history(self) -> list[Record]:
        """Return what ended last, oldest first."""
        ...

    def layouts(self, engine_id: EngineId) -> list[tuple[EngineSpec, RankLayout]]:
        """Return the ranks known of an engine, registered here or learnt from a peer; none of a stranger."""
        ...

    def drop_peer(self, endpoint: str) -> list[Endpoint]:
        """Forget the daemon of that endpoint, with or without its key. Return who was forgotten."""
        ...

    def disown(self, engine_id: EngineId) -> Disownable:
        """Forget whose an engine id and its absent ranks were. Return what that was; false where nothing.

        Raises EngineError(rank-taken) while all that is recorded is registered here.
        """
        ...

    def cancel_transfer(self, transfer_id: TransferId, engine_id: EngineId | None) -> list[EngineKey]:
        """Release a transfer published here. Return the engines whose it was; None: of any engine."""
        ...

    def cancel_pull(self, number: PullId) -> bool:
        """End a pull of a local rank. False: there is none of that number that could be ended."""
        ...

    async def wait_drained(self) -> NodeSnapshot:
        """Return, once a drain is over, what it left behind."""
        ...

    def reload(self) -> ReloadResult:
        """Read the configuration again. Raises ConfigError where it is wrong; then nothing changes."""
        ...

    def drain(self) -> None:
        """Start to drain: take nothing new, end when what runs has ended. Doing it again does nothing."""
        ...


NODE_API: web.AppKey[NodeApi] = web.AppKey("view")
METRICS: web.AppKey[Metrics] = web.AppKey("metrics", Metrics)


def json_response(value: Any, status: int = 200) -> web.Response:
    """Return the value, structs included, as a JSON answer."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", status=status)


def error_response(status: int, code: str, message: str) -> web.Response:
    """Return a refusal: a code for machines, a sentence for people."""
    return json_response({"error": {"code": code, "message": message}}, status)
