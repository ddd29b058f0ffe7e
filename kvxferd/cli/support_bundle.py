"""`kvxferd support-bundle`: one file for whoever looks into a failure."""

from __future__ import annotations

import os
import platform
import re
import time
from pathlib import Path

import click

from kvxferd.cli.options import config_option, json_option, socket_option
from kvxferd.errors import KvxferdError


@click.command("support-bundle")
@json_option
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The file to write. Default: kvxferd-HOST-TIME.tar.gz in the current directory.",
)
@click.option("--doctor/--no-doctor", "with_doctor", default=True, help="Run `kvxferd doctor` for it.")
@socket_option
@config_option("The daemon's configuration file.")
def support_bundle(
    output: Path | None,
    as_json: bool,
    with_doctor: bool,
    socket_path: str | None,
    config_path: Path | None,
) -> None:
    """Write state, history, log, versions, doctor's report and configuration to one tar.gz.

    Run it as root or as the daemon's user, where the daemon runs. It works while the daemon is dead or
    hangs, and prints what is missing. Secrets are left out: secret keys, texts of settings and variables
    with a secret's name, and whatever looks like a key. Engines' and hosts' names and addresses are in it.
    """
    import msgspec

    from kvxferd.config import Config, load_config
    from kvxferd.doctor.support_bundle import collect, write
    from kvxferd.tooling.control_client import control_socket_path
    from kvxferd.tooling.output import format_bytes, plain_text, print_json

    config: Config | None = None
    problem = ""
    try:
        config = load_config(config_path, os.environ, {})
    except KvxferdError as error:
        problem = error.message
    socket = control_socket_path(socket_path or (config or Config()).control.socket)
    host = re.sub(r"[^A-Za-z0-9.-]", "-", platform.node())[:64] or "node"
    path = output or Path(f"kvxferd-{host}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.tar.gz")
    manifest = write(collect(config, config_path, problem, socket, with_doctor), path)
    if as_json:
        print_json({"file": str(path), **msgspec.to_builtins(manifest)})
        return
    size = format_bytes(path.stat().st_size)
    click.echo(plain_text(f"{path}: {len(manifest.files)} files, {size}").plain)
    for missing in manifest.missing:
        click.echo(plain_text(f"missing: {missing.name}: {missing.why}").plain)
