"""Pulls of local ranks, from the request to the one terminal event, and to quiet if that was in doubt."""

from __future__ import annotations

from collections.abc import Mapping

from kvxferd.core.effects import Observed, ToMover, ToWorker
from kvxferd.core.holds import Hold, Holds, HoldState
from kvxferd.core.kept_ids import KeptIds, kept_bytes
from kvxferd.core.limits import Load
from kvxferd.core.moment import Moment
from kvxferd.core.movers import Movers
from kvxferd.core.pull import Phase, Pull, Signal
from kvxferd.core.registry import LocalRank, RankState
from kvxferd.core.snapshot import PullRecord, PullSnapshot
from kvxferd.core.stalls import Stalls
from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import AgentName, GroupName, MoverId, PullId, SessionId, Ticket
from kvxferd.layout import PackedBlocks
from kvxferd.plan import check_request
from kvxferd.wire.common import Message, TransferRef
from kvxferd.wire.ids_stream import split_ids
from kvxferd.wire.mover import AbortPull, FencePlace, PullOutcome, Source, StartPull
from kvxferd.wire.worker import Delivered, Failed, PullsInterrupted, PullsResumed, Quiesced

# A retry that has less time than this would end at the deadline, in doubt instead of safely failed.
RETRY_ROOM_S = 0.25
# Where the source cannot be asked again within this, it is gone for now, and the engine should know.
RETRY_WITHIN_S = 2.0
# A pull that ends each mover that reads it must not go through all that the node can make. Its own mover and
# the next may both be killed for the sake of others' blocks.
MAX_MOVERS_LOST = 2
FIRST_THAT_RESUMES = 2  # version of the worker protocol


