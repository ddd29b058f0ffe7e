"""`kvxferd transfers`: published transfers, and running pulls."""

from __future__ import annotations

import click
import msgspec

from kvxferd.cli.options import json_option, with_control_client
from kvxferd.core.snapshot import PullSnapshot, TransferSnapshot
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.output import format_duration, print_json, print_table


@click.command()
@json_option
@with_control_client
def transfers(daemon: ControlClient, as_json: bool) -> None:
    """Show published transfers and running pulls."""
    answer = daemon.get("/v1/transfers")
    if as_json:
        print_json(answer)
        return
    print_table(
        "Published transfers",
        ("transfer", "engine", "state", "tokens", "grants", "acks", "lease left", "age"),
        (
            (t.transfer_id, f"{t.engine_id}@{t.generation}", t.state, t.num_tokens, t.num_grants, t.num_acks,
             format_duration(t.lease_left_s), format_duration(t.age_s))
            for t in msgspec.convert(answer["transfers"], list[TransferSnapshot])
        ),
    )  # fmt: skip
    print_table(
        "Running pulls",
        ("pull", "transfer", "from", "to", "rank", "phase", "age", "deadline in"),
        (
            (p.pull, p.transfer_id, p.source, p.sink, p.rank, p.phase,
             format_duration(p.age_s), format_duration(p.deadline_left_s))
            for p in msgspec.convert(answer["pulls"], list[PullSnapshot])
        ),
    )  # fmt: skip
