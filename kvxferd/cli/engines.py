"""`kvxferd engines`: the engines that registered here, rank by rank."""

from __future__ import annotations

import urllib.parse

import click
import msgspec

from kvxferd.cli.completion import complete_from, remote_engine_ids
from kvxferd.cli.options import json_option, watchable, with_control_client
from kvxferd.core.snapshot import EngineSnapshot, OwnershipSnapshot, RankSnapshot, RetiredMoverSnapshot
from kvxferd.core.topology_snapshot import TopologySnapshot
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.output import format_bytes, format_duration, print_json, print_table


@click.command()
@click.option(
    "--topology",
    "topology_of",
    metavar="[ENGINE]",
    is_flag=False,
    flag_value="",
    shell_complete=complete_from("/v1/peers", remote_engine_ids),
    help="Show instead what local ranks know of remote engines, or of ENGINE alone.",
)
@json_option
@with_control_client
@watchable
def engines(daemon: ControlClient, topology_of: str | None, as_json: bool) -> None:
    """Show local engines and their ranks, and which user owns each engine id."""
    if topology_of is not None:
        _show_topologies(daemon, topology_of, as_json)
        return
    from kvxferd.telemetry.gauges import engine_state  # it loads the metrics' library

    answer = daemon.get("/v1/engines")
    if as_json:
        print_json(answer)
        return
    local = msgspec.convert(answer["engines"], list[EngineSnapshot])
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
    if retired := msgspec.convert(answer.get("retired_movers", []), list[RetiredMoverSnapshot]):
        print_table(
            "Retired movers",
            ("engine", "rank", "mover", "kept by", "pulls", "in doubt", "age"),
            (
                (m.engine_id or "", m.rank or "", m.mover, m.kept_by, m.num_pulls, m.num_in_doubt,
                 format_duration(m.age_s))
                for m in retired
            ),
        )  # fmt: skip
    print_table(
        "Recorded engine ids",
        ("engine", "user", "kept for", "ranks kept"),
        (
            (o.engine_id, f"uid {o.uid}" if o.uid is not None else "", _kept_for(o), o.num_kept_ranks)
            for o in msgspec.convert(answer.get("ownerships", []), list[OwnershipSnapshot])
        ),
    )


def _show_topologies(daemon: ControlClient, engine_id: str, as_json: bool) -> None:
    """Print what local ranks know of one remote engine, or of all (the empty id)."""
    path = f"/v1/engines/{urllib.parse.quote(engine_id, safe='')}/topology" if engine_id else "/v1/topology"
    answer = daemon.get(path)
    if as_json:
        print_json(answer["topology"])
    else:
        from kvxferd.cli.topology_report import print_topologies  # it loads numpy

        print_topologies(msgspec.convert(answer["topology"], list[TopologySnapshot], str_keys=True))
    if num_left_out := answer["num_left_out"]:
        more = "1 more is" if num_left_out == 1 else f"{num_left_out:,} more are"
        click.echo(f"kvxferd: {more} not shown; name an ENGINE to see it alone", err=True)


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
