"""`kvxferd engines`, `peers` and `transfers`: tables of what the daemon has now."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import click
import msgspec

from kvxferd.cli.options import F, form_option, json_option, with_control_client
from kvxferd.ids import Endpoint
from kvxferd.records import (
    EngineSnapshot,
    OwnershipSnapshot,
    PeerSnapshot,
    PullSnapshot,
    RankSnapshot,
    TransferSnapshot,
)
from kvxferd.telemetry.units import format_size, format_time
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.output import Column, format_count, print_json, print_line, print_table
from kvxferd.wire.endpoint import address_of


class Listing(NamedTuple):
    """A table of a daemon's reply."""

    title: str
    rows: Callable[[Any], Iterable[Any]]  # of the reply
    columns: tuple[Column, ...]  # the first has the name that other verbs take


def sort_rows(listings: Sequence[Listing], rows: list[list[Any]], sort: str) -> None:
    """Sort by a column, `-COLUMN` from the highest, each table that has it. Raises click.BadParameter."""
    title = sort.removeprefix("-").casefold()
    known = [{column.title.casefold(): column for column in listing.columns} for listing in listings]
    if not any(title in columns for columns in known):
        titles = dict.fromkeys(column.title for listing in listings for column in listing.columns)
        raise click.BadParameter(f"{sort!r} is no column: {', '.join(titles)}", param_hint="--sort")
    for columns, ours in zip(known, rows, strict=True):
        if column := columns.get(title):
            ours.sort(key=functools.partial(_sort_key, column), reverse=sort.startswith("-"))


def _sort_key(column: Column, row: Any) -> tuple[bool, Any]:
    value = column.get(row)
    return value is not None, value


def list_verb(path: str, *listings: Listing) -> Callable[[F], F]:
    """Make a verb that shows these tables of the daemon's reply at `path`; the function has its help."""

    def make(verb: F) -> F:
        @json_option
        @form_option
        @click.option("--sort", metavar="COLUMN", help="Sort by this column; -COLUMN: from the highest.")
        @with_control_client
        @functools.wraps(verb)
        def show(daemon: ControlClient, as_json: bool, form: str, sort: str | None) -> None:
            reply = daemon.get(path)
            rows = [list(listing.rows(reply)) for listing in listings]
            if sort is not None:
                sort_rows(listings, rows, sort)
            if as_json or form == "json":
                print_json(reply)
            elif form == "name":
                for row in rows[0]:
                    print_line(listings[0].columns[0].text(row))
            else:
                for listing, ours in zip(listings, rows, strict=True):
                    print_table(listing.title, listing.columns, ours, is_wide=form == "wide")

        return show  # type: ignore[return-value]

    return make


def _items(key: str, kind: type) -> Callable[[Any], Iterable[Any]]:
    """Return what reads a list of the reply."""
    return lambda reply: msgspec.convert(reply[key], list[kind])  # type: ignore[valid-type]


def engine_state(engine: EngineSnapshot) -> str:
    """Return whether an engine can be read."""
    from kvxferd.telemetry.gauges import engine_state  # it loads the metrics' library

    return engine_state(engine)


def _problem(engine: EngineSnapshot) -> str:
    if engine.lacking:
        return "lacks " + ", ".join(map(str, engine.lacking))
    return "" if engine.complete else "aggregated at its home"


def format_placement(rank: RankSnapshot) -> str | None:
    """Return how a mover reaches the rank's memory; None where it is not bound."""
    if (found := rank.placement) is None:
        return None
    return found.kind if found.proved else f"{found.kind}, not proved"


def _gigabytes_per_s(of: tuple[EngineSnapshot, RankSnapshot]) -> float | None:
    placement = of[1].placement
    return placement.gigabytes_per_s if placement is not None and placement.proved else None


def _lanes(rank: RankSnapshot) -> str:
    """Return the mover's transports: to itself, to others of its node, to other nodes."""
    return "; ".join(
        f"{lanes.reach}: {lanes.lanes}{' (slow)' if lanes.slow else ''}" for lanes in rank.lanes
    ) or (rank.placement.lanes if rank.placement is not None else "")


def _ranks(reply: Any) -> Iterable[tuple[EngineSnapshot, RankSnapshot]]:
    for engine in msgspec.convert(reply["engines"], list[EngineSnapshot]):
        yield from ((engine, rank) for rank in engine.ranks)


def _kept_for(owned: OwnershipSnapshot) -> str | None:
    if owned.uid is None:
        return None
    return "as long as it has ranks" if owned.expires_in_s is None else format_time(owned.expires_in_s)


def format_read(pull: PullSnapshot) -> str | None:
    """Return how far a progressive pull has read: ``512/8192 tokens, 67.1 MB``; None for an ordinary one."""
    if not pull.progressive:
        return None
    return f"{pull.tokens_read}/{pull.num_tokens} tokens, {format_size(pull.bytes_read)}"


