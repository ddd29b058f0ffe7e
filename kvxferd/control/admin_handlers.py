"""Handlers of the routes that change state. Each takes its arguments from the query."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from aiohttp import web

from kvxferd.control.response_cache import NODE_ADMIN
from kvxferd.control.responses import error_response, json_response
from kvxferd.errors import Code, EngineError
from kvxferd.ids import EngineId, PullId, TransferId

Arguments = TypeVar("Arguments", bound=msgspec.Struct)


class ReloadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No arguments."""


class DrainRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`wait`: reply when the drain is over, not at once."""

    wait: bool = False


class DropPeerRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A peer's endpoint as `kvxferd peers` shows it; its key may be left out."""

    endpoint: str


class DisownRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine id without a rank registered here."""

    engine_id: EngineId


class CancelTransferRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A transfer published here. Without `engine_id`, that transfer of every engine."""

    transfer_id: TransferId
    engine_id: EngineId | None = None


class CancelPullRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pull of a local rank, by the number that `kvxferd transfers` shows."""

    pull: PullId


async def reload(request: web.Request) -> web.StreamResponse:
    """Read the configuration again: allow-lists and the log's level."""
    _arguments(request, ReloadRequest)
    return json_response(request.app[NODE_ADMIN].reload())


async def drain(request: web.Request) -> web.StreamResponse:
    """Start to drain. The daemon exits once drained; with `wait` the reply first reports what was left."""
    given = _arguments(request, DrainRequest)
    view = request.app[NODE_ADMIN]
    view.drain()
    if not given.wait:
        return json_response({"draining": True}, 202)
    left = await view.wait_drained()
    drained = not left.transfers and not left.pulls
    return json_response({"drained": drained, "transfers": left.transfers, "pulls": left.pulls})


async def drop_peer(request: web.Request) -> web.StreamResponse:
    """Forget a peer, the engines learnt from it, and the requests to it."""
    given = _arguments(request, DropPeerRequest)
    if dropped := request.app[NODE_ADMIN].drop_peer(given.endpoint):
        return json_response({"dropped": dropped})
    text = f"cannot drop peer {given.endpoint}: no such peer is known; `kvxferd peers` lists them"
    return error_response(404, Code.NOT_FOUND, text)


async def disown(request: web.Request) -> web.StreamResponse:
    """Forget the owner of an engine id and of its absent ranks: the next to register owns them."""
    given = _arguments(request, DisownRequest)
    if found := request.app[NODE_ADMIN].disown(given.engine_id):
        return json_response({"disowned": given.engine_id, "uid": found.uid, "ranks": found.num_ranks})
    text = (
        f"cannot disown engine {given.engine_id}: no user is recorded for that id, who registers it next has "
        "it, and no rank of it is kept; `kvxferd engines` lists the ids that are recorded"
    )
    return error_response(404, Code.NOT_FOUND, text)


async def cancel_transfer(request: web.Request) -> web.StreamResponse:
    """Release a published transfer: its readers fail, and the engine may reuse its blocks."""
    given = _arguments(request, CancelTransferRequest)
    engines = request.app[NODE_ADMIN].cancel_transfer(given.transfer_id, given.engine_id)
    if engines:
        return json_response({"cancelled": given.transfer_id, "engines": [str(key) for key in engines]})
    text = (
        f"cannot cancel transfer {given.transfer_id}: no live transfer of that name was published here; "
        "`kvxferd transfers` lists them"
    )
    return error_response(404, Code.TRANSFER_UNKNOWN, text)


async def cancel_pull(request: web.Request) -> web.StreamResponse:
    """End a running pull: its engine gets one terminal event."""
    given = _arguments(request, CancelPullRequest)
    if request.app[NODE_ADMIN].cancel_pull(given.pull):
        return json_response({"cancelled": given.pull})
    text = (
        f"cannot cancel pull {given.pull}: no pull of that number runs here; `kvxferd transfers` lists them"
    )
    return error_response(404, Code.NOT_FOUND, text)


def _arguments(request: web.Request, kind: type[Arguments]) -> Arguments:
    """Return the query's arguments. Raises EngineError(bad-request), which names the field."""
    try:
        return msgspec.convert(dict(request.query), kind, strict=False)
    except msgspec.ValidationError as error:
        raise EngineError(f"cannot {request.method} {request.path}: {error}", Code.BAD_REQUEST) from error
