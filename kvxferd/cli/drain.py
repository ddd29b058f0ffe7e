"""`kvxferd drain`: stop the daemon, letting what runs come to its end."""

from __future__ import annotations

import click

from kvxferd.cli.asking import Daemon, asks_daemon


@click.command()
@asks_daemon
def drain(daemon: Daemon) -> None:
    """Stop the daemon once its transfers have ended, at the latest after drain.limit_s.

    Returns at once. Only root and the user that runs the daemon may.
    """
    daemon.post("/v1/drain")
    click.echo("draining: the daemon takes nothing new, and ends when what runs has ended")
