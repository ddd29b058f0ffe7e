"""`kvxferd doctor`: its options and its exit code."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvxferd.cli.options import config_option, json_option, socket_option
from kvxferd.doctor.finding import CheckContext, Finding
from kvxferd.doctor.runner import CHECKS, load_config_or_finding, run_check, select_checks
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.output import print_json

if TYPE_CHECKING:
    from kvxferd.client import TransferRef

RESPONSE_TIMEOUT_S = 5.0


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
    "--peer",
    "peer",
    metavar="ENDPOINT",
    help="Examine the way to this daemon instead, tcp://HOST:PORT#KEY: from here, and through the daemon.",
)
@click.option(
    "--ref", metavar="REF", help="With --peer: pull this a few times, and measure; --serve prints it there."
)
@click.option(
    "--serve",
    is_flag=True,
    help="Let other nodes measure the link to this one, until Ctrl-C, for half an hour at most.",
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
    peer: str | None,
    ref: str | None,
    serve: bool,
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
    # Imported here, so that a completion does not load numpy and rich.
    from kvxferd.doctor import gpus, report
    from kvxferd.doctor.placements import try_placements
    from kvxferd.memory.driver import DRIVER_VARIABLE

    findings: list[Finding] = []
    config = load_config_or_finding(config_path, findings)
    node = CheckContext(
        config,
        ControlClient(socket_path or config.control.socket, RESPONSE_TIMEOUT_S),
        {
            **os.environ,
            **config.mover.environment,
            **({DRIVER_VARIABLE: driver} if driver else {}),
        },
        "" if config_path is None else str(config_path),
    )
    if (serve or peer is not None) and (gpu or names):
        raise click.UsageError(
            "--peer and --serve are about the way to a daemon: leave out --gpu and --check"
        )
    if serve:
        if as_json or peer is not None or ref is not None:
            raise click.UsageError("--serve measures nothing here: leave out --json, --peer and --ref")
        _serve(node)
        return
    if ref is not None and peer is None:
        raise click.UsageError("--ref is what --serve printed on another node: give --peer of it too")
    if peer is not None:
        findings += _peer_findings(node, peer, ref)
    else:
        for name, check in select_checks(names):
            findings += run_check(name, check, node)
    tried = try_placements(node, run_check("gpus", gpus.check, node)) if gpu else None
    if as_json:
        print_json(report.as_json(findings, tried))
    else:
        report.print_findings(findings, "This node" if peer is None else f"The way to {peer}")
        if tried:
            report.print_placements(tried)
        elif tried is not None:
            click.echo("Placements of GPU memory: not tried, there is no GPU that can be used here.")
    ctx.exit(report.exit_status(findings, tried))


def _peer_findings(node: CheckContext, peer: str, ref: str | None) -> list[Finding]:
    from kvxferd.doctor.peer_check import check_peer, read_ref_of
    from kvxferd.wire.endpoint import parse_endpoint

    endpoint = parse_endpoint(peer if "://" in peer else f"tcp://{peer}")
    source = None if ref is None else read_ref_of(endpoint, ref)
    return run_check("peer", lambda context: check_peer(context, endpoint, source), node)


def _serve(node: CheckContext) -> None:
    from kvxferd.doctor.link import serve_link
    from kvxferd.tooling.interrupts import interrupted_once

    def print_command(ref: TransferRef) -> None:
        click.echo("kvxferd: serving until Ctrl-C; run this on another node:", err=True)
        click.echo(shlex.join(["kvxferd", "doctor", "--peer", ref.endpoint, "--ref", ref.to_json()]))

    with interrupted_once(), suppress(KeyboardInterrupt):
        serve_link(node, print_command)
    click.echo("kvxferd: no longer serving; the engine is gone", err=True)
