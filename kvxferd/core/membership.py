"""Engines that span nodes: a member's daemon says its ranks to the engine's home, and serves it."""

from __future__ import annotations

from collections.abc import Callable

from kvxferd.core.attendance import Attendance
from kvxferd.core.effects import ToPeer, ToRoute, ToWorker
from kvxferd.core.layouts import Layouts
from kvxferd.core.manifests import check_manifest
from kvxferd.core.moment import Moment
from kvxferd.core.peers import Peers
from kvxferd.core.questions import Questions
from kvxferd.core.registry import LocalRank, MemberRank, RankState, Registry
from kvxferd.core.source import Source
from kvxferd.core.transfers import TransferKey
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.ids import AgentName, BootId, Endpoint, EngineKey, Rank, TransferId
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


class Member:
    """This node's ranks whose engine has its home elsewhere."""

    def __init__(self, moment: Moment, registry: Registry, peers: Peers, attendance: Attendance) -> None:
        self._moment = moment
        self._registry = registry
        self._peers = peers
        self._attendance = attendance
        self._waiting: list[tuple[Endpoint, AttendRank]] = []  # for a mover to say that it polls

    def join(self, rank: LocalRank, on_answer: Callable[[Refusal | None], None]) -> None:
        """Say a bound rank to its home, now and as a heartbeat. `on_answer` hears the first answer."""
        agent = rank.agent
        joined = rank.manifest()

        def make(request: int) -> Question:
            return JoinRank(request=request, boot=self._moment.boot, manifest=joined)

        def answered(answer: Answer) -> None:
            if rank.agent != agent:
                return  # another mover has been bound since, and says itself
            on_answer(Refusal(answer.code, answer.message) if isinstance(answer, PeerRefused) else None)

        self._peers.ask(rank.spec.home, make, self._moment.settings.silent_after_s, answered)
        self._beat_later(rank)

    def _beat_later(self, rank: LocalRank) -> None:
        self._moment.after(
            ("heartbeat", rank.session), self._moment.settings.member_heartbeat_s, lambda: self._beat(rank)
        )

    def _beat(self, rank: LocalRank) -> None:
        if rank.state is RankState.READY:
            self.join(rank, lambda refusal: None)
        elif rank.state is RankState.JOINING:
            self._beat_later(rank)  # the first answer is still out

    def leave(self, rank: LocalRank) -> None:
        """The rank is gone, or has no mover now."""
        self._moment.timers.stop(("heartbeat", rank.session))
        agent, spec = rank.agent, rank.spec
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
            ),
            self._moment.settings.acknowledge_for_s,
            lambda answer: None,
        )

    def ready(self, rank: LocalRank, transfer_id: TransferId) -> None:
        """The rank has finished writing: the home must know."""
        spec = rank.spec
        self._peers.ask(
            spec.home,
            lambda request: RankReady(
                request=request,
                engine_id=spec.engine_id,
                generation=spec.generation,
                rank=spec.rank,
                transfer_id=transfer_id,
            ),
            self._moment.settings.acknowledge_for_s,
            lambda answer: None,
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


class Home:
    """Ranks of this node's engines whose workers are connected to other nodes' daemons."""

    def __init__(
        self,
        moment: Moment,
        registry: Registry,
        questions: Questions,
        source: Source,
        layouts: Layouts,
        on_change: Callable[[], None],
        on_ready: Callable[[TransferKey], None],
    ) -> None:
        self._moment = moment
        self._registry = registry
        self._questions = questions
        self._source = source
        self._layouts = layouts
        self._on_change = on_change
        self._on_ready = on_ready
        self._members: dict[AgentName, MemberRank] = {}
        self._last_word: dict[AgentName, int] = {}  # open questions whether it shall poll
        self._heard_ready: set[tuple[BootId, int]] = set()  # questions that have been heard

    def join(self, route: bytes, said: JoinRank) -> None:
        """A member says a rank, for the first time or again."""
        spec = said.manifest.spec
        present = self._present(spec.key, spec.rank)
        if present is not None and (present.boot, present.joined) == (said.boot, said.manifest):
            self._beat(present, route)  # nearly every time: nothing is checked anew
            self._moment.do(ToRoute(route, Done(request=said.request)))
            return
        try:
            record = MemberRank(check_manifest(said.manifest, self._layouts), route, said.boot)
            if record.spec.home != self._moment.endpoint:
                raise EngineError(
                    f"cannot take rank {spec.rank} of engine {spec.key}: its home is "
                    f"{spec.home or 'elsewhere'}, and this is {self._moment.endpoint}",
                    Code.NOT_HOME,
                )
            self._check_agent(record)
            self._registry.claim(record)
        except KvxferdError as error:
            refused = PeerRefused(request=said.request, code=error.code, message=error.message)
            self._moment.do(ToRoute(route, refused))
            return
        self._replaced(present, record)
        self._members[record.agent] = record
        self._beat(record, route)
        self._moment.do(ToRoute(route, Done(request=said.request)))
        self._on_change()

    def _beat(self, record: MemberRank, route: bytes) -> None:
        """The rank was heard of, maybe by another route: what waits for an answer follows."""
        if record.route != route:
            self._questions.reroute(record.route, route)
            record.route = route
        self._moment.after(
            ("member", record.spec.key, record.spec.rank),
            self._moment.settings.tombstone_s,
            lambda: self._lost(record),
        )

    def _check_agent(self, record: MemberRank) -> None:
        other = self._members.get(record.agent)
        if other is not None and (other.spec.key, other.spec.rank) != (record.spec.key, record.spec.rank):
            raise EngineError(
                f"cannot take rank {record.spec.rank} of engine {record.spec.key}: its agent is that of rank "
                f"{other.spec.rank} of engine {other.spec.key}",
                Code.RANK_TAKEN,
            )

    def _replaced(self, present: MemberRank | None, record: MemberRank) -> None:
        if present is None:
            # Whatever an earlier home on this endpoint had the mover do is over.
            self._ask_to_poll(record, False, lambda answer: None)
            return
        self._members.pop(present.agent, None)
        if present.incarnation != record.incarnation:
            self._source.rank_lost(record.spec.key, Code.RANK_LOST)
        if present.route != record.route:
            self._questions.reroute(present.route, record.route)

    def _ask_to_poll(self, member: MemberRank, on: bool, on_answer: Callable[[Answer], None]) -> None:
        """The last word counts: an earlier question, asked again, would take it back."""
        agent, number = member.agent, self._questions.next_number()
        self._questions.withdraw(self._last_word.get(agent, 0))
        self._last_word[agent] = number

        def answered(answer: Answer) -> None:
            self._last_word.pop(agent, None)
            on_answer(answer)

        question = AttendRank(request=number, agent=agent, on=on)
        self._questions.ask(member.route, question, self._moment.settings.silent_after_s, answered)

    def _lost(self, record: MemberRank) -> None:
        """Nothing was heard of the rank for very long: its node is gone, and nobody will say so."""
        if self._present(record.spec.key, record.spec.rank) is record:
            self._remove(record)
            self._on_change()

    def _remove(self, record: MemberRank) -> None:
        self._members.pop(record.agent, None)
        self._moment.timers.stop(("member", record.spec.key, record.spec.rank))
        self._source.rank_lost(record.spec.key, Code.RANK_LOST)
        self._registry.remove(record)

    def _present(self, key: EngineKey, rank: Rank) -> MemberRank | None:
        engine = self._registry.get(key)
        record = engine.ranks.get(rank) if engine else None
        return record if isinstance(record, MemberRank) else None

    def leave(self, route: bytes, said: LeaveRank) -> None:
        """A member's rank is gone. What an old mover's farewell says of a new one is void."""
        key = EngineKey(said.engine_id, said.generation)
        present = self._present(key, said.rank)
        if present is not None and present.agent == said.agent and present.boot == said.boot:
            self._remove(present)
        self._moment.do(ToRoute(route, Done(request=said.request)))

    def ready(self, route: bytes, said: RankReady) -> None:
        """A member's rank has finished writing. Counted once, however often it is said.

        A repetition that is late could else speak for the next transfer of the same id.
        """
        key = EngineKey(said.engine_id, said.generation)
        present = self._present(key, said.rank)
        if present is None:
            return  # its mover was replaced, or this daemon restarted: asked again once it has joined
        heard = (present.boot, said.request)
        if heard not in self._heard_ready:
            self._heard_ready.add(heard)
            self._moment.after(
                ("heard-ready", heard),
                2 * self._moment.settings.acknowledge_for_s,
                lambda: self._heard_ready.discard(heard),
            )
            self._source.ready(key, said.rank, said.transfer_id)
        self._moment.do(ToRoute(route, Done(request=said.request)))
        self._on_ready((key, said.transfer_id))

    def ask_attend(self, agent: AgentName, on: bool, on_answer: Callable[[bool], None]) -> None:
        """Ask the member whose mover this is. `on_answer` hears whether it polls."""
        member = self._members.get(agent)
        if member is None:
            return

        def answered(answer: Answer) -> None:
            if on:
                on_answer(isinstance(answer, Done))

        self._ask_to_poll(member, on, answered)
