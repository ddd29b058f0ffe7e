"""Local ranks: from a worker's registration to a bound mover, and back."""

from __future__ import annotations

from collections.abc import Callable

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import (
    BindMover,
    CloseWorkerConnection,
    CommitRegionFds,
    SendToWorker,
)
from kvxferd.core.peers.manifest_checks import check_names, check_spec
from kvxferd.core.ranks.member import Member
from kvxferd.core.ranks.mover_pool import MoverPool
from kvxferd.core.ranks.movers import Mover, Movers, MoverState
from kvxferd.core.ranks.owners import user_owner
from kvxferd.core.ranks.placements import record_placement
from kvxferd.core.ranks.rank import LocalRank, OnRankChange, RankChange, RankState, RankTrigger
from kvxferd.core.ranks.registration_checks import (
    RegistrationChecks,
    check_exports,
    check_is_new,
    check_problem,
)
from kvxferd.core.ranks.registry import Registry
from kvxferd.core.ranks.session import Session
from kvxferd.errors import Code, EngineError, ProtocolError
from kvxferd.ids import EngineKey, MoverId
from kvxferd.layout.validate import validate_layout
from kvxferd.wire.common import MeasuredPlacement, Refusal
from kvxferd.wire.mover import Bind, Bound, DevicePlacement, ReadWay
from kvxferd.wire.worker import (
    Attach,
    Farewell,
    FdsRequest,
    MoverAcknowledged,
    MoverChanged,
    MoverOffered,
    MoverRequest,
    Refused,
    Register,
    Registered,
    Resume,
    Suspended,
)

# The client's thread acknowledges within milliseconds, unless something holds the interpreter's lock: the
# capture of a CUDA graph has taken seconds. A worker that is stopped for longer loses a mover, then its
# session.
OFFER_TIMEOUT_S = 10.0
MAX_UNACKNOWLEDGED = 3
OFFER_RETRY_S = 0.5  # after which an offer is sent again, where the daemon had no descriptor for the pidfd
REBIND_AFTER_S = 0.5  # movers that die at once, again and again, must not keep the node busy


