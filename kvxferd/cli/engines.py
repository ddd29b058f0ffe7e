"""`kvxferd engines`: the engines that registered here, rank by rank."""

from __future__ import annotations

import click
import msgspec

from kvxferd.cli.options import json_option, watchable, with_control_client
from kvxferd.records import EngineSnapshot, OwnershipSnapshot, RankSnapshot
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.output import (
    console,
    format_bytes,
    format_duration,
    plain_text,
    print_json,
    print_table,
)


@click.command()
@click.option(
    "--topology",
    is_flag=True,
    help="Show instead what local ranks know of remote engines, a line each stage.",
)
@json_option
@with_control_client
@watchable
def engines(daemon: ControlClient, topology: bool, as_json: bool) -> None:
    """Show local engines and their ranks, and which user owns each engine id."""
    if topology:
        _show_topology(daemon, as_json)
        return
    from kvxferd.telemetry.gauges import engine_state  # it loads the metrics' library

    reply = daemon.get("/v1/engines")
    if as_json:
        print_json(reply)
        return
    local = msgspec.convert(reply["engines"], list[EngineSnapshot])
    print_table(
        "Engines",
        ("engine", "generation", "pp x tp", "layers", "state", "lacking or problem"),
        (
            (
                e.engine_id,
                e.generation,
                f"{e.pp_size} x {e.tp_size}",
                e.num_layers,
                engine_state(e),
                _missing_or_problem(e),
            )
            for e in local
        ),
    )
    print_table(
        "Ranks",
        ("engine", "rank", "state", "layers", "memory", "placement", "lanes", "GB/s", "library", "agent"),
        (
            (e.engine_id, r.rank, r.state, f"{r.layers[0]}-{r.layers[1] - 1}", format_bytes(r.bytes),
             _placement_kind(r), _transports(r), _speed(r), r.library, r.agent or "")
            for e in local
            for r in e.ranks
        ),
    )  # fmt: skip
    print_table(
        "Recorded engine ids",
        ("engine", "user", "kept for", "ranks kept"),
        (
            (o.engine_id, f"uid {o.uid}" if o.uid is not None else "", _kept_for(o), o.num_kept_ranks)
            for o in msgspec.convert(reply.get("ownerships", []), list[OwnershipSnapshot])
        ),
    )


def _show_topology(daemon: ControlClient, as_json: bool) -> None:
    """Print the terms of each remote stage that a local rank knows, the last used first."""
    stages = daemon.get("/v1/topology")["topology"]
    if as_json:
        print_json(stages)
        return
    if not stages:
        console().print("Remote engines: none", highlight=False)
    for terms in stages:
        listed = ", ".join(f"{name}={value}" for name, value in terms.items())
        console().print(plain_text(f"TransferTopology({listed})"), soft_wrap=True)


def _kept_for(ownership: OwnershipSnapshot) -> str:
    if ownership.uid is None:
        return ""
    return (
        "as long as it has ranks"
        if ownership.expires_in_s is None
        else format_duration(ownership.expires_in_s)
    )


def _placement_kind(rank: RankSnapshot) -> str:
    found = rank.placement
    if found is None:
        return ""
    return found.kind if found.proved else f"{found.kind}, not proved"


def _transports(rank: RankSnapshot) -> str:
    """Return the mover's transports: to itself, to others of its node, to other nodes."""
    return "; ".join(
        f"{lanes.reach}: {lanes.lanes}{' (slow)' if lanes.slow else ''}" for lanes in rank.lanes
    ) or (rank.placement.lanes if rank.placement is not None else "")


def _speed(rank: RankSnapshot) -> str:
    return f"{rank.placement.gigabytes_per_s:.3g}" if rank.placement and rank.placement.proved else ""


def _missing_or_problem(engine: EngineSnapshot) -> str:
    if engine.lacking:
        return "lacks " + ", ".join(map(str, engine.lacking))
    return engine.problem
