"""`kvxferd inspect`: all that a node knows of one thing, as JSON."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import click

from kvxferd.cli.options import with_control_client
from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import Endpoint
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.output import print_json
from kvxferd.wire.endpoint import address_of


@click.command()
@click.argument("name")
@with_control_client
def inspect(daemon: ControlClient, name: str) -> None:
    """Print all that this node knows of NAME as JSON: an engine, a peer, a transfer, or a pull's number.

    Also what ended: the last records of that engine or transfer.
    """
    engines, peers, transfers = (daemon.get(f"/v1/{path}") for path in ("engines", "peers", "transfers"))
    found = {
        "engines": _named(engines["engines"], name, "engine_id"),
        "ownerships": _named(engines["ownerships"], name, "engine_id"),
        "peers": [peer for peer in peers["peers"] if _is_peer(peer, name)],
        "transfers": _named(transfers["transfers"], name, "transfer_id", "engine_id"),
        "pulls": _named(transfers["pulls"], name, "pull", "transfer_id", "source", "sink"),
        "history": [
            record
            for searched in ("transfer", "engine")
            for record in daemon.get(f"/v1/history?{urlencode({searched: name})}")["records"]
        ],
    }
    if not any(found.values()):
        verbs = "'kvxferd engines', 'peers', 'transfers' and 'history'"
        raise KvxferdError(f"cannot find {name!r}: {verbs} have the names", Code.BAD_REQUEST)
    print_json({kind: things for kind, things in found.items() if things})


def _named(things: list[dict[str, Any]], name: str, *fields: str) -> list[dict[str, Any]]:
    return [thing for thing in things if name in (str(thing[field]) for field in fields)]


def _is_peer(peer: dict[str, Any], name: str) -> bool:
    """Whether that is the peer's endpoint, or its address, or an engine there."""
    endpoint = Endpoint(peer["endpoint"])
    names = {endpoint, address_of(endpoint), address_of(endpoint).removeprefix("tcp://")}
    return name in names | {engine["engine_id"] for engine in peer["engines"]}
