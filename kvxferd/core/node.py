"""One node's decisions: events in, effects out. It creates the other parts of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import assert_never

from kvxferd.core import events
from kvxferd.core.context import CALLS_PER_EVENT, CALLS_PER_TICK, NodeContext
from kvxferd.core.effects import (
    CloseWorkerConnection,
    Effect,
    ReplyToPeer,
    SendToMover,
    SendToWorker,
)
from kvxferd.core.limits.ledger import Charge
from kvxferd.core.limits.table import (
    ARRIVING_ID_BYTES,
    BLOCK_ID_BYTES,
    INFLIGHT_BYTES,
    PEERS,
    RANKS,
    WAITING_BYTES,
)
from kvxferd.core.peers.manifest_checks import LayoutCache
from kvxferd.core.peers.peers import Peer, Peers
from kvxferd.core.peers.requests import OpenRequest, PeerRequests
from kvxferd.core.peers.routes import PeerRoutes
from kvxferd.core.ranks.chunk_memory import ChunkMemory
from kvxferd.core.ranks.home import Home
from kvxferd.core.ranks.local_ranks import LocalRanks
from kvxferd.core.ranks.member import Member
from kvxferd.core.ranks.mover_pool import MoverPool
from kvxferd.core.ranks.movers import Mover, Movers, MoverState
from kvxferd.core.ranks.owners import Disownable, Owners
from kvxferd.core.ranks.placements import record_placement, record_transports
from kvxferd.core.ranks.polling import PollRequests
from kvxferd.core.ranks.rank import LocalRank, RankChange, RankRecord, RankState
from kvxferd.core.ranks.registry import Registry
from kvxferd.core.ranks.session import Session
from kvxferd.core.settings import Settings
from kvxferd.core.sink.grants import GrantClient
from kvxferd.core.sink.held_grant import HeldGrant
from kvxferd.core.sink.manifests import EngineFetch, HandshakeClient
from kvxferd.core.sink.pull import Pull, PullPhase
from kvxferd.core.sink.pulls import Pulls
from kvxferd.core.source.fence_pages import FencePages
from kvxferd.core.source.grants import GrantServer
from kvxferd.core.source.manifests import HandshakeServer
from kvxferd.core.source.publishing import PublishedTransfers
from kvxferd.core.source.rank_reports import RankReports
from kvxferd.core.source.waiting import PollingOf, WaitingRequests
from kvxferd.core.views.node_view import engine_snapshots, list_pulls, list_transfers
from kvxferd.core.worker_requests import WorkerRequests
from kvxferd.errors import Code, EngineError, KvxferdError, ProtocolError
from kvxferd.ids import AgentName, BootId, Endpoint, EngineId, MoverId, SessionId
from kvxferd.records import EngineSnapshot, LimitSnapshot, NodeSnapshot
from kvxferd.ucx_log import TransportsUsed
from kvxferd.wire import mover as mover_wire
from kvxferd.wire import peer as peer_wire
from kvxferd.wire import worker as worker_wire
from kvxferd.wire.block_id_parts import BlockIdAssembly
from kvxferd.wire.codec import negotiate_version
from kvxferd.wire.common import BlockIds, FdBatch, Refusal
from kvxferd.wire.endpoint import key_of, parse_endpoint
from kvxferd.wire.limits import MAX_REQUEST_IDS_BYTES
from kvxferd.wire.outlines import JoinRankOutline

LOST_CHUNKS_CHECK_S = 5.0  # between two looks at whether a mover with lost chunks is idle


class Node:
    """A whole daemon without its sockets, processes and clocks.

    `new_token` returns 32 random hex digits; a test gives a deterministic one.
    """

    def __init__(
        self,
        *,
        boot: BootId,
        endpoint: Endpoint,
        settings: Settings | None = None,
        new_token: Callable[[], str],
    ) -> None:
        context = self.context = NodeContext(
            boot=boot, endpoint=endpoint, settings=settings or Settings(), new_token=new_token
        )
        self.sessions: dict[SessionId, Session] = {}
        self.owners = Owners(context)
        registry = self.registry = Registry(context, self.owners)
        self.movers = Movers(context, self._detach_mover, self._is_mover_needed)
        self.mover_pool = MoverPool(
            context, self.movers, lambda: len(self.pulls) > 0, self._mover_assigned, self._mover_refused
        )
        self.chunk_memory = ChunkMemory(context, context.settings.limits.staging_bytes)
        self.fence_pages = FencePages(context, registry, self.sessions)
        requests = self.peer_requests = PeerRequests(context, self._request_settled)
        self.layouts = LayoutCache()
        self.peer_routes = PeerRoutes()
        self.peers = Peers(context, requests)
        self.handshake_client = HandshakeClient(context, self.peers, requests, self.layouts)
        polling = self.poll_requests = PollRequests(context, self._request_polling)
        self.rank_reports = RankReports(context, registry, self.sessions)
        self.waiting = WaitingRequests(context, polling)
        self.published = PublishedTransfers(context, registry, polling, requests, self.waiting)
        self.grant_server = GrantServer(
            context, registry, self.published, self.waiting, polling, self.fence_pages, self.peer_routes
        )
        self.handshake_server = HandshakeServer(context, registry, self.waiting)
        self.home = Home(context, registry, requests, self.layouts, self._rank_changed, polling)
        self.member = Member(context, registry, self.peers, requests, polling)
        self.member.on_joined = self._rank_joined
        self.grant_client = GrantClient(context, self.peers, requests, self.handshake_client, self.movers)
        self.pulls = Pulls(context, self.grant_client, self.movers)
        self.local_ranks = LocalRanks(
            context, registry, self.movers, self.mover_pool, self.member, self._rank_changed
        )
        self.worker_requests = WorkerRequests(
            context, registry, self.published, self.grant_client, self.pulls, self.peers, requests,
            self.member,
        )  # fmt: skip

    # --- the interface

    def feed(self, event: events.Event, now: float) -> list[Effect]:
        """Handle one event and the timers that are due at `now`, in seconds. Return the effects, in order."""
        self.context.now = max(now, self.context.now)
        self._handle(event)
        self.context.run_due(CALLS_PER_TICK if isinstance(event, events.Tick) else CALLS_PER_EVENT)
        return self.context.pop_effects()

    def next_deadline(self) -> float | None:
        """Return when to feed a `Tick` if no event comes before; None: there is no timer."""
        return self.context.next_deadline()

    @property
    def is_idle(self) -> bool:
        """Whether no pull and no published transfer is left, for which a drain would wait."""
        return not len(self.pulls) and not self.published.table.live

    def snapshot(self) -> NodeSnapshot:
        """Return the node's state after the last event. With many transfers use `snapshot_steps`."""
        return next(shown for shown in self.snapshot_steps() if shown is not None)

    def snapshot_steps(self) -> Iterator[NodeSnapshot | None]:
        """Yield None between steps, where events may be fed, then the state. It may mix old and new."""
        transfers = yield from list_transfers(self.published, self.registry, self.context)
        pulls = yield from list_pulls(self.pulls, self.context)
        num_grants = self.grant_client.num_grants()
        yield NodeSnapshot(
            boot=self.context.boot,
            endpoint=self.context.endpoint,
            draining=self.context.draining,
            num_sessions=len(self.sessions),
            num_quarantined=pulls.states[PullPhase.IN_DOUBT],
            quarantined_bytes=pulls.num_bytes,
            engines=self.engines_snapshot(),
            peers=self.peers.snapshot(num_grants),
            transfers=tuple(transfers.shown),
            pulls=tuple(pulls.shown),
            transfer_states=dict(transfers.states),
            published_bytes=transfers.num_bytes,
            oldest_published_s=round(transfers.oldest_s, 3),
            limits=self._limits_snapshot(),
            num_grants_given=transfers.num_grants,
            num_grants_held=sum(num_grants.values()),
            pull_phases=dict(pulls.states),
            num_retired_movers=self.movers.num_ending(),
            ownerships=self.owners.snapshot(),
        )

    def _limits_snapshot(self) -> tuple[LimitSnapshot, ...]:
        """Return each limit of the settings, and two that are none, beside what is used of it."""
        limits, ledger = self.context.settings.limits, self.context.ledger
        used = {
            "max_sessions": len(self.sessions),
            "max_ranks": ledger[RANKS].held,
            "max_transfers_per_engine": self.published.table.most_of_engine,
            "max_pulls_per_rank": self.pulls.most_of_rank,
            "max_inflight_bytes": ledger[INFLIGHT_BYTES].held,
            "max_peers": ledger[PEERS].held,
            "staging_bytes": self.chunk_memory.num_bytes,
        }
        of_settings = [
            LimitSnapshot(name=name, limit=getattr(limits, name), used=used[name]) for name in used
        ]
        others = [
            LimitSnapshot(name=row.name, limit=ledger[row].limit, used=ledger[row].held)
            for row in (BLOCK_ID_BYTES, WAITING_BYTES)
        ]
        return (*of_settings, *others)

    def engines_snapshot(self) -> tuple[EngineSnapshot, ...]:
        """Return the engines of which a rank is known here."""
        return engine_snapshots(self.registry, self.context.endpoint)

    def refusal_of_join(
        self, route: bytes, message: JoinRankOutline, key: str
    ) -> peer_wire.PeerRefused | None:
        """Return why a member's rank cannot be joined, whatever its layout; None: the layout decides."""
        return self.home.refusal_of_join(route, message, key)

    def disownable(self, engine_id: EngineId) -> Disownable:
        """Return what an engine id loses if the operator disowns it now."""
        uid = None if self.registry.has_local_rank(engine_id) else self.owners.user_of(engine_id)
        num_kept = self.owners.num_absent(engine_id) + self.home.num_silent(engine_id)
        return Disownable(uid, num_kept)

    def is_request_open(self, endpoint: Endpoint, request: int) -> bool:
        """Whether that request to the peer has no reply yet."""
        return self.peer_requests.is_open(endpoint, request)

    def check_integrity(self) -> None:
        """Raise AssertionError where the parts of the node contradict each other."""
        self.published.check_integrity()
        for transfer in self.published.table.live.values():
            assert transfer.session in self.sessions, f"{transfer.transfer_id}: its publisher is gone"
        self.pulls.check_integrity()
        self.peers.check_integrity()
        self.grant_client.plans.check_integrity(self._holds())
        self.poll_requests.check_integrity()
        self.chunk_memory.check_integrity()
        self.mover_pool.check_integrity()
        if not self.context.is_behind:  # a call that is put off may hold an engine
            self.context.ledger.check_integrity(self._charges())
        num_ranks = sum(session.rank is not None for session in self.sessions.values())
        for rank in self.registry.local_ranks():
            session = self.sessions.get(rank.session)
            assert session is not None and session.rank is rank, f"{rank.spec.key}: a rank without session"
            num_ranks -= 1
        assert not num_ranks, "the rank of a session is not in the registry"

    def _charges(self) -> Iterator[Charge]:
        """Yield what everything that is kept here is counted for."""
        parts = (
            self.published.table, self.published.announced, self.published.ended, self.waiting, self.home,
            self.owners, self.registry, self.pulls, self.worker_requests,
            self.peers, self.grant_client.plans,
        )  # fmt: skip
        for part in parts:
            yield from part.charges()
        for session in self.sessions.values():
            yield ARRIVING_ID_BYTES, session.uid, session.assembly.num_bytes
        yield from self.handshake_client.charges(self._holds())

    def _holds(self) -> list[HeldGrant]:
        return [*(pull.held_grant for pull in self.pulls.running()), *self.worker_requests.prepared()]

    # --- events

    def _handle(self, event: events.Event) -> None:
        match event:
            case events.WorkerMessage():
                self._receive_worker_message(event)
            case events.MoverMessage():
                self._handle_mover_message(event)
            case events.PeerReply():
                self._handle_peer_reply(event.endpoint, event.message)
            case events.PeerRequest():
                self._handle_peer_request(event.route, event.message, event.key)
            case events.WorkerConnected():
                self._start_session(event)
            case events.FdsArrived():
                if session := self.sessions.get(event.session):
                    self.local_ranks.fds_arrived(session, event.problem)
            case events.WorkerDisconnected():
                self._end_session(event.session)
            case events.ForkserverReady():
                self.mover_pool.forkserver_ready(event.library)
            case events.LibraryUnavailable():
                self.mover_pool.library_unavailable(event.reason)
            case events.ForkserverExited():
                self.mover_pool.forkserver_exited(event.reason)
            case events.MoverNotStarted():
                self.mover_pool.not_started(event.mover, event.refusal)
            case events.MoverDied():
                self._mover_died(event)
            case events.PlanMade():
                self.grant_client.plan_made(event.job, event.made)
            case events.PidfdNotSent():
                if session := self.sessions.get(event.session):
                    self.local_ranks.pidfd_not_sent(session, event.mover)
            case events.LayoutsChecked():
                for checked in event.layouts:
                    self.layouts.add_checked(checked)
            case events.PeerUnreachable():
                self.peers.mark_unreachable(event.endpoint, event.reason)
            case events.PeerConnected():
                self.peers.connected(event.endpoint)
            case events.PeerDisconnected():
                self.peers.disconnected(event.endpoint, event.reason)
            case events.OwnershipsLoaded():
                self.owners.restore(event.ranks)
            case events.Tick():
                pass
            case _:
                self._handle_operator_request(event)

    def _handle_operator_request(self, event: events.OperatorRequest) -> None:
        match event:
            case events.DisownRequested():
                self.owners.forget_absent(event.engine_id)
                self.home.disown(event.engine_id)
            case events.DrainRequested():
                self.context.draining = True
            case events.AllowlistChanged():
                self.context.allowlist = event.allowlist
                self.peers.allowlist_changed()
            case events.PeerDropRequested():
                self.peers.drop(event.endpoint)
            case events.TransferCancelRequested():
                self.published.cancel(event.engine, event.transfer_id)
            case events.PullCancelRequested():
                self.pulls.cancel_pull(event.pull)
            case _:
                assert_never(event)

    # --- workers

    def _start_session(self, event: events.WorkerConnected) -> None:
        opened = Session(event.session, event.pid, event.uid)
        opened.assembly = BlockIdAssembly(lambda num_bytes: self._reserve_arriving(opened, num_bytes))
        self.sessions[event.session] = opened

    def _reserve_arriving(self, session: Session, num_bytes: int) -> bool:
        """Reserve bytes of ids that arrive in parts, or release them; return whether there was room.

        All sessions of users without a rank here count as one.
        """
        share, ranks = self.context.ledger[ARRIVING_ID_BYTES], self.context.ledger[RANKS]
        if num_bytes <= 0:
            share.release(session.uid, -num_bytes)
            return True
        num_kept = session.assembly.num_bytes
        if not ranks.held_by(session.uid):
            strangers = [one for one in self.sessions.values() if not ranks.held_by(one.uid)]
            num_kept = sum(one.assembly.num_bytes for one in strangers)
        return num_kept + num_bytes <= MAX_REQUEST_IDS_BYTES and share.acquire(session.uid, num_bytes)

    def _receive_worker_message(self, event: events.WorkerMessage) -> None:
        session = self.sessions.get(event.session)
        if session is None:
            return  # the node closed it while this frame was on its way
        try:
            if session.accepts(event.message):
                self._handle_worker_message(session, event)
        except ProtocolError as error:
            self._disconnect(session, error)
        except KvxferdError as error:
            if not isinstance(
                event.message,
                worker_wire.Register
                | worker_wire.Attach
                | worker_wire.Resume
                | worker_wire.Publish
                | worker_wire.PullRequest,
            ):
                raise
            if isinstance(event.message, worker_wire.PullRequest) and session.rank is not None:
                self.pulls.record_refused(session.local_rank, event.message, error)
            self.context.emit(
                SendToWorker(session.session_id, worker_wire.refusal_of_request(event.message, error))
            )

    def _handle_worker_message(self, session: Session, event: events.WorkerMessage) -> None:
        message = event.message  # what each request takes comes first: every case is one more call
        match message:
            case worker_wire.PullRequest():
                self.worker_requests.pull(session, message)
            case worker_wire.Ready():
                self.worker_requests.ready(session, message)
            case worker_wire.Prepare():
                self.worker_requests.prepare(session, message)
            case worker_wire.Publish():
                self.worker_requests.publish(session, message, event.fence_word)
            case worker_wire.Hello():
                self.worker_requests.welcome(session, message)
            case worker_wire.Register():
                self.local_ranks.register(session, message, event.problem, event.awaits_fds)
            case worker_wire.Attach():
                self._attach(session, message)
            case worker_wire.Suspend():
                self.local_ranks.suspend(session)
            case worker_wire.Resume():
                self.local_ranks.resume(session, message, event.problem)
            case worker_wire.NewMover():
                self.local_ranks.resident_mover_started(session)
            case worker_wire.MoverAcknowledged():
                self.local_ranks.mover_acknowledged(session, message)
            case FdBatch():
                pass  # the shell keeps its descriptors
            case BlockIds():
                session.assembly.add(message)
            case worker_wire.Unpublish():
                self.worker_requests.unpublish(session, message.transfer_id)
            case worker_wire.Cancel():
                self.pulls.cancel(session.local_rank, message.ticket)
            case worker_wire.DeliveredByMover():
                self.worker_requests.check_tickets(message.tickets)
                self.pulls.mark_delivered_by_mover(session.local_rank, message.tickets)
            case worker_wire.PullsResumed():
                self.worker_requests.check_tickets(message.tickets, message.arrived)
                self.pulls.resume_interrupted(session.local_rank, message)
            case worker_wire.Abandon():
                self.worker_requests.abandon(session, message.ref)
            case _:
                assert_never(message)

    def _disconnect(self, session: Session, error: ProtocolError) -> None:
        """Close a session that broke the protocol. Other sessions are not affected."""
        self._end_session(session.session_id)
        farewell = worker_wire.Farewell(code=error.code, message=error.message)
        self.context.emit(CloseWorkerConnection(session.session_id, farewell))

    def _end_session(self, session_id: SessionId) -> None:
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        engine = session.engine
        self.worker_requests.session_closed(session)
        self.published.session_closed(session_id)
        self.local_ranks.session_closed(session)
        self.fence_pages.remove_session(session_id)
        if engine is not None:  # else nothing waited for it
            self._engine_changed(engine.engine_id)

    def _attach(self, session: Session, message: worker_wire.Attach) -> None:
        registered = self.local_ranks.attach(session, message)
        self.fence_pages.assign(session)
        self.rank_reports.report_all(session)
        self.context.emit(SendToWorker(session.session_id, registered, with_fence_page=True))

    def _rank_changed(self, change: RankChange, rank: RankRecord) -> None:
        """Tell the rooms above what has become of a rank: the whole of what it means to them."""
        key = rank.spec.key
        if change in (RankChange.REGISTERED, RankChange.MAPPED):
            self.published.rank_mapped(rank)
            self.rank_reports.report_rank(rank)
        if change is RankChange.GONE:
            self.published.rank_lost(key, Code.RANK_LOST)
        if not isinstance(rank, LocalRank):
            if change in (RankChange.READY, RankChange.GONE):
                self._engine_changed(key.engine_id)
            return
        match change:
            case RankChange.READY:
                self._engine_changed(key.engine_id)
                self.pulls.advance_all(rank)
            case RankChange.ASLEEP:
                self.published.rank_lost(key, Code.SUSPENDED)
                self.pulls.refuse_waiting(
                    rank, Code.SUSPENDED, "the rank is suspended; resume it, then pull again"
                )
            case RankChange.GONE:
                self.pulls.rank_gone(rank)

    # --- movers

    def _mover_assigned(self, mover: Mover, library: str) -> None:
        self.local_ranks.mover_assigned(self.sessions.get(mover.session), mover, library)

    def _mover_refused(self, session_id: SessionId, refusal: Refusal) -> None:
        if session := self.sessions.get(session_id):
            self.local_ranks.mover_unavailable(session, refusal)

    def _handle_mover_message(self, event: events.MoverMessage) -> None:
        mover = self.movers.get(event.mover)
        if mover is None:
            self.mover_pool.handle(event.mover, event.message)
            return
        rank = self._rank_of(mover)
        message = event.message
        match message:
            case mover_wire.PullDone():
                self.pulls.mover_done(message.pull, mover.mover_id, message.outcome)
            case mover_wire.MoverUp():
                pass
            case mover_wire.Bound():
                if rank is not None and rank.state is RankState.BINDING:
                    self.local_ranks.bound(self.sessions[rank.session], message)
            case mover_wire.BindRefused():
                if rank is not None and rank.state is RankState.BINDING:
                    refusal = Refusal(message.code, message.message)
                    self.local_ranks.bind_refused(self.sessions[rank.session], mover, refusal)
            case mover_wire.ProbeResult():
                if rank is not None:
                    record_placement(self.context, rank, message.placement)
            case mover_wire.FenceMapped():
                if self.fence_pages.page_mapped(mover.mover_id, mover.agent, message):
                    self._engine_of_mover_changed(mover)
            case mover_wire.FenceRefused():
                self._fence_refused(mover.mover_id, message)
            case mover_wire.Polling():
                self._polling_confirmed(mover.agent)
            case mover_wire.PullProgress():
                self.pulls.record_progress(mover.mover_id, message)
            case mover_wire.PullQuiesced():
                self.pulls.mover_quiesced(message.pull, mover.mover_id)
            case mover_wire.TransportsSeen():
                # A resident mover's log is its worker's: it sends none.
                if rank is not None and not mover.resident:
                    used = TransportsUsed(message.reach, message.transports, message.is_fully_parsed)
                    record_transports(self.context, rank, used)
            case mover_wire.ChunkMemoryRequest():
                # A resident mover's memory is its worker's, whose word on it would cost other users.
                if not mover.resident:
                    self.chunk_memory.handle(mover.mover_id, message)
                    self._replace_if_idle(mover.mover_id)
            case mover_wire.MoverWorn():
                mover.worn = True
                self._replace_if_idle(mover.mover_id)
            case mover_wire.MoverLeaving():
                self.movers.kill(mover.mover_id)
            case _:
                assert_never(message)

    def _fence_refused(self, mover: MoverId, message: mover_wire.FenceRefused) -> None:
        """Close a session whose fence page no peer can read. Its engine's mover is not affected."""
        if self.fence_pages.page_refused(mover, message.session) and (
            session := self.sessions.get(message.session)
        ):
            text = f"cannot use the session's fence page: {message.message}"
            # This daemon made the page, so it is not the client's fault: the client may try again.
            self._disconnect(session, ProtocolError(text, Code.MOVER_LOST))

    def _mover_died(self, event: events.MoverDied) -> None:
        mover = self.movers.remove(event.mover)
        if mover is None:
            self.mover_pool.mover_died(event.mover)
            return
        self._detach_mover(mover)  # first, so that its pulls wait for the next mover
        self.chunk_memory.forget(mover.mover_id)
        self.pulls.mover_died(mover.mover_id)
        self.poll_requests.forget(mover.agent)
        if session := self.sessions.get(mover.session):
            self.local_ranks.mover_died(session, mover)
        self._engine_of_mover_changed(mover)

    def _detach_mover(self, mover: Mover) -> None:
        """Take the mover from its rank. Until it is dead, the reads that it posted may still write."""
        self.fence_pages.remove_mover(mover.mover_id)
        if mover.state is not MoverState.RETIRED:  # peers read on from a retired one, and it polls for them
            self.poll_requests.forget(mover.agent)
        if self._rank_of(mover) is not None:
            self.local_ranks.mover_left(self.sessions[mover.session], mover)

    def _rank_of(self, mover: Mover) -> LocalRank | None:
        """Return the rank that the mover serves now."""
        session = self.sessions.get(mover.session)
        rank = session.rank if session is not None else None
        return rank if rank is not None and rank.mover == mover.mover_id else None

    def _is_mover_needed(self, mover: Mover) -> bool:
        """Whether a retired mover still runs a pull, or a peer reads from it."""
        return self.pulls.runs_on(mover.mover_id) or self.poll_requests.has_holders(mover.agent)

    def _replace_if_idle(self, mover_id: MoverId) -> None:
        """Replace a mover with memory that only its death frees, once nobody needs it; look again later."""
        mover = self.movers.get(mover_id)
        if mover is None or not (mover.worn or self.chunk_memory.has_lost(mover_id)):
            return
        if self.movers.accepts_pulls(mover_id) and not self._is_mover_needed(mover):
            self.movers.retire(mover_id)
        else:
            again = ("lost-chunks", mover_id)
            self.context.after(again, LOST_CHUNKS_CHECK_S, lambda: self._replace_if_idle(mover_id))

    def _request_polling(self, agent: AgentName, on: bool) -> None:
        if mover := self.movers.get_by_agent(agent):
            self.context.emit(SendToMover(mover.mover_id, mover_wire.SetPolling(on=on)))
            self.movers.reconsider(mover.mover_id)
            return
        if on:
            self.home.request_polling(agent)

    def _polling_confirmed(self, agent: AgentName) -> None:
        if self.poll_requests.confirm(agent):
            self.waiting.wake(PollingOf(agent))
        self.member.reply_to_polling_requests()

    def _engine_of_mover_changed(self, mover: Mover) -> None:
        """Reconsider the engine of the mover's rank: a mover serves pages and readers of that engine only."""
        if mover.engine is not None:
            self._engine_changed(mover.engine.engine_id)

    def _engine_changed(self, engine_id: EngineId) -> None:
        """Reconsider all that waits for any generation of the engine."""
        self.fence_pages.reassign(engine_id)
        self.waiting.wake(engine_id)
        self.member.reply_to_polling_requests()

    # --- other daemons

    def _handle_peer_reply(self, endpoint: Endpoint, message: peer_wire.PeerMessage) -> None:
        match message:
            case peer_wire.RankPollingRequest():
                self.member.start_polling(endpoint, message)
            case peer_wire.TransferReleased():
                self.member.handle_released(endpoint, message)
            case _:
                try:
                    self.peers.handle(endpoint, message)
                except ProtocolError as error:
                    self.peers.give_up(endpoint, error)

    def _request_settled(self, asked: OpenRequest, reply: peer_wire.ReplyMessage) -> None:
        """Go on with the one reply to a request of this node, or its refusal made here: each kind of it."""
        self.peers.request_settled(asked, reply)
        match asked.message, asked.about:
            case peer_wire.PeerHello(), Peer() as peer:
                self.peers.hello_answered(peer, asked, reply)
            case peer_wire.ManifestRequest(), EngineFetch() as fetch:
                self.handshake_client.answered(fetch, reply)
            case peer_wire.GrantRequest() as requested, HeldGrant() as hold:
                self.grant_client.answered(hold, requested.request, reply)
            case peer_wire.RenewGrants(), str() as endpoint:
                self.grant_client.renewed(Endpoint(endpoint), reply)
            case peer_wire.Acknowledge(), Pull() as pull:
                self.pulls.acknowledged(pull, asked.opened_at)
            case peer_wire.AbandonTransfer() as abandoned, Session() as session:
                session.abandoning.discard(abandoned.ref)  # its source knows, or is given up
            case peer_wire.JoinRank() as joined, LocalRank() as rank:
                self.member.join_answered(rank, joined, reply)
            case peer_wire.RankReady() as report, LocalRank() as rank:
                self.member.report_answered(rank, report, reply)
            case peer_wire.RankPollingRequest() as polling, _:
                if isinstance(reply, peer_wire.RequestDone):
                    self._polling_confirmed(polling.agent)
                else:
                    self.poll_requests.request_failed(polling.agent)
            case _:
                pass  # of the others only that they are repeated no more
        self.peers.forget_if_unused(asked)

    def _rank_joined(self, rank: LocalRank, refusal: Refusal | None) -> None:
        if session := self.sessions.get(rank.session):
            self.local_ranks.joined(session, refusal)

    def _handle_peer_request(self, route: bytes, message: peer_wire.PeerMessage, key: str) -> None:
        match message:
            case peer_wire.PeerHello():
                self._welcome_peer(route, message, key)
            case _ if self.peer_routes.is_refused(route):
                pass  # it was sent behind the hello, may mean something else in that version, and is refused
            case peer_wire.ManifestRequest():
                self.handshake_server.fetch(route, message, key)
            case peer_wire.GrantRequest():
                self.grant_server.acquire(route, message, key)
            case peer_wire.RenewGrants():
                self.grant_server.renew(route, message, key)
            case peer_wire.ReleaseGrant():
                self.grant_server.release(route, message, key)
            case peer_wire.Acknowledge():
                self.grant_server.acknowledge(route, message, key)
            case peer_wire.AbandonTransfer():
                self.grant_server.abandon(route, message, key)
            case peer_wire.JoinRank():
                self.home.join(route, message, key)
            case peer_wire.LeaveRank():
                self.home.leave(route, message, key)
            case peer_wire.RankReady():
                if member := self.home.reporting_member(route, message, key):
                    self.published.member_ready(route, member, message)
            case _:
                self.peer_requests.handle_inbound_reply(route, message, key)

    def _welcome_peer(self, route: bytes, message: peer_wire.PeerHello, key: str) -> None:
        try:
            version = negotiate_version(peer_wire.PEER_VERSIONS, message.versions)
        except ProtocolError as error:
            self.peer_routes.set_endpoint(route, None)
            self.context.emit(ReplyToPeer(route, peer_wire.refusal_of(message.request, error)))
            return
        self.peer_routes.set_endpoint(route, _claimed_endpoint(message.endpoint, key))
        welcome = peer_wire.PeerWelcome(
            request=message.request,
            version=version,
            boot=self.context.boot,
            versions=peer_wire.PEER_VERSIONS,
            software=self.context.settings.software,
        )
        self.context.emit(ReplyToPeer(route, welcome))


def _claimed_endpoint(endpoint: Endpoint, key: str) -> Endpoint:
    """Return where a peer with that key says it is; "" where that is no endpoint or has another key."""
    try:
        parsed = parse_endpoint(endpoint)
    except EngineError:
        return Endpoint("")
    return parsed if key_of(parsed) in ("", key) else Endpoint("")
