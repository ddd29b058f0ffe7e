"""A member of an engine that spans nodes: its daemon reports its ranks to the home, and serves it."""

from __future__ import annotations

from collections.abc import Callable

from kvxferd.core.attendance import Attendance
from kvxferd.core.effects import ToPeer, ToWorker
from kvxferd.core.moment import Moment
from kvxferd.core.peers import Peers
from kvxferd.core.registry import LocalRank, RankState, Registry
from kvxferd.errors import Code
from kvxferd.ids import AgentName, Endpoint, EngineKey, Incarnation, TransferId
from kvxferd.wire.common import Refusal
from kvxferd.wire.peer import (
    Answer,
    AttendRank,
    Done,
    JoinRank,
    LeaveRank,
    PeerRefused,
    Question,
    RankReady,
    TransferReleased,
)
from kvxferd.wire.worker import Released

# Refusals of a home that time may lift, where they say when to ask again.
PASSING = frozenset({Code.NOT_ALLOWED, Code.RANK_TAKEN, Code.BUSY})

# Secrets came with this version of the peer protocol.
SECRET_VERSION = 2


class Member:
    """This node's ranks whose engine has its home elsewhere."""

    def __init__(self, moment: Moment, registry: Registry, peers: Peers, attendance: Attendance) -> None:
        self._moment = moment
        self._registry = registry
        self._peers = peers
        self._attendance = attendance
        self._secret = moment.new_token()  # for as long as this daemon runs
        self._waiting: list[tuple[Endpoint, AttendRank]] = []  # for a mover to say that it polls
        peers.keep(self._homes)

    def join(self, rank: LocalRank, on_answer: Callable[[Refusal | None], None]) -> None:
        """Say a bound rank to its home, now and as a heartbeat. `on_answer` hears the first answer.

        While the home still waits for the rank's former daemon, which may be this one before a restart,
        it is asked again.
        """
        # The home gives a daemon that is silent up after about this time.
        self._join(rank, on_answer, self._moment.now + 2 * self._moment.settings.silent_after_s)
        self._beat_later(rank)

    def _join(self, rank: LocalRank, on_answer: Callable[[Refusal | None], None], until: float) -> None:
        agent = rank.agent
        joined = rank.manifest()

        def make(request: int) -> Question:
            secret = self._secret_for(rank.spec.home)
            return JoinRank(request=request, boot=self._moment.boot, manifest=joined, secret=secret)

        def answered(answer: Answer) -> None:
            if rank.agent != agent:
                return  # another mover has been bound since, and says itself
            if not isinstance(answer, PeerRefused):
                on_answer(None)
                return
            wait_s = answer.retry_after_s
            may_change = answer.code in PASSING and wait_s > 0
            if may_change and rank.state is RankState.JOINING and self._moment.now + wait_s <= until:
                self._moment.after(("rejoin", rank.session), wait_s, again)
                return
            on_answer(Refusal(answer.code, answer.message, wait_s))

        def again() -> None:
            if rank.agent == agent and rank.state is RankState.JOINING:
                self._join(rank, on_answer, until)

        self._peers.ask(rank.spec.home, make, self._moment.settings.silent_after_s, answered, rank.uid)

    def _homes(self) -> set[Endpoint]:
        """The homes of engines here: they speak by this node's connections to them."""
        return {engine.spec.home for engine in self._registry if engine.spec.home}

    def _secret_for(self, home: Endpoint) -> str:
        """This daemon's secret, for a home that knows the field."""
        return self._secret if self._peers.version_of(home) >= SECRET_VERSION else ""

    def _beat_later(self, rank: LocalRank) -> None:
        self._moment.after(
            ("heartbeat", rank.session), self._moment.settings.member_heartbeat_s, lambda: self._beat(rank)
        )

    def _beat(self, rank: LocalRank) -> None:
        if rank.state is RankState.READY:
            self.join(rank, lambda refusal: None)
        elif rank.state is RankState.JOINING:
            self._beat_later(rank)  # the first answer is still out

    def leave(self, rank: LocalRank, former: AgentName | None = None) -> None:
        """The rank is gone, or has no mover now. `former`: the agent that its home knows, if another."""
        self._moment.timers.stop(("heartbeat", rank.session))
        self._moment.timers.stop(("rejoin", rank.session))
        agent, spec = former or rank.agent, rank.spec
        if agent is None:
            return
        self._peers.ask(
            spec.home,
            lambda request: LeaveRank(
                request=request,
                boot=self._moment.boot,
                engine_id=spec.engine_id,
                generation=spec.generation,
                rank=spec.rank,
                agent=agent,
                secret=self._secret_for(spec.home),
            ),
            self._moment.settings.acknowledge_for_s,
            lambda answer: None,
            rank.uid,
        )

    def ready(self, rank: LocalRank, incarnation: Incarnation, transfer_id: TransferId) -> None:
        """The rank has finished writing in that mapping of its memory: the home must know."""
        if rank.is_asleep:
            return  # the bytes are gone, and the home ends what it knew of them as the rank leaves
        spec = rank.spec
        self._peers.ask(
            spec.home,
            lambda request: RankReady(
                request=request,
                engine_id=spec.engine_id,
                generation=spec.generation,
                rank=spec.rank,
                transfer_id=transfer_id,
                incarnation=incarnation,
                secret=self._secret_for(spec.home),
            ),
            self._moment.settings.acknowledge_for_s,
            lambda answer: None,
            rank.uid,
        )

    # --- what the home says

    def attend(self, home: Endpoint, said: AttendRank) -> None:
        """A rank's mover must poll, or need not any more. Only the rank's home may say so."""
        if said.on and self._rank_of(said.agent, home) is None:
            text = f"cannot have agent {said.agent[:80]} poll: it is no mover's of a rank with home {home}"
            self._moment.do(ToPeer(home, PeerRefused(request=said.request, code=Code.NOT_HOME, message=text)))
            return
        if said.on:
            self._attendance.attend(said.agent, ("home", home))
            self._waiting.append((home, said))
            self.reconsider()
        else:
            self._attendance.leave(said.agent, ("home", home))
            self._moment.do(ToPeer(home, Done(request=said.request)))

    def _rank_of(self, agent: AgentName, home: Endpoint) -> LocalRank | None:
        """The rank here that the agent serves and that has its home there."""
        for engine in self._registry:
            if engine.spec.home == home:
                for record in engine.ranks.values():
                    if isinstance(record, LocalRank) and record.agent == agent:
                        return record
        return None

    def mover_gone(self, agent: AgentName) -> None:
        """The mover is dead: what its home asked of it will not happen."""
        self._waiting = [(home, said) for home, said in self._waiting if said.agent != agent]

    def reconsider(self) -> None:
        """A mover has said that it polls: so its home may know."""
        still = []
        for home, said in self._waiting:
            if self._attendance.is_attending(said.agent):
                self._moment.do(ToPeer(home, Done(request=said.request)))
            else:
                still.append((home, said))
        # Only the last question of a home about an agent is worth an answer; older ones gave up.
        self._waiting = list({(home, said.agent): (home, said) for home, said in still}.values())

    def released(self, home: Endpoint, said: TransferReleased) -> None:
        """The home has released a transfer: this node's ranks of the engine may know.

        From anybody else it is a lie: a rank that believed it would reuse blocks that are still read.
        """
        engine = self._registry.get(EngineKey(said.engine_id, said.generation))
        if engine is not None and engine.spec.home != home:
            text = f"cannot release transfers of engine {engine.key}: its home is not {home}"
            self._moment.do(ToPeer(home, PeerRefused(request=said.request, code=Code.NOT_HOME, message=text)))
            return
        for session in sorted(engine.sessions()) if engine else []:
            self._moment.do(ToWorker(session, Released(transfer_id=said.transfer_id, why=said.why)))
        self._moment.do(ToPeer(home, Done(request=said.request)))