def _ready(transfer: TransferSnapshot) -> str:
    """Return how many tokens it has: ``512/8192`` while its prefill runs, ``8192`` when it is whole."""
    if 0 <= transfer.ready_tokens < transfer.num_tokens:
        return f"{transfer.ready_tokens}/{transfer.num_tokens}"
    return str(transfer.num_tokens)


def _holders(transfer: TransferSnapshot) -> str:
    """Return who has grants on it, and for how long: ``decode-0 4.2 s, decode-1 60 ms``."""
    return ", ".join(f"{held.engine_id} {format_time(held.held_s)}" for held in transfer.holders)


ENGINES = Listing("Engines", _items("engines", EngineSnapshot), (
    Column("engine", lambda e: e.engine_id),
    Column("generation", lambda e: e.generation, rank=2),
    Column("pp x tp", lambda e: f"{e.pp_size} x {e.tp_size}", rank=1),
    Column("layers", lambda e: e.num_layers, rank=1),
    Column("state", engine_state),
    Column("problem", _problem),
))  # fmt: skip
RANKS = Listing("Ranks", _ranks, (
    Column("engine", lambda of: of[0].engine_id),
    Column("rank", lambda of: of[1].rank),
    Column("state", lambda of: of[1].state),
    Column("layers", lambda of: of[1].layers, lambda layers: f"{layers[0]}-{layers[1] - 1}", 2),
    Column("memory", lambda of: of[1].bytes, format_size, 1),
    Column("placement", lambda of: format_placement(of[1])),
    Column("lanes", lambda of: _lanes(of[1])),
    Column("GB/s", _gigabytes_per_s, "{:.3g}".format, 3),
    Column("library", lambda of: of[1].library, rank=4),
    Column("agent", lambda of: of[1].agent, rank=5),
))  # fmt: skip
OWNERSHIPS = Listing("Recorded engine ids", _items("ownerships", OwnershipSnapshot), (
    Column("engine", lambda o: o.engine_id),
    Column("user", lambda o: o.uid, lambda uid: f"uid {uid}"),
    Column("kept for", _kept_for),
    Column("ranks kept", lambda o: o.num_kept_ranks, rank=1),
))  # fmt: skip
PEERS = Listing("Peers", _items("peers", PeerSnapshot), (
    Column("peer", lambda p: address_of(Endpoint(p.endpoint))),
    Column("state", lambda p: p.state),
    Column("round trip", lambda p: p.round_trip_s, format_time, 2),
    Column("last reply", lambda p: p.last_reply_s, lambda ago_s: f"{format_time(ago_s)} ago", 1),
    Column("grants", lambda p: p.num_grants, rank=3),
    Column("boot", lambda p: p.boot, rank=4),
    Column("endpoint", lambda p: p.endpoint, rank=5),
    Column("engines", lambda p: ", ".join(
        f"{e.engine_id}@{e.generation} ({format_count(e.num_ranks, 'rank')})" for e in p.engines)),
))  # fmt: skip
TRANSFERS = Listing("Published transfers", _items("transfers", TransferSnapshot), (
    Column("transfer", lambda t: t.transfer_id),
    Column("engine", lambda t: f"{t.engine_id}@{t.generation}"),
    Column("state", lambda t: t.state),
    Column("tokens", _ready, rank=1),
    Column("grants", lambda t: t.num_grants, rank=2),
    Column("held by", _holders, rank=1),
    Column("acks", lambda t: t.num_acks, rank=3),
    Column("lease left", lambda t: t.lease_left_s, format_time),
    Column("age", lambda t: t.age_s, format_time, 1),
))  # fmt: skip
PULLS = Listing("Running pulls", _items("pulls", PullSnapshot), (
    Column("pull", lambda p: p.pull),
    Column("transfer", lambda p: p.transfer_id),
    Column("from", lambda p: p.source, rank=1),
    Column("to", lambda p: p.sink, rank=1),
    Column("rank", lambda p: p.rank, rank=3),
    Column("phase", lambda p: p.phase),
    Column("read", format_read, rank=2),
    Column("age", lambda p: p.age_s, format_time),
    Column("deadline in", lambda p: max(p.deadline_left_s, 0.0), format_time, 2),
    Column("waits", lambda p: p.waits or None, rank=4),
))  # fmt: skip


@click.command()
@list_verb("/v1/peers", PEERS)
def peers() -> None:
    """Show other nodes' daemons, and the engines known from them."""


@click.command()
@list_verb("/v1/transfers", TRANSFERS, PULLS)
def transfers() -> None:
    """Show published transfers and running pulls; `kvxferd history` has those that ended."""


@click.command()
@list_verb("/v1/engines", ENGINES, RANKS, OWNERSHIPS)
def engines() -> None:
    """Show local engines and their ranks, and which user owns each engine id."""
