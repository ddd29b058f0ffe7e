"""`kvxferd drop-peer`: forget another node's daemon."""

from __future__ import annotations

import click

from kvxferd.tooling.control_client import ControlClient, with_control_client
from kvxferd.tooling.output import json_option, print_json


@click.command("drop-peer")
@click.argument("endpoint")
@json_option
@with_control_client
def drop_peer(daemon: ControlClient, endpoint: str, as_json: bool) -> None:
    """Forget the daemon at ENDPOINT, as `kvxferd peers` shows it; its #KEY may be left out.

    What waits for its answer fails, the connection is closed, and whoever needs it next greets it
    anew. A pull that is being read goes on. Only root and the user that runs the daemon may.
    """
    answer = daemon.post("/v1/peers/drop", {"endpoint": endpoint})
    if as_json:
        print_json(answer)
        return
    for dropped in answer["dropped"]:
        click.echo(f"dropped {dropped}")
