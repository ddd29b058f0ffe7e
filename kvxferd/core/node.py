"""One node's decisions: events in, effects out. Everything else in this package hangs off it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import assert_never

from kvxferd.core.arriving import Arriving
from kvxferd.core.attendance import Attendance
from kvxferd.core.effects import CloseWorker, Effect, ToMover, ToPeer, ToRoute, ToWorker
from kvxferd.core.events import (
    DescriptorsCame,
    DisownAsked,
    DrainAsked,
    Event,
    LanesSeen,
    LayoutsChecked,
    MoverDied,
    MoverSaid,
    MoverTaken,
    MoverUnavailable,
    OwnershipsRead,
    PeerDropAsked,
    PeerSaid,
    PeerUnreachable,
    PidfdNotSent,
    PullCancelAsked,
    RouteSaid,
    Tick,
    TransferCancelAsked,
    TrustChanged,
    WorkerClosed,
    WorkerOpened,
    WorkerSaid,
)
from kvxferd.core.fences import Fences
from kvxferd.core.granting import Granting
from kvxferd.core.handshake import Handshakes
from kvxferd.core.holds import Holds
from kvxferd.core.home import Home
from kvxferd.core.kept_ids import KeptIds, kept_bytes
from kvxferd.core.layouts import Layouts
from kvxferd.core.member import Member
from kvxferd.core.moment import Moment
from kvxferd.core.movers import Mover, Movers
from kvxferd.core.ownerships import Disownable, Ownerships
from kvxferd.core.peers import Peers
from kvxferd.core.pulls import Pulls
from kvxferd.core.questions import Questions
from kvxferd.core.rank_reports import RankReports
from kvxferd.core.ranks import Ranks
from kvxferd.core.registry import Registry
from kvxferd.core.requests import Requests
from kvxferd.core.routes import Routes
from kvxferd.core.sessions import Session
from kvxferd.core.settings import Settings
from kvxferd.core.showing import list_pulls, list_transfers, show_engines, show_retired
from kvxferd.core.snapshot import EngineSnapshot, NodeSnapshot
from kvxferd.core.source import Source
from kvxferd.errors import Code, ProtocolError
from kvxferd.ids import AgentName, BootId, Endpoint, EngineId, MoverId, SessionId
from kvxferd.wire.codec import negotiate
from kvxferd.wire.common import Refusal
from kvxferd.wire.ids_stream import IdsAssembly
from kvxferd.wire.mover import (
    Attend,
    Attending,
    BindRefused,
    Bound,
    DisconnectJudged,
    DisconnectSeen,
    FenceMapped,
    FenceRefused,
    Leaving,
    Proved,
    PullDone,
    PullQuiet,
    Up,
)
from kvxferd.wire.outlines import JoinOutline
from kvxferd.wire.peer import (
    PEER_VERSIONS,
    AbandonTransfer,
    Acknowledge,
    AskGrant,
    AttendRank,
    FetchEngine,
    Greet,
    Greeting,
    JoinRank,
    LeaveRank,
    PeerMessage,
    PeerRefused,
    RankReady,
    RenewGrants,
    ReturnGrant,
    TransferReleased,
)
from kvxferd.wire.versions import for_version_1
from kvxferd.wire.worker import (
    FIRST_WITH_FENCE_PAGES,
    Attach,
    Farewell,
    Hello,
    MoverAcknowledged,
    NewMover,
    Publish,
    Ready,
    Register,
    Resume,
    Suspend,
)


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
        self.moment = Moment(
            boot=boot, endpoint=endpoint, settings=settings or Settings(), new_token=new_token
        )
        self.sessions: dict[SessionId, Session] = {}
        self.ownerships = Ownerships(self.moment)
        self.registry = Registry(endpoint, self.ownerships)
        self.arriving = Arriving(self.registry.has_rank_of)
        self.movers = Movers(self.moment, self._mover_leaves, self._is_needed)
        self.fences = Fences(self.moment)
        self.questions = Questions(self.moment)
        self.kept_ids = KeptIds()
        layouts = self.layouts = Layouts()
        self.routes = Routes()
        self.peers = Peers(self.moment, self.questions, layouts)
        self.attendance = Attendance(self.moment, self._ask_attend)
        self.reports = RankReports(self.moment, self.registry)
        self.source = Source(
            self.moment,
            self.registry,
            self.attendance,
            self.fences,
            self.questions,
            self.reports,
            self.kept_ids,
        )
        self.granting = Granting(self.moment, self.registry, self.source, self.attendance, self.fences)
        self.handshakes = Handshakes(self.moment, self.registry)
        self.home = Home(
            self.moment,
            self.registry,
            self.questions,
            self.source,
            layouts,
            self._engine_changed,
            self.granting.reconsider_transfer,
        )
        self.member = Member(self.moment, self.registry, self.peers, self.attendance)
        self.holds = Holds(self.moment, self.peers, self.movers, self.kept_ids)
        self.pulls = Pulls(self.moment, self.holds, self.movers, self.kept_ids)
        self.ranks = Ranks(
            self.moment,
            self.registry,
            self.movers,
            self.fences,
            self.member,
            self.source,
            self.pulls,
            self.reports,
        )
        self.requests = Requests(
            self.moment, self.registry, self.source, self.holds, self.pulls, self.peers, self.member
        )

    # --- the whole interface

    def feed(self, event: Event, now: float) -> list[Effect]:
        """Take one event at a time, `now` never going back. Return what is to be done, in order."""
        self.moment.now = max(now, self.moment.now)
        self._take(event)
        self.moment.run_due()
        return [self._as_spoken(effect) for effect in self.moment.take_effects()]

    def _as_spoken(self, effect: Effect) -> Effect:
        """Return the effect with a message that a side of version 1 understands, where it speaks no other."""
        match effect:
            case ToWorker():
                session = self.sessions.get(effect.session)
                version = session.version if session is not None else 1
            case ToRoute():
                version = self.routes.version_of(effect.route)
            case ToPeer():
                version = self.peers.version_of(effect.endpoint)
            case _:
                return effect
        if version > 1 or (message := for_version_1(effect.message)) is effect.message:
            return effect
        return replace(effect, message=message)

    def next_deadline(self) -> float | None:
        """When to feed a `Tick` if nothing else happens before."""
        return self.moment.timers.next_deadline()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left that a drain would wait for."""
        return not len(self.pulls) and not self.source.transfers.live

    def snapshot(self) -> NodeSnapshot:
        """Everything, as of the last event. With many transfers it takes long: see `snapshot_steps`."""
        return next(shown for shown in self.snapshot_steps() if shown is not None)

    def snapshot_steps(self) -> Iterator[NodeSnapshot | None]:
        """Everything; None before it, where events may be fed: what changes meanwhile is shown either way."""
        transfers = yield from list_transfers(self.source, self.registry, self.moment)
        pulls = yield from list_pulls(self.pulls)
        num_grants = self.holds.num_grants()
        yield NodeSnapshot(
            boot=self.moment.boot,
            endpoint=self.moment.endpoint,
            draining=self.moment.draining,
            num_sessions=len(self.sessions),
            num_quarantined=self.pulls.num_quarantined,
            quarantined_bytes=self.pulls.quarantined_bytes,
            engines=self.engines_snapshot(),
            peers=self.peers.snapshot(num_grants),
            transfers=tuple(transfers.shown),
            pulls=tuple(pulls.shown),
            transfer_states=dict(transfers.states),
            num_grants_given=transfers.num_grants,
            num_grants_held=sum(num_grants.values()),
            pull_phases=dict(pulls.states),
            retired_movers=show_retired(
                self.movers, self.pulls, self.attendance, self.sessions, self.moment.now
            ),
            ownerships=self.ownerships.snapshot(),
        )

    def engines_snapshot(self) -> tuple[EngineSnapshot, ...]:
        """The engines of which a rank is known here."""
        return show_engines(self.registry, self.moment.endpoint, self.movers)

    def refusal_of_join(self, route: bytes, said: JoinOutline, key: str) -> PeerRefused | None:
        """Why a member's rank cannot be joined, whatever its layout; None: the layout decides."""
        return self.home.refusal(route, said, key)

    def disownable(self, engine_id: EngineId) -> Disownable:
        """What an engine id would lose if an operator disowned it now."""
        uid = None if self.registry.has_local_rank(engine_id) else self.ownerships.uid_of(engine_id)
        num_kept = self.ownerships.ranks.num_absent(engine_id)
        return Disownable(uid, num_kept + self.home.num_silent(engine_id))

    def is_asked(self, endpoint: Endpoint, request: int) -> bool:
        """Whether a peer's answer to that question is waited for."""
        return self.questions.is_open(endpoint, request)

    def check_integrity(self) -> None:
        """Raise AssertionError where the books contradict each other."""
        self.source.check_integrity()
        self.pulls.check_integrity()
        self.home.check_integrity()
        self._check_kept_ids()
        for session in self.sessions.values():
            if session.rank is not None:
                engine = self.registry.get(session.rank.spec.key)
                assert engine is not None and engine.ranks.get(session.rank.spec.rank) is session.rank
        for engine in self.registry:
            for owner in engine.sessions():
                assert owner in self.sessions, f"a rank of {engine.key} outlived its session"

    def _check_kept_ids(self) -> None:
        running = self.pulls.running()
        holds = [pull.hold for pull in running] + [pull.former for pull in running if pull.former]
        holds += [hold for session in self.sessions.values() for hold in session.prepared.values()]
        kept = sum(transfer.kept_bytes for transfer in self.source.transfers.live.values())
        kept += sum(hold.kept_bytes for hold in holds) + sum(kept_bytes(pull.blocks) for pull in running)
        assert kept == self.kept_ids.num_bytes, f"{self.kept_ids.num_bytes} bytes of ids counted, {kept} kept"

    # --- events

    def _take(self, event: Event) -> None:
        match event:
            case WorkerOpened():
                self._worker_opened(event)
            case WorkerSaid():
                self._worker_said(event)
            case DescriptorsCame():
                if session := self.sessions.get(event.session):
                    self.ranks.descriptors_came(session, event.problem)
            case WorkerClosed():
                self._worker_closed(event.session)
            case MoverTaken():
                mover = Mover(event.mover, event.session, event.agent, resident=event.resident)
                self.ranks.mover_taken(self.sessions.get(event.session), mover, event.library)
            case MoverUnavailable():
                if session := self.sessions.get(event.session):
                    self.ranks.mover_unavailable(session, event.refusal)
            case MoverSaid():
                self._mover_said(event)
            case LanesSeen():
                if seen := self.movers.get(event.mover):
                    self.ranks.lanes_seen(self.sessions.get(seen.session), seen.mover, event.lanes)
            case MoverDied():
                self._mover_died(event)
            case PidfdNotSent():
                if session := self.sessions.get(event.session):
                    self.ranks.pidfd_not_sent(session, event.mover)
            case PeerSaid():
                self._peer_said(event.endpoint, event.message)
            case RouteSaid():
                self._route_said(event.route, event.message, event.key)
            case LayoutsChecked():
                for checked in event.layouts:
                    self.layouts.learn(checked)
            case PeerUnreachable():
                self.peers.unreachable(event.endpoint, event.reason)
            case OwnershipsRead():
                self.ownerships.restore(event.listed)
                self.ownerships.ranks.restore(event.ranks)
            case (
                DisownAsked() | DrainAsked() | TrustChanged()
                | PeerDropAsked() | TransferCancelAsked() | PullCancelAsked()
            ):  # fmt: skip
                self._operate(event)
            case Tick():
                pass
            case _:
                assert_never(event)

    def _operate(
        self,
        event: DisownAsked
        | DrainAsked
        | TrustChanged
        | PeerDropAsked
        | TransferCancelAsked
        | PullCancelAsked,
    ) -> None:
        """What the operator asks for."""
        match event:
            case DisownAsked():
                if not self.registry.has_local_rank(event.engine_id):
                    self.ownerships.forget(event.engine_id)
                self.ownerships.ranks.forget_absent(event.engine_id)
                self.home.disown(event.engine_id)
            case DrainAsked():
                self.moment.draining = True
            case TrustChanged():
                self.moment.trust = event.trust
                self.peers.trust_changed()
            case PeerDropAsked():
                self.peers.drop(event.endpoint)
            case TransferCancelAsked():
                self.source.cancel(event.engine, event.transfer_id)
            case PullCancelAsked():
                self.pulls.cancel_pull(event.pull)
            case _:
                assert_never(event)

    # --- workers

    def _worker_opened(self, event: WorkerOpened) -> None:
        opened = Session(event.session, event.pid, event.uid)
        opened.assembly = IdsAssembly(lambda num_bytes: self.arriving.reserve(opened, num_bytes))
        self.sessions[event.session] = opened

    def _worker_said(self, event: WorkerSaid) -> None:
        session = self.sessions.get(event.session)
        if session is None:
            return  # closed by us, and this was on its way
        try:
            self._hear(session, event)
        except ProtocolError as error:
            self._expel(session, error)

    def _hear(self, session: Session, event: WorkerSaid) -> None:
        said = event.message
        if not session.greeted:
            if not isinstance(said, Hello):
                raise ProtocolError(
                    f"the first frame must be hello, not {type(said).__name__}", Code.OUT_OF_PLACE
                )
            if event.problem is not None:
                raise ProtocolError(event.problem.message, event.problem.code)
            self.requests.greet(session, said)
            return
        match said:
            case Register():
                self.ranks.register(session, said, event.problem, event.lacks_descriptors)
            case Attach():
                self.ranks.attach(session, said)
            case Suspend():
                self.ranks.suspend(session)
            case Resume():
                self.ranks.resume(session, said, event.problem)
            case NewMover():
                self.ranks.new_mover(session)
            case MoverAcknowledged():
                self.ranks.mover_acknowledged(session, said)
            case _:
                self.requests.hear(session, said, event.fence_word)
                if isinstance(said, Publish | Ready) and session.engine is not None:
                    self.granting.reconsider_transfer((session.engine, said.transfer_id))

    def _expel(self, session: Session, error: ProtocolError) -> None:
        """The session broke protocol: it loses its connection, and nobody else notices."""
        self._worker_closed(session.session)
        self.moment.do(ToWorker(session.session, Farewell(code=error.code, message=error.message)))
        self.moment.do(CloseWorker(session.session))

    def _worker_closed(self, session_id: SessionId) -> None:
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        engine = session.engine
        self.requests.session_closed(session)
        self.ranks.session_closed(session)
        if engine is not None:  # else nothing waited for it
            self._engine_changed(engine.engine_id)

    # --- movers

    def _mover_said(self, event: MoverSaid) -> None:
        mover = self.movers.get(event.mover)
        if mover is None:
            return  # what a dead mover still says is void
        session = self.sessions.get(mover.session)
        said = event.message
        match said:
            case Up():
                pass
            case Bound():
                if session is not None and self.ranks.is_binding(session, mover.mover):
                    self.ranks.bound(session, said)
                    self._engine_of_mover_changed(mover)
            case BindRefused():
                if session is not None and self.ranks.is_binding(session, mover.mover):
                    self.ranks.bind_refused(session, Refusal(said.code, said.message))
            case Proved():
                self.ranks.proved(session, mover.mover, said)
            case FenceMapped():
                if self.fences.mapped(mover.mover, mover.agent, said):
                    self._engine_of_mover_changed(mover)
            case FenceRefused():
                self._fence_refused(mover.mover, said)
            case Attending():
                self._attends(mover.agent)
            case PullDone():
                self.pulls.done(said.pull, mover.mover, said.outcome)
            case PullQuiet():
                self.pulls.quiet(said.pull, mover.mover)
            case DisconnectSeen():
                # Of a resident mover nobody reads a log; a child's question is answered before it comes here.
                self.moment.do(ToMover(mover.mover, DisconnectJudged(number=said.number, over=False)))
            case Leaving():
                self.movers.kill(mover.mover)
            case _:
                assert_never(said)

    def _fence_refused(self, mover: MoverId, said: FenceRefused) -> None:
        """Nobody can read the session's words: it starts anew, and its engine's mover goes on."""
        if self.fences.refused(mover, said.session) and (session := self.sessions.get(said.session)):
            text = f"cannot use the session's fence page: {said.message}"
            # A page of this daemon's making is no fault of the client's: it may try again.
            code = said.code if session.version < FIRST_WITH_FENCE_PAGES else Code.MOVER_LOST
            self._expel(session, ProtocolError(text, code))

    def _mover_died(self, event: MoverDied) -> None:
        mover = self.movers.remove(event.mover)
        if mover is None:
            return
        self._mover_leaves(mover)  # first: what is read again goes to the next one
        self.pulls.mover_died(mover.mover)
        self.attendance.forget(mover.agent)
        if session := self.sessions.get(mover.session):
            self.ranks.mover_died(session, mover)
        self._engine_of_mover_changed(mover)

    def _mover_leaves(self, mover: Mover) -> None:
        """The mover serves nobody from here on. What it posted may still write until it is dead."""
        if mover.left:
            return
        mover.left = True
        self.fences.mover_gone(mover.mover)
        if not mover.retired:  # else those who read from it go on, and it polls for them
            self.attendance.forget(mover.agent)
        self.member.mover_gone(mover.agent)
        self.ranks.mover_left(self.sessions.get(mover.session), mover)

    def _is_needed(self, mover: Mover) -> bool:
        """Whether a retired mover has work left: pulls that run, or readers."""
        return self.pulls.runs_on(mover.mover) or self.attendance.is_held(mover.agent)

    def _ask_attend(self, agent: AgentName, on: bool) -> None:
        if mover := self.movers.of_agent(agent):
            self.moment.do(ToMover(mover.mover, Attend(on=on)))
            self.movers.reconsider(mover.mover)
            return

        def answered(attends: bool) -> None:
            if attends:
                self._attends(agent)
            else:
                self.attendance.refused(agent)

        self.home.ask_attend(agent, on, answered)

    def _attends(self, agent: AgentName) -> None:
        if self.attendance.confirmed(agent):
            self.granting.reconsider_agent(agent)
        self.member.reconsider()

    def _engine_of_mover_changed(self, mover: Mover) -> None:
        """A mover serves the pages and readers of its rank's engine alone."""
        if mover.engine is not None:
            self._engine_changed(mover.engine.engine_id)

    def _engine_changed(self, engine_id: EngineId) -> None:
        """Let everybody who waits for any start of the engine look again."""
        self.ranks.serve_orphans(engine_id, self.sessions)
        self.handshakes.reconsider(engine_id)
        self.granting.reconsider(engine_id)
        self.member.reconsider()

    # --- other daemons

    def _peer_said(self, endpoint: Endpoint, message: PeerMessage) -> None:
        match message:
            case AttendRank():
                self.member.attend(endpoint, message)
            case TransferReleased():
                self.member.released(endpoint, message)
            case _:
                try:
                    self.peers.said(endpoint, message)
                except ProtocolError as error:
                    self.peers.broke_protocol(endpoint, error)

    def _route_said(self, route: bytes, message: PeerMessage, key: str) -> None:
        match message:
            case Greet():
                self._greet(route, message)
            case FetchEngine():
                self.handshakes.fetch(route, message, key)
            case AskGrant():
                self.granting.ask(route, message, key)
            case RenewGrants():
                self.granting.renew(route, message, key)
            case ReturnGrant():
                self.granting.give_back(route, message, key)
            case Acknowledge():
                self.granting.acknowledge(route, message, key)
            case AbandonTransfer():
                self.granting.abandon(route, message, key)
            case JoinRank():
                self.home.join(route, message, key)
            case LeaveRank():
                self.home.leave(route, message, key)
            case RankReady():
                self.home.ready(route, message, key)
            case _:
                self.questions.route_said(route, message, key)

    def _greet(self, route: bytes, said: Greet) -> None:
        try:
            version = negotiate(PEER_VERSIONS, said.versions)
        except ProtocolError as error:
            refused = PeerRefused(request=said.request, code=error.code, message=error.message)
            self.moment.do(ToRoute(route, refused))
            return
        self.routes.greeted(route, version)
        self.moment.do(ToRoute(route, Greeting(request=said.request, version=version, boot=self.moment.boot)))