class LocalRanks:
    """Claims ranks, binds movers to them, and releases both. `Node` calls it for each event."""

    def __init__(
        self,
        context: NodeContext,
        registry: Registry,
        movers: Movers,
        mover_pool: MoverPool,
        member: Member,
        on_change: OnRankChange,
    ) -> None:
        self._context = context
        self._registry = registry
        self._movers = movers
        self._mover_pool = mover_pool
        self._member = member
        self._on_change = on_change
        self._checks = RegistrationChecks(context, registry)

    # --- requests of a worker

    def register(
        self, session: Session, message: Register, problem: Refusal | None, awaits_fds: bool = False
    ) -> None:
        """Claim the rank and find a mover for it. Raises KvxferdError: refused, which ends no session.

        If the frame announced more descriptors than it carried, `FdsRequest` requests them from the worker
        once all else is valid.
        """
        check_problem(problem)
        self._checks.check_room(session)
        spec = check_spec(message.engine, message.incarnation)
        if not self._registry.is_home(spec):
            self._context.allowlist.check(spec.home)
        validate_layout(spec, message.layout)
        check_exports(message.layout, message.regions)
        self._checks.check_owner(session, spec.engine_id)
        self._checks.check_start(session, spec.key)
        rank = LocalRank(
            session.session_id,
            spec,
            message.layout,
            message.regions,
            message.incarnation,
            message.request,
            uid=session.uid,
            pid=session.pid,
            resident=message.placement == "resident",
        )
        self._registry.check_absent_owner(spec)
        self._registry.check_claim(rank)
        self._checks.count_mover_start(session, "register")
        self._registry.claim(rank)
        session.rank = rank
        self._on_change(RankChange.REGISTERED, rank)
        if awaits_fds:
            self._move(rank, RankTrigger.NEED_FDS)
            self._context.emit(SendToWorker(session.session_id, FdsRequest(request=message.request)))
            return
        self._map(session, rank)

    def _move(self, rank: LocalRank, trigger: RankTrigger) -> None:
        """Take the rank to its next state. The timer of the former one is void: a rank has one at a time."""
        rank.move(trigger)
        self._context.timers.cancel(("rank", rank.session))

    def fds_arrived(self, session: Session, problem: Refusal | None) -> None:
        """Continue a registration whose announced descriptors have arrived."""
        rank = session.rank
        if rank is None or rank.state is not RankState.AWAITING_FDS:
            return
        self._move(rank, RankTrigger.FDS_ARRIVED)
        if problem is not None:
            self._refuse_or_close(session, problem)
        else:
            self._map(session, rank)

    def _map(self, session: Session, rank: LocalRank) -> None:
        self._context.emit(CommitRegionFds(rank.session))
        self._request_mover(session, rank)

    def _request_mover(self, session: Session, rank: LocalRank) -> None:
        if rank.resident:
            self._mover_pool.request_resident(session.session_id)
        else:
            self._mover_pool.request(session.session_id)

    def attach(self, session: Session, message: Attach) -> Registered:
        """Let the session publish for an engine. Return the reply. Raises EngineError: refused."""
        check_names("attach", message.engine_id, message.generation)
        self._checks.check_owner(session, message.engine_id)
        self._checks.check_publisher(session, message.engine_id)
        session.attached = EngineKey(message.engine_id, message.generation)
        return Registered(request=message.request, endpoint=self._context.endpoint)

    # --- the mover is bound

    def mover_assigned(self, session: Session | None, mover: Mover, library: str) -> None:
        """Bind the mover to the session's rank, or kill it if the rank does not need one any more."""
        self._movers.add(mover)
        rank = session.rank if session is not None else None
        is_awaited = rank is not None and rank.state is RankState.MAPPING and rank.resident is mover.resident
        if session is None or rank is None or not is_awaited:  # one from before a suspend may come late
            self._movers.kill(mover.mover_id)
            return
        rank.mover, rank.agent, rank.library = mover.mover_id, mover.agent, library
        mover.engine = rank.spec.key
        rank.placement, rank.transports_used = MeasuredPlacement(), ()
        if mover.resident:
            self._bind(rank)
            return
        session.num_offers += 1
        self._move(rank, RankTrigger.OFFER)
        self._offer(session, rank)

    def _offer(self, session: Session, rank: LocalRank) -> None:
        """Have the worker watch the mover. Until it does, the mover gets no memory and no pull.

        Otherwise the worker could lose this daemon before it learns of the mover, find all movers that it
        watches dead, and reuse its memory while this mover writes.
        """
        offered = MoverOffered(number=session.num_offers)
        self._context.emit(SendToWorker(rank.session, offered, pidfd_of=rank.mover))
        self._set_timer(rank, OFFER_TIMEOUT_S, lambda: self._offer_timed_out(session, rank))

    def _set_timer(self, rank: LocalRank, after_s: float, callback: Callable[[], None]) -> None:
        self._context.after(("rank", rank.session), after_s, callback)

    def mover_acknowledged(self, session: Session, message: MoverAcknowledged) -> None:
        """Bind the mover that the worker watches now. A late or second acknowledgement changes nothing.

        Raises ProtocolError for a number that was never offered.
        """
        if not 0 < message.number <= session.num_offers:
            raise ProtocolError(
                f"mover {message.number} was never offered to this session", Code.OUT_OF_PLACE
            )
        rank = session.local_rank
        if rank.state is not RankState.OFFERED or message.number != session.num_offers:
            return
        rank.num_unacknowledged = 0
        self._bind(rank)

    def _offer_timed_out(self, session: Session, rank: LocalRank) -> None:
        assert rank.mover is not None
        rank.num_unacknowledged += 1
        if rank.num_unacknowledged < MAX_UNACKNOWLEDGED:
            self._movers.kill(rank.mover)
            return
        text = (
            f"cannot bind a mover: {rank.num_unacknowledged} were offered, and none was acknowledged within "
            f"{OFFER_TIMEOUT_S:g} s; let the client's thread run, and connect again"
        )
        farewell = Farewell(code=Code.DEADLINE, message=text)
        self._context.emit(CloseWorkerConnection(session.session_id, farewell))

    def pidfd_not_sent(self, session: Session, mover: MoverId) -> None:
        """Offer the mover again: the worker has not received its pidfd."""
        rank = session.rank
        if rank is not None and rank.state is RankState.OFFERED and rank.mover == mover:
            self._set_timer(rank, OFFER_RETRY_S, lambda: self._offer(session, rank))

    def _bind(self, rank: LocalRank) -> None:
        self._move(rank, RankTrigger.BIND)
        assert rank.mover is not None
        settings = self._context.settings
        bind = Bind(
            regions=rank.exports,
            read_way=ReadWay.DIRECT if rank.resident else settings.read_way,
            device_placement=DevicePlacement.DIRECT if rank.resident else settings.device_placement,
        )
        self._context.emit(BindMover(rank.mover, rank.session, bind))

    def mover_unavailable(self, session: Session, refusal: Refusal) -> None:
        """Refuse the registration, or close a session that is registered: no mover is available."""
        if session.rank is not None and session.rank.state is RankState.MAPPING:
            self._refuse_or_close(session, refusal)

    def bound(self, session: Session, message: Bound) -> None:
        """Make the rank ready, or join it at its home: its memory is mapped and registered with NIXL."""
        rank = session.local_rank
        mapped = {address.region: address.size_bytes for address in message.regions}
        if mapped != {region.region: region.size_bytes for region in rank.layout.regions}:
            self._refuse_or_close(
                session, Refusal(Code.INTERNAL, "cannot use the mover: it mapped other regions")
            )
            return
        rank.set_bound(message.regions, message.metadata)
        record_placement(self._context, rank, message.placement)
        if self._registry.is_home(rank.spec):
            self._make_ready(session, rank)
            return
        self._move(rank, RankTrigger.JOIN)
        self._member.join(rank)

    def joined(self, session: Session, refusal: Refusal | None) -> None:
        """Make the session's rank ready, whose home has taken it; or refuse it."""
        rank = session.local_rank  # one that has left gets no reply
        if rank.state is not RankState.JOINING:
            return
        if refusal is None:
            self._make_ready(session, rank)
            return
        code = Code.HOME_UNREACHABLE if refusal.code is Code.PEER_UNREACHABLE else refusal.code
        self._refuse_or_close(session, Refusal(code, refusal.message, refusal.retry_after_s))

    def _make_ready(self, session: Session, rank: LocalRank) -> None:
        self._move(rank, RankTrigger.READY)
        # Its user owns the engine: ranks that are kept for other generations are given up.
        self._registry.owners.forget_absent(rank.spec.engine_id, excluding=rank.spec.key)
        self._registry.owners.set_present(rank.spec.key, rank.spec.rank, user_owner(rank.uid))
        self._send_registered(rank)
        self._on_change(RankChange.READY, rank)

    def _send_registered(self, rank: LocalRank) -> None:
        if rank.request is None:
            self._context.emit(SendToWorker(rank.session, MoverChanged()))
            return
        registered = Registered(request=rank.request, endpoint=rank.spec.home or self._context.endpoint)
        # With the first one goes the session's fence page.
        effect = SendToWorker(rank.session, registered, with_fence_page=not rank.was_registered)
        rank.request, rank.was_registered = None, True
        self._context.emit(effect)

    def _refuse_or_close(self, session: Session, refusal: Refusal) -> None:
        """Refuse a request that waits for its reply. Close the session of a rank that had its reply.

        A rank that was to be registered goes. One that was to be resumed stays suspended, and may try again.
        """
        rank = session.local_rank
        if rank.request is None:
            farewell = Farewell(code=refusal.code, message=refusal.message)
            self._context.emit(CloseWorkerConnection(session.session_id, farewell))
            return
        refused = Refused(rank.request, refusal.code, refusal.message, refusal.retry_after_s)
        rank.request = None
        if rank.was_registered:
            self._suspend(session, rank, refused)
        else:
            self._remove(session, rank)
            self._reply_once_unmapped(session, refused)

    def _reply_once_unmapped(self, session: Session, *replies: Refused | Suspended) -> None:
        """Send these, and those that wait, once no mover of the session lives: it may unmap its memory then.

        A mover that was replaced counts too: unmapping memory under a live mover kills the worker.
        """
        session.replies_once_unmapped += replies
        if self._movers.has_mover(session.session_id):
            return
        if session.rank is not None and session.rank.state is RankState.SUSPENDING:
            self._move(session.rank, RankTrigger.MOVERS_DEAD)
        for reply in session.replies_once_unmapped:
            self._context.emit(SendToWorker(session.session_id, reply))
        session.replies_once_unmapped = []

    def bind_refused(self, session: Session, mover: Mover, refusal: Refusal) -> None:
        """Refuse a rank whose memory the mover cannot map or register, or make room for another try.

        While a retired mover lives, a GPU may have no memory for a second context. Then the retired mover is
        killed at once, and the next one reads its pulls again.
        """
        if self._movers.kill_others(mover):
            self._movers.kill(mover.mover_id)
        else:
            self._refuse_or_close(session, refusal)

    # --- the mover leaves

    def mover_left(self, session: Session, mover: Mover) -> None:
        """Find another mover for the rank, which this one serves no more."""
        rank = session.local_rank
        # Readers continue to read from a retired mover. The home learns of the next one by its join, or of
        # this one's death if that comes first.
        is_retired = mover.state is MoverState.RETIRED
        if not is_retired:
            self._member.leave(rank)
        self._move(rank, RankTrigger.MOVER_LEFT)
        delay_s = 0.0 if is_retired else REBIND_AFTER_S
        self._set_timer(rank, delay_s, lambda: self._rebind(session, rank))

    def _rebind(self, session: Session, rank: LocalRank) -> None:
        """Find another mover, within the user's rate of started movers."""
        wait_s = self._checks.mover_starts.acquire(rank.uid, self._context.now)
        if wait_s > 0:
            self._set_timer(rank, max(wait_s, REBIND_AFTER_S), lambda: self._rebind(session, rank))
        elif rank.resident:  # only the worker can start one
            self._move(rank, RankTrigger.REQUEST_RESIDENT)
            self._context.emit(SendToWorker(rank.session, MoverRequest()))
        else:
            self._move(rank, RankTrigger.REQUEST_MOVER)
            self._request_mover(session, rank)

    def mover_died(self, session: Session, mover: Mover) -> None:
        """Continue what waits for this death, or report a retired mover's death to the home."""
        self._reply_once_unmapped(session)
        if session.rank is not None and session.rank.joined == mover.agent:
            self._member.leave(session.rank)

    def resident_mover_started(self, session: Session) -> None:
        """Bind another resident mover that the worker has started. A late one ends with its socket."""
        rank = session.local_rank
        if rank.state is RankState.AWAITING_WORKER:
            self._move(rank, RankTrigger.REQUEST_MOVER)
            self._request_mover(session, rank)

    # --- sleep

    def suspend(self, session: Session) -> None:
        """Release the rank's memory. `Suspended` follows once all its movers are dead."""
        rank = session.local_rank
        if rank.is_asleep:
            return
        self._suspend(session, rank, Suspended())

    def _suspend(self, session: Session, rank: LocalRank, reply: Suspended | Refused) -> None:
        self._on_change(RankChange.ASLEEP, rank)
        self._end_movers(rank, RankTrigger.SUSPEND)
        self._reply_once_unmapped(session, reply)

    def _end_movers(self, rank: LocalRank, trigger: RankTrigger) -> None:
        self._member.leave(rank)
        self._member.forget_reports(rank)
        self._movers.kill_all(rank.session)
        self._move(rank, trigger)

    def resume(self, session: Session, message: Resume, problem: Refusal | None) -> None:
        """Find a mover for the memory, which is back in another mapping. Raises KvxferdError: refused."""
        rank = session.local_rank
        check_problem(problem)
        if rank.state is not RankState.SUSPENDED:
            raise EngineError("cannot resume: the rank is not suspended", Code.OUT_OF_PLACE)
        check_exports(rank.layout, message.regions)
        check_is_new(rank, message.incarnation)
        self._checks.count_mover_start(session, "resume")
        rank.exports, rank.incarnation, rank.request = message.regions, message.incarnation, message.request
        rank.resident = message.placement == "resident"
        self._move(rank, RankTrigger.RESUME)
        self._on_change(RankChange.MAPPED, rank)
        self._map(session, rank)

    # --- the worker leaves

    def session_closed(self, session: Session) -> None:
        """Release the session's rank."""
        if session.rank is not None:
            self._remove(session, session.rank)

    def _remove(self, session: Session, rank: LocalRank) -> None:
        self._on_change(RankChange.GONE, rank)
        self._registry.remove(rank)
        self._registry.owners.rank_gone(rank.spec.key, rank.spec.rank)
        self._end_movers(rank, RankTrigger.CLOSE)
        session.rank = None
