"""What is told of a pull: its record when it has ended, and its row in /v1/pulls before."""

from __future__ import annotations

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import EmitRecord
from kvxferd.core.sink.pull import Pull, PullPhase
from kvxferd.core.sink.pull_totals import NOTHING_READ, add_piece, as_seconds
from kvxferd.errors import Code
from kvxferd.records import PHASES, PullRecord, PullSnapshot
from kvxferd.wire.mover import PullOutcome
from kvxferd.wire.traceparent import span_id_for


def phases_of(outcome: PullOutcome, with_mover_s: float) -> dict[str, float]:
    """Return the seconds of each phase of a pull that its mover had for so long: the mover reports the most.

    `connect` is what it does not report: messages, and what it loads before the pull.
    """
    post_s = as_seconds(outcome.post_s)
    phases_s = {
        "queue": as_seconds(outcome.queue_s),
        "plan": as_seconds(outcome.expand_s),
        "post": post_s,
        "wire": max(0.0, as_seconds(outcome.wire_s) - post_s),  # posts are within it
        "fence": as_seconds(outcome.fence_s),
    }
    return {"connect": max(0.0, with_mover_s - sum(phases_s.values()))} | phases_s


def _exclusive_phases(phases_s: dict[str, float], total_s: float) -> dict[str, float]:
    """Return the phases as they passed, none longer than what the others leave; `other` is the rest.

    What a resident mover reports is a worker's word, and of a second read the first one's time is `other`.
    """
    left_s, found = total_s, {}
    for phase in PHASES:
        if phase in phases_s:
            found[phase] = min(phases_s[phase], left_s)
            left_s -= found[phase]
    return found | {"other": left_s}


def emit_record(
    context: NodeContext,
    pull: Pull,
    outcome: str,
    code: Code | None,
    message: str,
    ended: float,
    acknowledge_s: float | None = None,
) -> None:
    """Emit the record of a pull that ended at `ended`, in seconds of the core's clock."""
    total_s = ended - pull.received_at
    known = add_piece(pull.read, pull.outcome or NOTHING_READ)
    is_delivered = outcome == "delivered"
    trace = context.settings.sampled_trace(pull.ref.traceparent, pull.ref.nonce)
    record = PullRecord(
        pull=pull.pull_id,
        transfer_id=pull.ref.transfer_id,
        source=pull.ref.engine_id,
        sink=pull.rank.spec.engine_id,
        rank=pull.rank.spec.rank,
        outcome=outcome,
        code=code,
        message=message,
        bytes=known.bytes,
        runs=known.runs,
        total_s=total_s,
        phases_s=_exclusive_phases(pull.phases_s, total_s),
        acknowledge_s=acknowledge_s,
        retried=pull.retried or pull.num_movers_lost > 0,
        ways=_bytes_by_way(known),
        predicted_s=known.predicted_s,
        peer=pull.ref.endpoint,
        failed_phase="" if is_delivered else pull.failed_phase,
        silent=pull.silent,
        traceparent=trace,
        span_id=span_id_for(pull.held_grant.grant_id) if trace else "",
        progressive=pull.progressive,
        hidden_bytes=pull.hidden_bytes if is_delivered else 0,
        handover_s=max(0.0, ended - pull.whole_at) if is_delivered and pull.whole_at is not None else None,
    )
    context.emit(EmitRecord(record, context.now - ended))


def snapshot_of(pull: Pull, now: float) -> PullSnapshot:
    """Return the pull as /v1/pulls shows it."""
    return PullSnapshot(
        pull=pull.pull_id,
        transfer_id=pull.ref.transfer_id,
        source=pull.ref.engine_id,
        sink=pull.rank.spec.engine_id,
        rank=pull.rank.spec.rank,
        phase=pull.held_grant.state if pull.phase is PullPhase.WAITING else pull.phase,
        grant=pull.held_grant.grant_id,
        age_s=round(now - pull.received_at, 3),
        deadline_left_s=round(pull.deadline - now, 3),
        progressive=pull.progressive,
        num_tokens=pull.num_tokens,
        tokens_read=pull.tokens_read,
        bytes_read=pull.read.bytes,
    )


def _bytes_by_way(outcome: PullOutcome) -> dict[str, int]:
    # A resident mover's word, which must not make a counter run backwards.
    total = outcome.bytes
    covering = min(outcome.covered_bytes, total)
    return {"direct": total - covering, "covering": covering}
