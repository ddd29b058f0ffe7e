"""`kvxferd top`: what the node does now, and what is wrong with it, as the status page shows it."""

from __future__ import annotations

import sys

import click

from kvxferd.cli.options import MAX_INTERVAL_S, MIN_INTERVAL_S, json_option, with_control_client
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.output import print_json


@click.command()
@click.option("--once", is_flag=True, help="Print it once. The default where standard output is no terminal.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(MIN_INTERVAL_S, MAX_INTERVAL_S),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Renew it every so many seconds, until Ctrl-C.",
)
@json_option
@with_control_client
def top(daemon: ControlClient, as_json: bool, once: bool, interval_s: float) -> None:
    """Show traffic, failures and their reasons, pairs of engines, peers and slow pulls of this node.

    It is what the status page shows, from the same samples: one in ten seconds for 15 minutes. With --json:
    the replies of /v1/status and /v1/samples.
    """
    # Imported here: a completion needs no tables.
    from kvxferd.cli.top_report import print_report
    from kvxferd.tooling.watch import watch

    if not interval_s >= MIN_INTERVAL_S:  # not a number, which no range excludes
        raise click.BadParameter("give a number of seconds", param_hint="--interval")

    def show() -> None:
        status, samples = daemon.get("/v1/status"), daemon.get("/v1/samples")
        if as_json:
            print_json({"status": status, "samples": samples})
        else:
            print_report(status, samples)

    if once or as_json or not sys.stdout.isatty():
        show()
    else:
        watch("kvxferd top", show, interval_s, as_json)
