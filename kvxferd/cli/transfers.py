"""`kvxferd transfers`: published transfers, running pulls, and the last pulls that ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
import msgspec

from kvxferd.cli.options import json_option, watchable, with_control_client
from kvxferd.records import PullRecord, PullSnapshot, TransferSnapshot
from kvxferd.telemetry.history import record_from_json
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.output import format_bytes, format_duration, print_json, print_table

MAX_ENDED = 16  # pulls that are shown; /v1/history has more


@click.command()
@json_option
@with_control_client
@watchable
def transfers(daemon: ControlClient, as_json: bool) -> None:
    """Show published transfers, running pulls, and how the last pulls were read."""
    reply = daemon.get("/v1/transfers")
    ended = _ended_pulls(daemon.get("/v1/history"))
    if as_json:
        print_json(reply | {"ended_pulls": ended})
        return
    print_table(
        "Published transfers",
        ("transfer", "engine", "state", "tokens", "grants", "acks", "lease left", "age"),
        (
            (t.transfer_id, f"{t.engine_id}@{t.generation}", t.state, format_ready(t), t.num_grants,
             t.num_acks, format_duration(t.lease_left_s), format_duration(t.age_s))
            for t in msgspec.convert(reply["transfers"], list[TransferSnapshot])
        ),
    )  # fmt: skip
    print_table(
        "Running pulls",
        ("pull", "transfer", "from", "to", "rank", "phase", "read", "age", "deadline in"),
        (
            (p.pull, p.transfer_id, p.source, p.sink, p.rank, p.phase, format_read(p),
             format_duration(p.age_s), format_duration(p.deadline_left_s))
            for p in msgspec.convert(reply["pulls"], list[PullSnapshot])
        ),
    )  # fmt: skip
    records = [record for one in ended if isinstance(record := record_from_json(one), PullRecord)]
    print_table(
        "Last pulls",
        ("pull", "transfer", "from", "to", "rank", "outcome", "bytes", "read", "took", "reads predicted",
         "handover"),
        (
            (r.pull, r.transfer_id, r.source, r.sink, r.rank, r.code or r.outcome, format_bytes(r.bytes),
             format_ways(r.ways), format_duration(r.total_s),
             format_duration(r.predicted_s) if r.predicted_s else "-", format_handover(r))
            for r in records
        ),
    )  # fmt: skip
    if failures := {r.pull: r.message for r in records if r.code and r.message}:
        print_table(
            "Why pulls failed", ("pull", "message"), [(str(pull), why) for pull, why in failures.items()]
        )


def format_ready(transfer: TransferSnapshot) -> str:
    """Return how many tokens it has: ``512/8192`` ready while its prefill runs, ``8192`` when it is whole."""
    if 0 <= transfer.ready_tokens < transfer.num_tokens:
        return f"{transfer.ready_tokens}/{transfer.num_tokens}"
    return str(transfer.num_tokens)


def format_read(pull: PullSnapshot) -> str:
    """Return how far a progressive pull has read: ``512/8192 tokens, 64 MiB``; ``-`` for an ordinary one."""
    if not pull.progressive:
        return "-"
    return f"{pull.tokens_read}/{pull.num_tokens} tokens, {format_bytes(pull.bytes_read)}"


def format_handover(record: PullRecord) -> str:
    """Return what was waited for at the end, and what was read before: ``12 ms, 448 MiB (88%) hidden``."""
    if record.handover_s is None:
        return "-"
    hidden = f"{format_bytes(record.hidden_bytes)} ({record.hidden_bytes / max(record.bytes, 1):.0%}) hidden"
    return f"{format_duration(record.handover_s)}, {hidden}"


def format_ways(ways: Mapping[str, int]) -> str:
    """Return how the bytes were read: ``covering``, or ``75% covering, 25% direct`` where in several ways."""
    total = sum(ways.values())
    used = sorted(((num_bytes, way) for way, num_bytes in ways.items() if num_bytes > 0), reverse=True)
    if len(used) < 2:
        return used[0][1] if used else "-"
    return ", ".join(f"{num_bytes / total:.0%} {way}" for num_bytes, way in used)


def _ended_pulls(history: Any) -> list[dict[str, Any]]:
    """Return the last pulls of a history, the latest last."""
    pulls = [record for record in history["records"] if record.get("kind") == "pull"]
    return pulls[-MAX_ENDED:]
