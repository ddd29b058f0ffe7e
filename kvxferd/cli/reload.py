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
    answer = daemon.post("/v1/reload")
    if as_json:
        print_json(answer)
        return
    click.echo("changed: " + (", ".join(answer["changed"]) or "nothing"))
    if answer["ignored"]:
        click.echo("ignored until a restart: " + ", ".join(answer["ignored"]))
    for endpoint in answer["dropped_peers"]:
        click.echo(f"dropped peer {endpoint}")
    if (connections := answer.get("closed_connections", 0)) is None:
        click.echo("peers' connections to this node are closed as soon as a descriptor is free: see its log")
    elif connections:
        click.echo(f"peers' connections to this node closed: {connections} (admitted peers connect again)")
    if answer["closed_sessions"]:
        click.echo(
            f"closed {format_count(answer['closed_sessions'], 'session')} of users who are no longer allowed"
        )
