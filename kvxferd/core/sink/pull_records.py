"""What is told of a pull: its record when it has ended, its row in /v1/pulls, and whom it waited for.

A peer that waits says why every `peer.request_timeout_s` alone, which a short deadline may not meet. So
shortly before the deadline the daemon sends its request to the peer again, or one to the mover, that the pull
waits for: who does not reply is named. Nothing is decided by it.
"""

from __future__ import annotations

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import EmitRecord
from kvxferd.core.ranks.rank import LocalRank
from kvxferd.core.sink.grants import GrantClient
from kvxferd.core.sink.held_grant import GrantState
from kvxferd.core.sink.pull import NOTHING_READ, Need, Piece, Pull, PullPhase, add_piece
from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import PullId
from kvxferd.records import PHASES, PullRecord, PullSnapshot
from kvxferd.wire.endpoint import address_of
from kvxferd.wire.mover import PullOutcome
from kvxferd.wire.traceparent import span_id_for
from kvxferd.wire.worker import PullRequest

# Of a rank's names in a message: an engine may have 4,096.
MAX_NAMED_RANKS = 4


def phases_of(outcome: PullOutcome, with_mover_s: float) -> dict[str, float]:
    """Return the seconds of each phase of a pull that its mover had for so long: the mover reports the most.

    `connect` is what it does not report: messages, and what it loads before the pull.
    """
    phases_s = {
        "queue": outcome.queue_s,
        "plan": outcome.expand_s,
        "post": outcome.post_s,
        "wire": max(0.0, outcome.wire_s - outcome.post_s),  # posts are within it
        "fence": outcome.fence_s,
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
    is_delivered, covering = outcome == "delivered", min(known.covered_bytes, known.bytes)
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
        # A resident mover's word, which must not make a counter run backwards.
        ways={"direct": known.bytes - covering, "covering": covering},
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


def emit_refused(
    context: NodeContext, pull_id: PullId, rank: LocalRank, request: PullRequest, error: KvxferdError
) -> None:
    """Emit the record of a request that is wrong, or for which there is no room: no pull has begun."""
    record = PullRecord(
        pull=pull_id,
        transfer_id=request.ref.transfer_id,
        source=request.ref.engine_id,
        sink=rank.spec.engine_id,
        rank=rank.spec.rank,
        outcome="failed",
        code=error.code,
        message=error.message,
        bytes=0,
        runs=0,
        total_s=0.0,
        phases_s={},
        peer=request.ref.endpoint,
        failed_phase="other",
        progressive=request.progressive,
    )
    context.emit(EmitRecord(record, 0.0))


def snapshot_of(pull: Pull, now: float, waits: str) -> PullSnapshot:
    """Return the pull as /v1/pulls shows it. `waits`: the sentence that says for what."""
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
        waits=waits,
    )


def describe_wait(pull: Pull, need: Need | Piece, grant_client: GrantClient) -> tuple[str, str]:
    """Return whom a pull waits for that no mover has, and the sentence for its message."""
    hold = pull.held_grant
    if hold.state in (GrantState.HANDSHAKING, GrantState.REQUESTING):
        return grant_client.describe_wait(hold)
    if hold.state is GrantState.PLANNING:
        what = f"while this node planned the reads of engine {hold.ref.engine}"
        return "this node", f"{what}; check that its processors are free"
    rank = f"rank {pull.rank.spec.rank} of engine {pull.rank.spec.engine_id}"
    if need is Need.WORKER:
        return f"the worker of {rank}", f"while it waited for the worker of {rank}, after its mover died"
    # A grant that has lapsed meanwhile does not end the wait: another is requested with the next tokens.
    if need is Need.TOKENS or (need is Need.LAPSED and hold.awaits_more):
        engine = f"engine {pull.ref.engine_id}"
        has = f"{pull.tokens_read} of {pull.num_tokens} tokens are read"
        if silence := grant_client.describe_silence(hold):
            where = f"while {engine} had the rest to compute ({has}), and {silence}"
            return address_of(pull.ref.endpoint), where
        return f"the ranks of {engine}", f"while {engine} computed the rest ({has}); look at that engine"
    return (f"the mover of {rank}", f"while it waited for a mover of {rank}; see the log for why it has none")


def describe_read(pull: Pull) -> tuple[str, str]:
    """Return whom a pull waits for that its mover reads, and the sentence for its message."""
    hold, progress = pull.held_grant, pull.progress
    if pull.report_requested and (progress is None or not progress.agents):
        mover = f"the mover of rank {pull.rank.spec.rank} of engine {pull.rank.spec.engine_id}"
        why = f"was in its phase {progress.phase}" if progress else "did not reply to this daemon"
        return mover, f"{mover} {why}; check that this node's processors are free"
    ranks = [source.rank for source in hold.sources if progress is None or source.agent in progress.agents]
    engine = f"engine {pull.ref.engine_id}"
    where = f"{engine}, whose daemon is {address_of(pull.ref.endpoint)}"
    check = "check that node, and the network between"
    if not ranks:  # the fence word's mover may be another than those that are read
        return f"the publisher of {engine}", f"the fence word's mover of {where}, did not reply; {check}"
    names = "rank" + "s" * (len(ranks) > 1) + " " + ", ".join(map(str, ranks[:MAX_NAMED_RANKS]))
    if len(ranks) > MAX_NAMED_RANKS:
        names += f" and {len(ranks) - MAX_NAMED_RANKS} more"
    return f"{names} of {engine}", f"{names} of {where}, did not reply; {check}"
