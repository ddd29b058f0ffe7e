"""`kvxferd ping`: whether another node's daemon can be reached, and if not, why."""

from __future__ import annotations

import os
from pathlib import Path

import click

from kvxferd.cli.options import config_option, json_option

MAX_ROUND_TRIPS = 1000
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.1, 600.0


@click.command()
@click.argument("endpoint")
@json_option
@click.option(
    "--count", type=click.IntRange(1, MAX_ROUND_TRIPS), default=3, show_default=True, help="Round trips."
)
@click.option(
    "--timeout", "timeout_s", metavar="SECONDS", type=click.FloatRange(MIN_TIMEOUT_S, MAX_TIMEOUT_S),
    default=5.0, show_default=True, help="How long each step may take.",
)  # fmt: skip
@config_option("The configuration of this node's daemon, which names its key and its allow-lists.")
@click.pass_context
def ping(
    ctx: click.Context, endpoint: str, as_json: bool, count: int, timeout_s: float, config_path: Path | None
) -> None:
    """Reach the daemon at ENDPOINT, tcp://HOST:PORT#KEY, and print what is wrong if that fails.

    It connects by itself, with this node's key: run it as root or as the daemon's user, where the daemon
    runs. `kvxferd doctor --peer` also shows the daemon's own connection, and what its pulls took.

    Exit status: 0 if it answers; 10 the endpoint is not allowed by this node's own settings; 11 its host
    name is unknown; 12 nothing listens there; 13 the host cannot be reached; 14 no daemon is there; 15 it
    needs a key, and there is none here; 16 it has no key; 17 it has another key than the endpoint names; 18
    it refuses this node's key; 19 it refuses this node's address; 20 it does not answer; 21 no common
    version; 2 another error.
    """
    # Imported here: the other verbs need no libzmq, and a completion nothing of this.
    import msgspec

    from kvxferd.config import load_config
    from kvxferd.control.allowed_keys_file import read_allowed_keys
    from kvxferd.control.curve_keys import allowlist_of, read_key
    from kvxferd.doctor.peer_ping import ping as ping_peer
    from kvxferd.doctor.peer_report import exit_status_of, print_ping
    from kvxferd.tooling.output import print_json
    from kvxferd.wire.endpoint import parse_endpoint

    if not timeout_s >= MIN_TIMEOUT_S:  # not a number, which no range excludes
        raise click.BadParameter("give a number of seconds", param_hint="--timeout")
    config = load_config(config_path, os.environ, {}).peer
    peer = parse_endpoint(endpoint if "://" in endpoint else f"tcp://{endpoint}")
    key = read_key(Path(config.curve_secret_key_file)) if config.curve_secret_key_file else None
    listed = config.curve_allowed_keys_file
    keys = read_allowed_keys(Path(listed), config.curve_secret_key_file) if listed else frozenset[str]()
    result = ping_peer(peer, allowlist_of(config, key, keys), key, count=count, timeout_s=timeout_s)
    status = exit_status_of(result.outcome)
    if as_json:
        print_json(msgspec.to_builtins(result) | {"status": status})
    else:
        print_ping(result)
    ctx.exit(status)
