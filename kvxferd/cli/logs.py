"""`kvxferd logs`: the last lines of the daemon's log, also where its standard error is gone."""

from __future__ import annotations

import sys
import time

import click

from kvxferd.cli.history import FOLLOW_EVERY_S, get_again
from kvxferd.cli.options import with_control_client
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.output import printable

SHOWN = 100


@click.command()
@click.option("-n", "--lines", "num_lines", type=click.IntRange(0), default=SHOWN, show_default=True)
@click.option("-f", "--follow", is_flag=True, help="Go on: print each line as it comes, until interrupted.")
@with_control_client
def logs(daemon: ControlClient, num_lines: int, follow: bool) -> None:
    """Print the last lines of the daemon's log, with the errors among them. Times are UTC."""
    page = daemon.get("/v1/log")
    shown = page["lines"][-num_lines:] if num_lines else []
    try:
        while True:
            sys.stdout.writelines(printable(line, keep="\t") + "\n" for line in shown)
            sys.stdout.flush()
            if not follow:
                return
            time.sleep(FOLLOW_EVERY_S)
            page = get_again(daemon, f"/v1/log?after={page['cursor']}")
            shown = page["lines"]
    except KeyboardInterrupt:
        return
