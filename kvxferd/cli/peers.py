"""`kvxferd peers`: other nodes' daemons, and the engines known from them."""

from __future__ import annotations

import click
import msgspec

from kvxferd.cli.options import json_option, watchable, with_control_client
from kvxferd.records import PeerSnapshot
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.output import format_count, print_json, print_table


@click.command()
@json_option
@with_control_client
@watchable
def peers(daemon: ControlClient, as_json: bool) -> None:
    """Show other nodes' daemons."""
    reply = daemon.get("/v1/peers")
    if as_json:
        print_json(reply)
        return
    print_table(
        "Peers",
        ("endpoint", "state", "boot", "grants", "engines"),
        (
            (peer.endpoint, peer.state, peer.boot or "", peer.num_grants, _engines(peer))
            for peer in msgspec.convert(reply["peers"], list[PeerSnapshot])
        ),
    )


def _engines(peer: PeerSnapshot) -> str:
    return ", ".join(
        f"{e.engine_id}@{e.generation} ({format_count(e.num_ranks, 'rank')})" for e in peer.engines
    )
