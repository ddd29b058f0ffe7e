"""`kvxferd reload`: have the daemon read its configuration again."""

from __future__ import annotations

import click

from kvxferd.cli.options import json_option, with_control_client
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.output import format_count, print_json


@click.command("reload")
@json_option
@with_control_client
def reload(daemon: ControlClient, as_json: bool) -> None:
    """Have the daemon read its configuration again: allow-lists and the log level.

    SIGHUP does the same. Prints what changed, and what differs but needs a restart. An invalid file is
    refused, and nothing changes. Only root and the user that runs the daemon may do this.
    """
    reply = daemon.post("/v1/reload")
    if as_json:
        print_json(reply)
        return
    click.echo("changed: " + (", ".join(reply["changed"]) or "nothing"))
    if reply["ignored"]:
        click.echo("ignored until a restart: " + ", ".join(reply["ignored"]))
    for endpoint in reply["dropped_peers"]:
        click.echo(f"dropped peer {endpoint}")
    if (connections := reply.get("closed_connections", 0)) is None:
        click.echo("peers' connections to this node are closed as soon as a descriptor is free: see its log")
    elif connections:
        click.echo(f"peers' connections to this node closed: {connections} (admitted peers connect again)")
    if reply["closed_sessions"]:
        click.echo(
            f"closed {format_count(reply['closed_sessions'], 'session')} of users who are no longer allowed"
        )
