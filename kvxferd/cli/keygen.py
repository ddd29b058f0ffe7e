"""`kvxferd keygen`: a key by which other daemons authenticate this one."""

from __future__ import annotations

from pathlib import Path

import click

DEFAULT_KEY_FILE = "kvxferd.key"


@click.command()
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    default=DEFAULT_KEY_FILE,
    help=f"Where to write the secret key, mode 0600. Default: {DEFAULT_KEY_FILE}.",
)
@click.option(
    "--public", "known", metavar="FILE", type=click.Path(path_type=Path),
    help="Make no key; print the public key of this file.",
)  # fmt: skip
def keygen(output: Path, known: Path | None) -> None:
    """Make a CURVE key: write the secret half to a file and print the public half.

    The file is for this daemon's peer.curve_secret_key_file; the public key is for every other
    daemon's peer.curve_allowed_keys, or its peer.curve_allowed_keys_file. An existing file is never
    overwritten.
    """
    # Imported here: no other verb needs libzmq.
    from kvxferd.control.curve_keys import make_key, read_key

    if known is not None:
        click.echo(read_key(known).public)
        return
    key = make_key(output)
    click.echo(f"the secret key is in {output}; the public key:", err=True)
    click.echo(key.public)
