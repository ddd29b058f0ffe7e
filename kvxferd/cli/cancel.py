"""`kvxferd cancel`: end a published transfer, or a running pull."""

from __future__ import annotations

import click

from kvxferd.cli.completion import complete_from, publishing_engine_ids, pull_numbers, transfer_ids
from kvxferd.cli.options import json_option, with_control_client
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.output import print_json


@click.command()
@click.argument("transfer", required=False, shell_complete=complete_from("/v1/transfers", transfer_ids))
@click.option(
    "--engine",
    metavar="ID",
    shell_complete=complete_from("/v1/transfers", publishing_engine_ids),
    help="Only this engine's transfer of that name.",
)
@click.option(
    "--pull",
    type=int,
    metavar="N",
    shell_complete=complete_from("/v1/transfers", pull_numbers),
    help="End this pull instead, by its number.",
)
@json_option
@with_control_client
def cancel(
    daemon: ControlClient, transfer: str | None, engine: str | None, pull: int | None, as_json: bool
) -> None:
    """Release the published TRANSFER, or end pull N; `kvxferd transfers` shows both.

    The pulls of a cancelled transfer fail, and its blocks are released to the engine. A cancelled
    pull ends as failed. Only root and the user that runs the daemon may do this.
    """
    if (transfer is None) == (pull is None):
        raise click.UsageError("give either a TRANSFER or --pull N")
    if pull is not None:
        reply = daemon.post("/v1/pulls/cancel", {"pull": pull})
        line = f"cancelled pull {pull}"
    else:
        named = {"transfer_id": transfer} | ({"engine_id": engine} if engine else {})
        reply = daemon.post("/v1/transfers/cancel", named)
        line = f"cancelled transfer {transfer} of {', '.join(reply['engines'])}"
    if as_json:
        print_json(reply)
    else:
        click.echo(line)
