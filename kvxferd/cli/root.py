"""The group that holds the verbs, and what every verb does with an error."""

from __future__ import annotations

from typing import Any

import click

import kvxferd
from kvxferd.cli.bench.verb import bench
from kvxferd.cli.cancel import cancel
from kvxferd.cli.demo.verb import demo
from kvxferd.cli.doctor.verb import doctor
from kvxferd.cli.drain import drain
from kvxferd.cli.drop_peer import drop_peer
from kvxferd.cli.engines import engines
from kvxferd.cli.explain.verb import explain
from kvxferd.cli.keygen import keygen
from kvxferd.cli.peers import peers
from kvxferd.cli.serve import serve
from kvxferd.cli.status import status
from kvxferd.cli.transfers import transfers
from kvxferd.errors import KvxferdError

REFUSED = 2  # as click's own usage errors


class Verbs(click.Group):
    """A group whose verbs may raise KvxferdError: one line, no traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb."""
        try:
            return super().invoke(ctx)
        except KvxferdError as error:
            click.echo(f"kvxferd: {error.message} [{error.code.value}]", err=True)
            ctx.exit(REFUSED)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(kvxferd.__version__, prog_name="kvxferd")
def root() -> None:
    """Move KV cache between prefill and decode engines: one daemon per node."""


for verb in (
    serve,
    demo,
    bench,
    doctor,
    status,
    engines,
    peers,
    transfers,
    explain,
    drain,
    drop_peer,
    cancel,
    keygen,
):
    root.add_command(verb)
