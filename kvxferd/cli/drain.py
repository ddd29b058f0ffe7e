"""`kvxferd drain`: stop the daemon after its running transfers have ended."""

from __future__ import annotations

from typing import Any

import click

from kvxferd.cli.options import json_option, with_control_client
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.exit_codes import EXIT_WORK_LEFT
from kvxferd.tooling.output import format_count, print_json


@click.command()
@click.option("--wait", is_flag=True, help="Return when the drain is over, and print what it left.")
@json_option
@with_control_client
def drain(daemon: ControlClient, wait: bool, as_json: bool) -> None:
    """Stop the daemon once its transfers have ended, at the latest after drain.limit_s.

    Returns at once, or with --wait when it is over: exit code 0 if nothing was left, 1 if something
    was. Only root and the user that runs the daemon may do this.
    """
    reply = daemon.post("/v1/drain", {"wait": wait}, wait_forever=wait)
    if as_json:
        print_json(reply)
    elif not wait:
        click.echo("draining: the daemon takes nothing new, and ends when what runs has ended")
    elif reply["drained"]:
        click.echo("drained: nothing was left")
    else:
        _print_unfinished(reply)
    if wait and not reply["drained"]:
        click.get_current_context().exit(EXIT_WORK_LEFT)


def _print_unfinished(reply: dict[str, Any]) -> None:
    transfers, pulls = reply["transfers"], reply["pulls"]
    left = f"{format_count(len(transfers), 'transfer')} and {format_count(len(pulls), 'pull')} left"
    click.echo(f"ended with {left}, at the limit or by a second signal:")
    for transfer in transfers:
        click.echo(f"  transfer {transfer['transfer_id']} of {transfer['engine_id']}, {transfer['state']}")
    for pull in pulls:
        click.echo(f"  pull {pull['pull']} of {pull['transfer_id']}, {pull['phase']}")