class Pulls:
    """Every pull whose blocks are not free yet."""

    def __init__(self, moment: Moment, holds: Holds, movers: Movers, kept: KeptIds) -> None:
        self._moment = moment
        self._holds = holds
        self._movers = movers
        self._kept = kept
        self._pulls: dict[PullId, Pull] = {}
        # The same by session and ticket: a session with few pulls pays nothing for those of others.
        self._of_session: dict[SessionId, dict[Ticket, list[Pull]]] = {}
        self._last = 0
        self._last_interruption = 0
        self._load = Load(moment.settings.limits)
        self.stalls = Stalls(moment)

    def __len__(self) -> int:
        return len(self._pulls)

    @property
    def num_quarantined(self) -> int:
        """Pulls that failed and are not proven ended."""
        return sum(pull.phase is Phase.IN_DOUBT for pull in self._pulls.values())

    @property
    def quarantined_bytes(self) -> int:
        """The local memory of those pulls' blocks."""
        return sum(pull.local_bytes for pull in self._pulls.values() if pull.phase is Phase.IN_DOUBT)

    def next_id(self) -> PullId:
        """A pull number never used before."""
        self._last += 1
        return PullId(self._last)

    def check_room(self, rank: LocalRank, blocks: Mapping[GroupName, PackedBlocks], what: str) -> None:
        """Raise BusyError where a pull into these blocks would be one too many."""
        self._load.check(rank.session, rank.uid, rank.bytes_of(blocks), what)
        self._kept.check(rank.uid, kept_bytes(blocks), what)

    def start(self, pull: Pull) -> None:
        """Follow a pull whose hold has been asked for."""
        self._pulls[pull.pull] = pull
        self._of_session.setdefault(pull.rank.session, {}).setdefault(pull.ticket, []).append(pull)
        self._load.add(pull.rank.session, pull.rank.uid, pull.local_bytes)
        self._kept.add(pull.rank.uid, kept_bytes(pull.blocks))
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
            refusal = hold.refusal
            self._fail(pull, Signal.REFUSE, refusal.code, refusal.message, refusal.retry_after_s)
            return
        self._let_go_of_former(pull)
        self.post(pull)

    def post(self, pull: Pull) -> None:
        """Give a held pull to its rank's mover; without one it waits for the next bind."""
        hold = pull.hold
        assert hold.plan is not None and hold.granted is not None
        mover = pull.rank.mover
        if mover is None or not pull.rank.is_readable or pull.awaits_worker or not self._movers.works(mover):
            return
        try:
            check_request(hold.plan, pull.blocks, hold.granted.blocks, pull.num_tokens)
            self._holds.preload(hold)
        except KvxferdError as error:
            self._refuse(pull, error.code, error.message)
            return
        if not any(packed.ids for packed in pull.blocks.values()):
            self._deliver(pull, PullOutcome(delivered=True))
            return
        pull.move(Signal.POST)
        pull.mover = mover
        pull.posted = self._moment.now
        self._send(mover, pull)

    def post_waiting(self, rank: LocalRank) -> None:
        """The rank has a mover again: post what waited for it."""
        for pull in self._asked_by(rank):
            if pull.phase is Phase.HOLDING and not pull.awaits_worker:
                self._go_on(pull)

    def _go_on(self, pull: Pull) -> None:
        """Post a pull that waited for a mover. Where the source has ended its grant since, ask anew."""
        if pull.hold.state is HoldState.HELD:
            self.post(pull)
        elif pull.hold.state is not HoldState.ENDED:
            return  # it is asked for, and posted when it is settled
        elif pull.deadline - self._moment.now > RETRY_ROOM_S:
            self._hold_anew(pull, Code.MOVER_LOST, _mover_lost(pull))
        else:
            self._refuse(pull, Code.MOVER_LOST, _mover_lost(pull))

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
            ticket=pull.ticket,
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
            if self._can_retry(pull, outcome):
                self._retry(pull, mover, outcome)
                return
            self._fail(pull, Signal.FINISH, outcome.code or Code.TRANSPORT, outcome.message)
        elif pull.can(Signal.FAULT):
            self._fail(pull, Signal.FAULT, outcome.code or Code.TRANSPORT, outcome.message)
            if not outcome.quiet_follows:
                self._moment.timers.stop(("quiesce", pull.pull))
                self._retire(pull, mover)
        if outcome.agent is not None and outcome.code is Code.TRANSPORT:
            self._distrust(pull.hold, mover, outcome.agent)

    def _can_retry(self, pull: Pull, outcome: PullOutcome) -> bool:
        """Whether the engine need not hear of a failure yet. Only where nothing writes any more."""
        return (
            outcome.code is Code.TRANSPORT
            and pull.can(Signal.RETRY)
            and not pull.retried
            and pull.deadline - self._moment.now > RETRY_ROOM_S
        )

    def _retry(self, pull: Pull, mover: MoverId, outcome: PullOutcome) -> None:
        """Read once more: engine, grant and connection anew, as whoever failed may have been replaced.

        The new hold is taken before the old one is given back, so that the source never sees the
        transfer without a reader.
        """
        pull.move(Signal.RETRY)
        pull.retried, pull.mover = True, None
        if outcome.agent is not None:
            self._distrust(pull.hold, mover, outcome.agent)
        self._hold_anew(pull, outcome.code or Code.TRANSPORT, outcome.message)
        self._movers.reconsider(mover)

    def _hold_anew(self, pull: Pull, code: Code, message: str) -> None:
        left_s = pull.deadline - self._moment.now
        pull.former, pull.hold = pull.hold, self._holds.take(pull.rank, pull.ref, left_s)
        self._moment.after(
            ("retry", pull.pull),
            min(RETRY_WITHIN_S, left_s - RETRY_ROOM_S / 2),
            lambda: self._refuse(pull, code, message),
        )
        self._holds.when_settled(pull.hold, lambda: self._settled(pull))

    def _let_go_of_former(self, pull: Pull) -> None:
        self._moment.timers.stop(("retry", pull.pull))
        former, pull.former = pull.former, None
        if former is not None:
            self._holds.give_back(former)

    def quiet(self, pull_id: PullId, mover: MoverId) -> None:
        """The mover says that every handle of a pull in doubt is terminal now."""
        pull = self._pulls.get(pull_id)
        if pull is not None and pull.mover == mover and pull.phase is Phase.IN_DOUBT:
            self._fail(pull, Signal.FINISH, Code.TRANSPORT, "")

    def mover_died(self, mover: MoverId) -> None:
        """Nothing that it posted can write any more: what has time left is read again by the next one."""
        interrupted: dict[SessionId, list[Ticket]] = {}
        self._last_interruption += 1
        for pull in [p for p in self._pulls.values() if p.mover == mover]:
            if pull.arrived:
                self._deliver(pull, PullOutcome(delivered=True, told=True))
            elif not self._can_move_on(pull):
                self._fail(pull, Signal.FINISH, Code.MOVER_LOST, _mover_lost(pull))
            else:
                self._move_on(pull)
                if pull.awaits_worker:
                    interrupted.setdefault(pull.rank.session, []).append(pull.ticket)
        for session, tickets in interrupted.items():
            self._moment.do(
                ToWorker(session, PullsInterrupted(number=self._last_interruption, tickets=tuple(tickets)))
            )

    def _can_move_on(self, pull: Pull) -> bool:
        rank = pull.rank
        return (
            pull.can(Signal.RETRY)
            and pull.num_movers_lost < MAX_MOVERS_LOST
            and pull.deadline - self._moment.now > RETRY_ROOM_S
            and rank.state not in (RankState.SUSPENDING, RankState.SUSPENDED)
            and (not rank.notices or rank.version >= FIRST_THAT_RESUMES)
        )

    def _move_on(self, pull: Pull) -> None:
        """Have the pull wait for its rank's next mover.

        Where movers speak to the worker themselves, this one may have said Delivered, and the engine
        may use the blocks: only the worker knows.
        """
        pull.move(Signal.RETRY)
        pull.num_movers_lost += 1
        pull.mover = None
        pull.interruption = self._last_interruption if pull.rank.notices else 0
        if pull.hold.state is HoldState.HELD:
            self.post(pull)
        else:
            self._hold_anew(pull, Code.MOVER_LOST, _mover_lost(pull))

    def resumed(self, rank: LocalRank, said: PullsResumed) -> None:
        """The worker says which pulls of one interruption have not ended for it, and of no other."""
        again, arrived = set(said.tickets), set(said.arrived)
        asked = [p for p in self._asked_by(rank) if p.awaits_worker and p.interruption == said.number]
        for pull in asked:
            pull.interruption = 0
            if pull.phase is not Phase.HOLDING:
                continue
            if pull.ticket in arrived:
                self._deliver(pull, PullOutcome(delivered=True, told=True))
            elif pull.ticket not in again:
                self._refuse(pull, Code.MOVER_LOST, _mover_lost(pull))
            else:
                self._go_on(pull)

    def runs_on(self, mover: MoverId) -> bool:
        """Whether a pull of that mover has not ended, other than in doubt."""
        running = (Phase.POSTED, Phase.STOPPING)
        return any(pull.mover == mover and pull.phase in running for pull in self._pulls.values())

    def _deliver(self, pull: Pull, outcome: PullOutcome) -> None:
        if pull.move(Signal.DELIVER) is Phase.QUIET:
            self._quiesced(pull)
            return
        assert pull.phase is Phase.DELIVERED
        if not outcome.told:
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

    def _fail(self, pull: Pull, signal: Signal, code: Code, message: str, retry_after_s: float = 0.0) -> None:
        was_stopping = pull.phase is Phase.STOPPING
        phase = pull.move(signal)
        if phase is Phase.QUIET:
            self._quiesced(pull)
            return
        if was_stopping and phase is Phase.FAILED:
            code, message = Code.CANCELLED, f"transfer {pull.ref.transfer_id}: the pull was cancelled"
        failed = Failed(
            ticket=pull.ticket,
            code=code,
            message=message,
            safe_to_reuse=pull.blocks_are_free,
            retry_after_s=retry_after_s,
        )
        self._tell(pull, failed)
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
            ("quiesce", pull.pull), self._moment.settings.quiesce_s, lambda: self._retire(pull, mover)
        )
        self._movers.reconsider(mover)

    def _retire(self, pull: Pull, mover: MoverId) -> None:
        """Only the mover's death ends the doubt. Its other pulls end first; another takes what is new."""
        if self._movers.works(mover):
            self.stalls.note(pull.rank.uid, pull.ref)
        self._movers.retire(mover)

    def _quiesced(self, pull: Pull) -> None:
        self._tell(pull, Quiesced(ticket=pull.ticket))
        self._forget(pull)
        self._holds.give_back(pull.hold)

    def _forget(self, pull: Pull) -> None:
        del self._pulls[pull.pull]
        tickets = self._of_session[pull.rank.session]
        tickets[pull.ticket].remove(pull)
        if not tickets[pull.ticket]:
            del tickets[pull.ticket]
        if not tickets:
            del self._of_session[pull.rank.session]
        self._load.remove(pull.rank.session, pull.rank.uid, pull.local_bytes)
        self._kept.remove(pull.rank.uid, kept_bytes(pull.blocks))
        pull.blocks = {}  # its acknowledgement may wait two minutes for an answer
        self._moment.timers.stop(("deadline", pull.pull))
        self._moment.timers.stop(("quiesce", pull.pull))
        self._let_go_of_former(pull)
        self._movers.reconsider(pull.mover)

    def noticed(self, rank: LocalRank, tickets: tuple[Ticket, ...]) -> None:
        """The worker has these bytes, by its mover's word, which has not come here or never will."""
        for ticket in tickets:
            for pull in self._asked_by(rank, ticket):
                # To an engine that was told of a failure, it was no delivery.
                if pull.phase in (Phase.POSTED, Phase.STOPPING):
                    pull.arrived = True
                elif pull.awaits_worker and pull.phase is Phase.HOLDING:
                    self._deliver(pull, PullOutcome(delivered=True, told=True))

    def _asked_by(self, rank: LocalRank, ticket: Ticket | None = None) -> list[Pull]:
        """Return the rank's pulls: of one ticket, or all."""
        tickets = self._of_session.get(rank.session, {})
        found = tickets.values() if ticket is None else [tickets.get(ticket, [])]
        return [pull for pulls in found for pull in pulls if pull.rank is rank]

    # --- stopping

    def cancel(self, rank: LocalRank, ticket: Ticket) -> None:
        """The engine wants the pull no more. Unknown tickets have ended already."""
        for pull in self._asked_by(rank, ticket):
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
        for pull in [p for p in self._asked_by(rank) if p.ref == ref]:
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
            self._fail(
                pull, Signal.EXPIRE, Code.DEADLINE, f"{what}: {waited} {self._holds.describe_wait(pull.hold)}"
            )
            return
        assert pull.mover is not None
        self._moment.do(ToMover(pull.mover, AbortPull(pull=pull.pull)))
        self._fail(pull, Signal.EXPIRE, Code.DEADLINE, f"{what}: {waited} while it was read")

    def refuse_held(self, rank: LocalRank, code: Code, message: str) -> None:
        """Fail the rank's pulls that no mover has."""
        for pull in [p for p in self._asked_by(rank) if p.phase is Phase.HOLDING]:
            self._refuse(pull, code, f"cannot pull transfer {pull.ref.transfer_id}: {message}")

    def rank_gone(self, rank: LocalRank) -> None:
        """The worker is gone: nobody to tell, and its mover is being killed."""
        for pull in self._asked_by(rank):
            self._forget(pull)
            if pull.arrived and pull.phase is not Phase.IN_DOUBT:
                self._holds.acknowledge(pull.hold, lambda _: None)
            else:
                self._holds.give_back(pull.hold)

    # --- telling

    def _tell(self, pull: Pull, message: Message) -> None:
        self._moment.do(ToWorker(pull.rank.session, message))

    def _distrust(self, hold: Hold, mover: MoverId, agent: AgentName) -> None:
        """A remote agent failed. What was loaded of it goes, unless others are reading from it."""
        self._holds.forget_engine(hold)
        if not any(pull.mover == mover for pull in self._pulls.values()):
            self._movers.drop_remote(mover, agent)

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
            retried=pull.retried or pull.num_movers_lost > 0,
        )
        self._moment.do(Observed(record))

    def running(self) -> list[Pull]:
        """Those that have not ended."""
        return list(self._pulls.values())

    def show(self, pull: Pull) -> PullSnapshot:
        """For people."""
        now = self._moment.now
        return PullSnapshot(
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

    def snapshot(self) -> tuple[PullSnapshot, ...]:
        """All of them."""
        return tuple(map(self.show, self.running()))

    def check_integrity(self) -> None:
        """Raise AssertionError where the books contradict themselves."""
        indexed = [p.pull for of in self._of_session.values() for pulls in of.values() for p in pulls]
        assert sorted(indexed) == sorted(self._pulls), "pulls are not found by their session and ticket"
        for pull in self._pulls.values():
            assert not pull.blocks_are_free, f"pull {pull.pull} is over and still followed"
            assert (pull.mover is None) == (pull.phase is Phase.HOLDING), f"pull {pull.pull}: {pull.phase}"
            if pull.phase is not Phase.IN_DOUBT:
                assert ("deadline", pull.pull) in self._moment.timers, f"pull {pull.pull} has no deadline"


def _mover_lost(pull: Pull) -> str:
    return f"cannot pull transfer {pull.ref.transfer_id}: the rank's mover died; pull again"
