"""`kvxferd doctor`, `ping` and `support-bundle`: what is wrong with a node, and on the way to another."""

from __future__ import annotations

import os
import platform
import re
import shlex
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from kvxferd.cli.options import config_option, json_option, socket_option
from kvxferd.config import Config, LoadedConfig, load_config, load_with_sources
from kvxferd.doctor.report import (
    CHECKS,
    PLACEMENTS,
    CheckContext,
    Finding,
    context_of,
    exit_status,
    print_findings,
    run_check,
    run_checks,
)
from kvxferd.errors import KvxferdError
from kvxferd.telemetry.units import format_size
from kvxferd.tooling.control_client import ControlClient, control_socket_path
from kvxferd.tooling.exit_codes import EXIT_FAILED, EXIT_NO_GPU, EXIT_OK
from kvxferd.tooling.output import print_json, print_line

if TYPE_CHECKING:
    from kvxferd.client import TransferRef

MAX_ROUND_TRIPS = 1000
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.1, 600.0
LOOKUP_TIMEOUT_S = 2.0  # of a name, by the local daemon


@click.command()
@json_option
@click.option("--gpu", is_flag=True, help="Also try every placement of GPU memory. Takes a minute.")
@click.option(
    "--check",
    "names",
    metavar="NAME",
    multiple=True,
    help=f"Run only this check; may be repeated. One of {', '.join(CHECKS)}.",
)
@click.option(
    "--serve",
    is_flag=True,
    help="Let other nodes measure the link to this one, until Ctrl-C, for half an hour at most.",
)
@click.option(
    "--link", "ref", metavar="REF", help="Measure a link instead: pull what --serve printed on another node."
)
@click.option("--driver", hidden=True, help="Another GPU driver, for tests without a GPU.")
@socket_option
@config_option("The daemon's configuration.")
@click.pass_context
def doctor(
    ctx: click.Context,
    as_json: bool,
    gpu: bool,
    names: tuple[str, ...],
    serve: bool,
    ref: str | None,
    driver: str | None,
    socket_path: str | None,
    config_path: Path | None,
) -> None:
    """Examine this node: what works, what does not and why, and how to fix it.

    Run it as the daemon's user, where the daemon runs (in its container). To measure the link between
    two nodes, run it with --serve on one of them, and on the other one what that prints. Exit status: 0
    if everything essential works; 1 if something essential does not, or with --gpu a placement does not;
    3 if with --gpu there is no GPU.
    """
    if (serve or ref is not None) and (gpu or names):
        raise click.UsageError(
            "--serve and --link are about the way to a daemon: leave out --gpu and --check"
        )
    if serve and (as_json or ref is not None):
        raise click.UsageError("--serve measures nothing here: leave out --json and --link")
    findings: list[Finding] = []
    node = context_of(config_path, socket_path, findings, driver)
    if serve:
        _serve(node)
        return
    if ref is not None:
        from kvxferd.client import TransferRef
        from kvxferd.doctor.link import check_link

        source = TransferRef.parse(ref)
        findings += run_check("link", lambda context: check_link(context, source), node)
    else:
        findings += run_checks(node, (*names, "gpus") if gpu and names else names)
    if gpu:
        # Imported where it is used: the other checks need no numpy.
        from kvxferd.doctor.gpu_placements import try_placements

        findings += run_check(PLACEMENTS, lambda context: try_placements(context, tuple(findings)), node)
    status = exit_status(findings, gpu)
    if as_json:
        print_json({"findings": msgspec.to_builtins(findings), "status": status})
    else:
        print_findings(findings, "This node" if ref is None else "The link")
        if status == EXIT_NO_GPU:
            print_line("Placements of GPU memory: not tried, there is no GPU that can be used here.")
    ctx.exit(status)


def _serve(node: CheckContext) -> None:
    from kvxferd.doctor.link import serve_link
    from kvxferd.tooling.interrupts import interrupted_once

    def print_command(ref: TransferRef) -> None:
        click.echo("kvxferd: serving until Ctrl-C; run this on another node:", err=True)
        click.echo(shlex.join(["kvxferd", "doctor", "--link", ref.to_json()]))

    with interrupted_once(), suppress(KeyboardInterrupt):
        serve_link(node, print_command)
    click.echo("kvxferd: no longer serving; the engine is gone", err=True)


@click.command()
@click.argument("peer")
@json_option
@click.option(
    "--count", type=click.IntRange(1, MAX_ROUND_TRIPS), default=3, show_default=True, help="Round trips."
)
@click.option(
    "--timeout", "timeout_s", metavar="SECONDS", type=click.FloatRange(MIN_TIMEOUT_S, MAX_TIMEOUT_S),
    default=5.0, show_default=True, help="How long each step may take.",
)  # fmt: skip
@socket_option
@config_option("The configuration of this node's daemon, which names its key and its allow-lists.")
@click.pass_context
def ping(
    ctx: click.Context,
    peer: str,
    as_json: bool,
    count: int,
    timeout_s: float,
    socket_path: str | None,
    config_path: Path | None,
) -> None:
    """Reach another node's daemon, and print what is wrong if that fails.

    PEER is its endpoint, tcp://HOST:PORT#KEY; of a peer that this node's daemon knows, HOST:PORT or the id
    of an engine will do. It connects by itself, with this node's key: run it as root or as the daemon's
    user, where the daemon runs. Exit status: 0 if it answers; 1 if not, with the outcome in brackets.
    """
    # Imported here: no other verb needs libzmq.
    from kvxferd.doctor.ping import Outcome, find_endpoint, print_ping, read_identity
    from kvxferd.doctor.ping import ping as ping_peer

    if not timeout_s >= MIN_TIMEOUT_S:  # not a number, which no range excludes
        raise click.BadParameter("give a number of seconds", param_hint="--timeout")
    config = load_config(config_path, os.environ, {})
    endpoint = find_endpoint(peer, ControlClient(socket_path or config.control.socket, LOOKUP_TIMEOUT_S))
    allowlist, key = read_identity(config.peer)
    result = ping_peer(endpoint, allowlist, key, count=count, timeout_s=timeout_s)
    status = EXIT_OK if result.outcome is Outcome.OK else EXIT_FAILED
    if as_json:
        print_json(msgspec.to_builtins(result) | {"status": status})
    else:
        print_ping(result)
    ctx.exit(status)


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
    from kvxferd.doctor.support_bundle import collect, write

    loaded: LoadedConfig | None = None
    problem = ""
    try:
        loaded = load_with_sources(config_path, os.environ, {})
    except KvxferdError as error:
        problem = error.message
    config = loaded.config if loaded else Config()
    socket = control_socket_path(socket_path or config.control.socket)
    host = re.sub(r"[^A-Za-z0-9.-]", "-", platform.node())[:64] or "node"
    path = output or Path(f"kvxferd-{host}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.tar.gz")
    parts = collect(loaded, config_path, problem, socket, with_doctor)
    write(parts, path)
    if as_json:
        print_json({"file": str(path), **parts.manifest()})
        return
    print_line(f"{path}: {len(parts.texts)} files, {format_size(path.stat().st_size)}")
    for name, why in parts.missing.items():
        print_line(f"missing: {name}: {why}")
