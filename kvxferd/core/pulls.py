"""Pulls of local ranks, from the request to the one terminal event, and to quiet if that was in doubt."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvxferd.core.effects import Observed, ToMover, ToWorker
from kvxferd.core.holds import Hold, Holds, HoldState
from kvxferd.core.moment import Moment
from kvxferd.core.movers import Movers
from kvxferd.core.registry import LocalRank
from kvxferd.core.snapshot import PullRecord, PullSnapshot
from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import AgentName, GroupName, MoverId, PullId, Ticket
from kvxferd.layout import PackedBlocks
from kvxferd.plan import check_request
from kvxferd.wire.common import Message, TransferRef
from kvxferd.wire.ids_stream import split_ids
from kvxferd.wire.mover import AbortPull, FencePlace, PullOutcome, Source, StartPull
from kvxferd.wire.worker import Delivered, Failed, Quiesced


class Phase(StrEnum):
    """Where a pull is. Nothing was posted before POSTED."""

    HOLDING = "holding"  # handshake, plan and grant
    POSTED = "posted"  # the mover has it
    STOPPING = "stopping"  # cancelled: the mover was told to post nothing more
    DELIVERED = "delivered"
    FAILED = "failed"
    IN_DOUBT = "in-doubt"  # failed, and the mover may still write
    QUIET = "quiet"  # failed, and proven ended since


class Signal(StrEnum):
    """What happens to a pull."""

    POST = "post"
    REFUSE = "refuse"  # the hold, the request or the mover's bind said no
    CANCEL = "cancel"
    EXPIRE = "expire"
    DELIVER = "deliver"
    FINISH = "finish"  # not delivered, and every handle is terminal or the mover is dead
    FAULT = "fault"  # not delivered, and not proven ended


# A pair that is not here is a bug, never ignored: callers ask `can` first where both may happen.
MOVES: dict[tuple[Phase, Signal], Phase] = {
    (Phase.HOLDING, Signal.POST): Phase.POSTED,
    (Phase.HOLDING, Signal.REFUSE): Phase.FAILED,  # no DMA yet: free now
    (Phase.HOLDING, Signal.CANCEL): Phase.FAILED,
    (Phase.HOLDING, Signal.EXPIRE): Phase.FAILED,
    (Phase.HOLDING, Signal.DELIVER): Phase.DELIVERED,  # nothing to read: a full prefix hit
    (Phase.POSTED, Signal.CANCEL): Phase.STOPPING,
    (Phase.POSTED, Signal.EXPIRE): Phase.IN_DOUBT,
    (Phase.POSTED, Signal.DELIVER): Phase.DELIVERED,
    (Phase.POSTED, Signal.FINISH): Phase.FAILED,
    (Phase.POSTED, Signal.FAULT): Phase.IN_DOUBT,  # DMA may still be landing
    (Phase.STOPPING, Signal.EXPIRE): Phase.IN_DOUBT,
    (Phase.STOPPING, Signal.DELIVER): Phase.DELIVERED,  # it was done before it could be stopped
    (Phase.STOPPING, Signal.FINISH): Phase.FAILED,
    (Phase.STOPPING, Signal.FAULT): Phase.IN_DOUBT,
    (Phase.IN_DOUBT, Signal.DELIVER): Phase.QUIET,  # too late: the engine has been told Failed
    (Phase.IN_DOUBT, Signal.FINISH): Phase.QUIET,
}


@dataclass(slots=True)
class Pull:
    """One local rank's read of one transfer."""

    pull: PullId
    rank: LocalRank
    ticket: Ticket
    ref: TransferRef
    blocks: dict[GroupName, PackedBlocks]
    num_tokens: int
    deadline: float
    received: float
    hold: Hold
    phase: Phase = Phase.HOLDING
    mover: MoverId | None = None  # that has it, from POSTED on
    posted: float | None = None
    outcome: PullOutcome | None = None
    phases_s: dict[str, float] = field(default_factory=dict)

    @property
    def blocks_are_free(self) -> bool:
        """Whether nothing can write the pull's blocks any more."""
        return self.phase in (Phase.DELIVERED, Phase.FAILED, Phase.QUIET)

    def can(self, signal: Signal) -> bool:
        """Whether this may happen to the pull now."""
        return (self.phase, signal) in MOVES

    def move(self, signal: Signal) -> Phase:
        """Take the step; a KeyError is our own bug."""
        self.phase = MOVES[self.phase, signal]
        return self.phase


