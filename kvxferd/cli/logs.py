"""`kvxferd logs`: the last lines of the daemon's log, also where its standard error is gone."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from kvxferd.cli.options import with_control_client
from kvxferd.errors import Code, KvxferdError
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.output import printable

SHOWN = 100
FOLLOW_EVERY_S = 0.5
RETRY_S = 1.0  # after a daemon that went away


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
            page = _get_again(daemon, f"/v1/log?after={page['cursor']}")
            shown = page["lines"]
    except KeyboardInterrupt:
        return


def _get_again(daemon: ControlClient, path: str) -> Any:
    """Get; wait for a daemon that went away, because somebody who follows wants to see it come back."""
    is_lost = False
    while True:
        try:
            return daemon.get(path)
        except KvxferdError as error:
            if error.code is not Code.DAEMON_LOST:
                raise
            if not is_lost:
                click.echo(f"kvxferd: {error.message}; waiting for it", err=True)
            is_lost = True
            time.sleep(RETRY_S)
