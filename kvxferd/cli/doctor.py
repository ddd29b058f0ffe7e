"""`kvxferd doctor`: its options and its exit code."""

from __future__ import annotations

import os
from pathlib import Path

import click

from kvxferd.cli.options import config_option, json_option, socket_option
from kvxferd.doctor.finding import CheckContext, Finding
from kvxferd.doctor.runner import CHECKS, load_config_or_finding, run_check, select_checks
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.output import print_json

RESPONSE_TIMEOUT_S = 5.0
MAX_PROBE_MIB = 64


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
    "--no-probe", is_flag=True, help="With --peer: read nothing from the peer, and let it read nothing."
)
@click.option(
    "--probe-mib",
    type=click.IntRange(1, MAX_PROBE_MIB),
    default=MAX_PROBE_MIB,
    show_default=True,
    help="With --peer: how much memory a probe reads, in MiB.",
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
    no_probe: bool,
    probe_mib: int,
    driver: str | None,
    socket_path: str | None,
    config_path: Path | None,
) -> None:
    """Examine this node: what works, what does not and why, and how to fix it.

    Run it as the daemon's user, where the daemon runs (in its container). Exit status: 0 if everything
    essential works; 1 if something essential does not, or with --gpu a placement does not; 3 if with
    --gpu there is no GPU.
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
    )
    if peer is not None:
        if gpu or names:
            raise click.UsageError("--peer examines the way to a daemon: leave out --gpu and --check")
        findings += _peer_findings(node, peer, 0 if no_probe else probe_mib << 20)
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


def _peer_findings(node: CheckContext, peer: str, probe_bytes: int) -> list[Finding]:
    from kvxferd.doctor.peer_check import check_peer
    from kvxferd.wire.endpoint import parse_endpoint

    endpoint = parse_endpoint(peer if "://" in peer else f"tcp://{peer}")
    return run_check("peer", lambda context: check_peer(context, endpoint, probe_bytes), node)
