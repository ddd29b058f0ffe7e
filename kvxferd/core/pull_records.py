"""What is told of a pull: its record when it has ended, and its row in /v1/pulls before."""

from __future__ import annotations

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import EmitRecord
from kvxferd.core.pull import Pull, PullPhase
from kvxferd.core.snapshot import PullRecord, PullSnapshot
from kvxferd.core.traces import sampled_trace
from kvxferd.errors import Code
from kvxferd.wire.mover import PullOutcome

# Of a time in a mover's report: longer than any pull. NaN and infinity are beyond it too.
MAX_REPORTED_S = 1e6


def phases_of(outcome: PullOutcome) -> dict[str, float]:
    """Return the seconds of each phase that the mover reports."""
    return {
        "queue": _as_seconds(outcome.queue_s),
        "plan": _as_seconds(outcome.expand_s),
        "post": _as_seconds(outcome.post_s),
        "wire": _as_seconds(outcome.wire_s),
        "fence": _as_seconds(outcome.fence_s),
    }


def emit_record(
    context: NodeContext, pull: Pull, outcome: str, code: Code | None, message: str, ended: float
) -> None:
    """Emit the record of a pull that ended at `ended`, in seconds of the core's clock."""
    known = pull.outcome or PullOutcome(delivered=False)
    trace = sampled_trace(context.settings, pull.ref.trace, pull.ref.nonce)
    record = PullRecord(
        pull=pull.pull_id,
        transfer_id=pull.ref.transfer_id,
        source=pull.ref.engine_id,
        sink=pull.rank.spec.engine_id,
        rank=pull.rank.spec.rank,
        outcome=outcome,
        code=code,
        message=message,
        bytes=max(known.bytes, 0),
        runs=max(known.runs, 0),
        total_s=ended - pull.received_at,
        phases_s=pull.phases_s,
        retried=pull.retried or pull.num_movers_lost > 0,
        ways=_bytes_by_way(known),
        predicted_s=_as_seconds(known.predicted_s),
        peer=pull.ref.endpoint,
        failed_phase="" if outcome == "delivered" else pull.failed_phase,
        silent=pull.silent,
        traceparent=trace,
        span_id=pull.span_id if trace else "",
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
    )


def _as_seconds(reported: float) -> float:
    """Return a time that a resident mover reported, 0 where it is none: a sum with NaN stays NaN."""
    return reported if 0.0 <= reported <= MAX_REPORTED_S else 0.0


def _bytes_by_way(outcome: PullOutcome) -> dict[str, int]:
    # A resident mover's word, which must not make a counter run backwards.
    total = max(outcome.bytes, 0)
    covering = min(max(outcome.covered_bytes, 0), total)
    gathered = min(max(outcome.gathered_bytes, 0), total - covering)
    return {"direct": total - covering - gathered, "covering": covering, "gathered": gathered}
