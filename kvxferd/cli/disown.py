"""`kvxferd disown`: let another user register an engine id."""

from __future__ import annotations

import click

from kvxferd.cli.completion import complete_from, recorded_engine_ids
from kvxferd.cli.options import json_option, with_control_client
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.output import print_json


@click.command("disown")
@click.argument("engine_id", shell_complete=complete_from("/v1/engines", recorded_engine_ids))
@json_option
@with_control_client
def disown(daemon: ControlClient, engine_id: str, as_json: bool) -> None:
    """Remove the owner of ENGINE_ID: the next user to register it owns it.

    An engine id belongs to a user while ranks of it are registered, and for worker.ownership_s after the
    last has left. So long a rank is kept for the daemon or the user that it was of before this daemon's
    restart; that ends too, as do ranks of nodes that are silent. Only root and the user that runs the
    daemon may.
    """
    reply = daemon.post("/v1/engines/disown", {"engine_id": engine_id})
    if as_json:
        print_json(reply)
        return
    whose = f", which was uid {reply['uid']}'s" if reply["uid"] is not None else ""
    num_ranks = reply["ranks"]
    ranks = f"; {num_ranks} {'rank is' if num_ranks == 1 else 'ranks are'} free" if num_ranks else ""
    click.echo(f"disowned {reply['disowned']}{whose}{ranks}")
