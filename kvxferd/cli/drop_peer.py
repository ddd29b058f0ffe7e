"""`kvxferd drop-peer`: forget another node's daemon."""

from __future__ import annotations

import click

from kvxferd.cli.completion import complete_from, endpoints
from kvxferd.cli.options import json_option, with_control_client
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.output import print_json


@click.command("drop-peer")
@click.argument("endpoint", shell_complete=complete_from("/v1/peers", endpoints))
@json_option
@with_control_client
def drop_peer(daemon: ControlClient, endpoint: str, as_json: bool) -> None:
    """Forget the daemon at ENDPOINT, as `kvxferd peers` shows it; its #KEY may be omitted.

    Requests that wait for its reply fail and the connection is closed; the next request to it connects
    again. A pull that is being read goes on. Only root and the user that runs the daemon may do this.
    """
    reply = daemon.post("/v1/peers/drop", {"endpoint": endpoint})
    if as_json:
        print_json(reply)
        return
    for dropped in reply["dropped"]:
        click.echo(f"dropped {dropped}")