class Pulls:
    """Every pull whose blocks are not free yet."""

    def __init__(self, moment: Moment, holds: Holds, movers: Movers) -> None:
        self._moment = moment
        self._holds = holds
        self._movers = movers
        self._pulls: dict[PullId, Pull] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._pulls)

    @property
    def num_quarantined(self) -> int:
        """Pulls that failed and are not proven ended."""
        return sum(pull.phase is Phase.IN_DOUBT for pull in self._pulls.values())

    def next_id(self) -> PullId:
        """A pull number never used before."""
        self._last += 1
        return PullId(self._last)

    def start(self, pull: Pull) -> None:
        """Follow a pull whose hold has been asked for."""
        self._pulls[pull.pull] = pull
        self._moment.timers.set(("deadline", pull.pull), pull.deadline, lambda: self._expire(pull))
        self._holds.when_settled(pull.hold, lambda: self._settled(pull))

    # --- from the hold to the mover

    def _settled(self, pull: Pull) -> None:
        if pull.phase is not Phase.HOLDING:
            return
        hold = pull.hold
        if hold.learnt is not None:
            pull.phases_s["handshake"] = max(0.0, hold.learnt - pull.received)
        if hold.settled is not None:
            pull.phases_s["grant"] = max(0.0, hold.settled - max(hold.learnt or 0.0, pull.received))
        if hold.refusal is not None:
            self._refuse(pull, hold.refusal.code, hold.refusal.message)
            return
        self.post(pull)

    def post(self, pull: Pull) -> None:
        """Give a held pull to its rank's mover; without one it waits for the next bind."""
        hold = pull.hold
        assert hold.plan is not None and hold.granted is not None
        if pull.rank.mover is None or not pull.rank.is_readable:
            return
        try:
            check_request(hold.plan, pull.blocks, hold.granted.blocks, pull.num_tokens)
        except KvxferdError as error:
            self._refuse(pull, error.code, error.message)
            return
        if not any(packed.ids for packed in pull.blocks.values()):
            self._deliver(pull, PullOutcome(delivered=True))
            return
        pull.move(Signal.POST)
        pull.mover = pull.rank.mover
        pull.posted = self._moment.now
        self._holds.preload(hold)
        self._send(pull.mover, pull)

    def post_waiting(self, rank: LocalRank) -> None:
        """The rank has a mover again: post what waited for it."""
        for pull in list(self._pulls.values()):
            if pull.rank is rank and pull.phase is Phase.HOLDING and pull.hold.state is HoldState.HELD:
                self.post(pull)

    def _send(self, mover: MoverId, pull: Pull) -> None:
        hold = pull.hold
        assert hold.plan is not None and hold.granted is not None and hold.remote is not None
        bindings = [(rank, hold.remote.ranks[rank].binding) for rank in hold.plan.sources]
        # Two lists travel, each of which may need parts: one stream each.
        stream = 2 * pull.pull
        local_parts, local = split_ids(pull.blocks, stream)
        read = {lane.remote.group for lane in hold.plan.lanes}
        granted = {name: packed for name, packed in hold.granted.blocks.items() if name in read}
        remote_parts, remote = split_ids(granted, stream + 1)
        for part in (*local_parts, *remote_parts):
            self._moment.do(ToMover(mover, part))
        start = StartPull(
            pull=pull.pull,
            plan=hold.plan.digest,
            sources=tuple(Source(rank, binding.agent, binding.regions) for rank, binding in bindings),
            local=local,
            remote=remote,
            num_tokens=pull.num_tokens,
            fence=FencePlace(hold.granted.fence_agent, hold.granted.fence_address, hold.granted.fence_word),
            stream=stream,
        )
        self._moment.do(ToMover(mover, start))

    # --- how it ends

    def done(self, pull_id: PullId, mover: MoverId, outcome: PullOutcome) -> None:
        """The mover says that a pull ended for it."""
        pull = self._pulls.get(pull_id)
        if pull is None or pull.mover != mover:
            return
        pull.outcome = outcome
        self._take_times(pull, outcome)
        if outcome.delivered:
            self._deliver(pull, outcome)
        elif outcome.finished or not outcome.started:
            self._fail(pull, Signal.FINISH, outcome.code or Code.TRANSPORT, outcome.message)
        elif pull.can(Signal.FAULT):
            self._fail(pull, Signal.FAULT, outcome.code or Code.TRANSPORT, outcome.message)
        if outcome.agent is not None and outcome.code is Code.TRANSPORT:
            self._distrust(pull, outcome.agent)

    def quiet(self, pull_id: PullId, mover: MoverId) -> None:
        """The mover says that every handle of a pull in doubt is terminal now."""
        pull = self._pulls.get(pull_id)
        if pull is not None and pull.mover == mover and pull.phase is Phase.IN_DOUBT:
            self._fail(pull, Signal.FINISH, Code.TRANSPORT, "")

    def mover_died(self, mover: MoverId) -> None:
        """Nothing that it posted can write any more."""
        for pull in [p for p in self._pulls.values() if p.mover == mover]:
            self._fail(
                pull,
                Signal.FINISH,
                Code.MOVER_LOST,
                f"cannot pull transfer {pull.ref.transfer_id}: the rank's mover died; pull again",
            )

    def _deliver(self, pull: Pull, outcome: PullOutcome) -> None:
        if pull.move(Signal.DELIVER) is Phase.QUIET:
            self._quiesced(pull)
            return
        assert pull.phase is Phase.DELIVERED
        self._tell(
            pull,
            Delivered(ticket=pull.ticket, bytes=outcome.bytes, runs=outcome.runs, wire_s=outcome.wire_s),
        )
        ended = self._moment.now
        self._forget(pull)

        def acknowledged(_: bool) -> None:
            pull.phases_s["ack"] = self._moment.now - ended
            self._observe(pull, "delivered", None, "", ended)

        self._holds.acknowledge(pull.hold, acknowledged)

    def _refuse(self, pull: Pull, code: Code, message: str) -> None:
        self._fail(pull, Signal.REFUSE, code, message)

    def _fail(self, pull: Pull, signal: Signal, code: Code, message: str) -> None:
        was_stopping = pull.phase is Phase.STOPPING
        phase = pull.move(signal)
        if phase is Phase.QUIET:
            self._quiesced(pull)
            return
        if was_stopping and phase is Phase.FAILED:
            code, message = Code.CANCELLED, f"transfer {pull.ref.transfer_id}: the pull was cancelled"
        self._tell(
            pull,
            Failed(ticket=pull.ticket, code=code, message=message, safe_to_reuse=pull.blocks_are_free),
        )
        outcome = "cancelled" if code is Code.CANCELLED else "failed"
        self._observe(pull, outcome, code, message, self._moment.now)
        if phase is Phase.FAILED:
            self._forget(pull)
            self._holds.give_back(pull.hold)
            return
        assert phase is Phase.IN_DOUBT and pull.mover is not None
        mover = pull.mover
        self._moment.timers.stop(("deadline", pull.pull))
        self._moment.after(
            ("quiesce", pull.pull), self._moment.settings.quiesce_s, lambda: self._movers.kill(mover)
        )

    def _quiesced(self, pull: Pull) -> None:
        self._tell(pull, Quiesced(ticket=pull.ticket))
        self._forget(pull)
        self._holds.give_back(pull.hold)

    def _forget(self, pull: Pull) -> None:
        del self._pulls[pull.pull]
        self._moment.timers.stop(("deadline", pull.pull))
        self._moment.timers.stop(("quiesce", pull.pull))

    # --- stopping

    def cancel(self, rank: LocalRank, ticket: Ticket) -> None:
        """The engine wants the pull no more. Unknown tickets have ended already."""
        for pull in [p for p in self._pulls.values() if p.rank is rank and p.ticket == ticket]:
            self._cancel(pull)

    def cancel_pull(self, number: PullId) -> None:
        """The operator ends a pull. Unknown numbers have ended already."""
        if pull := self._pulls.get(number):
            self._cancel(pull)

    def can_cancel(self, number: PullId) -> bool:
        """Whether that pull has neither ended nor been cancelled."""
        return (pull := self._pulls.get(number)) is not None and pull.can(Signal.CANCEL)

    def cancel_transfer(self, rank: LocalRank, ref: TransferRef) -> None:
        """The engine abandons the transfer."""
        for pull in [p for p in self._pulls.values() if p.rank is rank and p.ref == ref]:
            self._cancel(pull)

    def _cancel(self, pull: Pull) -> None:
        if pull.phase is Phase.HOLDING:
            text = f"transfer {pull.ref.transfer_id}: the pull was cancelled"
            self._fail(pull, Signal.CANCEL, Code.CANCELLED, text)
        elif pull.can(Signal.CANCEL):
            pull.move(Signal.CANCEL)
            assert pull.mover is not None
            self._moment.do(ToMover(pull.mover, AbortPull(pull=pull.pull)))

    def _expire(self, pull: Pull) -> None:
        what = f"cannot pull transfer {pull.ref.transfer_id}"
        waited = f"its deadline of {pull.deadline - pull.received:.1f} s passed"
        if pull.phase is Phase.HOLDING:
            self._fail(pull, Signal.EXPIRE, Code.DEADLINE, f"{what}: {waited} in {pull.hold.state}")
            return
        assert pull.mover is not None
        self._moment.do(ToMover(pull.mover, AbortPull(pull=pull.pull)))
        self._fail(pull, Signal.EXPIRE, Code.DEADLINE, f"{what}: {waited} while it was read")

    def refuse_held(self, rank: LocalRank, code: Code, message: str) -> None:
        """Fail the rank's pulls that no mover has."""
        for pull in [p for p in self._pulls.values() if p.rank is rank and p.phase is Phase.HOLDING]:
            self._refuse(pull, code, f"cannot pull transfer {pull.ref.transfer_id}: {message}")

    def rank_gone(self, rank: LocalRank) -> None:
        """The worker is gone: nobody to tell, and its mover is being killed."""
        for pull in [p for p in self._pulls.values() if p.rank is rank]:
            self._forget(pull)
            self._holds.give_back(pull.hold)

    # --- telling

    def _tell(self, pull: Pull, message: Message) -> None:
        self._moment.do(ToWorker(pull.rank.session, message))

    def _distrust(self, pull: Pull, agent: AgentName) -> None:
        """A remote agent failed. What was loaded of it goes, unless others are reading from it."""
        assert pull.mover is not None
        self._holds.forget_engine(pull.hold)
        if not any(p.mover == pull.mover for p in self._pulls.values()):
            self._movers.drop_remote(pull.mover, agent)

    def _take_times(self, pull: Pull, outcome: PullOutcome) -> None:
        pull.phases_s |= {
            "queue": outcome.queue_s,
            "plan": outcome.expand_s,
            "post": outcome.post_s,
            "wire": outcome.wire_s,
            "fence": outcome.fence_s,
        }

    def _observe(self, pull: Pull, outcome: str, code: Code | None, message: str, ended: float) -> None:
        known = pull.outcome or PullOutcome(delivered=False)
        record = PullRecord(
            pull=pull.pull,
            transfer_id=pull.ref.transfer_id,
            source=pull.ref.engine_id,
            sink=pull.rank.spec.engine_id,
            rank=pull.rank.spec.rank,
            outcome=outcome,
            code=code,
            message=message,
            bytes=known.bytes,
            runs=known.runs,
            total_s=ended - pull.received,
            phases_s=pull.phases_s,
        )
        self._moment.do(Observed(record))

    def snapshot(self) -> tuple[PullSnapshot, ...]:
        """For people."""
        now = self._moment.now
        return tuple(
            PullSnapshot(
                pull=pull.pull,
                transfer_id=pull.ref.transfer_id,
                source=pull.ref.engine_id,
                sink=pull.rank.spec.engine_id,
                rank=pull.rank.spec.rank,
                phase=pull.hold.state if pull.phase is Phase.HOLDING else pull.phase,
                grant=pull.hold.grant,
                age_s=round(now - pull.received, 3),
                deadline_left_s=round(pull.deadline - now, 3),
            )
            for pull in self._pulls.values()
        )

    def check_integrity(self) -> None:
        """Raise AssertionError where the books contradict themselves."""
        for pull in self._pulls.values():
            assert not pull.blocks_are_free, f"pull {pull.pull} is over and still followed"
            assert (pull.mover is None) == (pull.phase is Phase.HOLDING), f"pull {pull.pull}: {pull.phase}"
            if pull.phase is not Phase.IN_DOUBT:
                assert ("deadline", pull.pull) in self._moment.timers, f"pull {pull.pull} has no deadline"
