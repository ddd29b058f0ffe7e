"""A member of an engine that spans nodes: its daemon reports its ranks to the home, and serves it."""

from __future__ import annotations

from collections.abc import Callable

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import SendToPeer, SendToWorker
from kvxferd.core.peers import Peers
from kvxferd.core.registry import LocalRank, RankState, Registry
from kvxferd.core.source_polling import PollRequests
from kvxferd.errors import Code
from kvxferd.ids import AgentName, Endpoint, EngineKey, Incarnation, TransferId
from kvxferd.wire.common import Refusal
from kvxferd.wire.peer import (
    Done,
    JoinRank,
    LeaveRank,
    PeerRefused,
    RankReady,
    ReplyMessage,
    RequestMessage,
    SetRankPolling,
    TransferReleased,
)
from kvxferd.wire.worker import Released

# Refusals of a home that time may lift, where they say when to ask again.
RETRYABLE_CODES = frozenset({Code.NOT_ALLOWED, Code.RANK_TAKEN, Code.BUSY})

# Secrets came with this version of the peer protocol.
SECRET_VERSION = 2


class Member:
    """This node's ranks whose engine has its home elsewhere."""

    def __init__(
        self, context: NodeContext, registry: Registry, peers: Peers, poll_requests: PollRequests
    ) -> None:
        self._context = context
        self._registry = registry
        self._peers = peers
        self._poll_requests = poll_requests
        self._secret = context.new_token()  # for as long as this daemon runs
        self._pending: list[tuple[Endpoint, SetRankPolling]] = []  # for a mover to say that it polls
        peers.pin(self._homes)

    def join(self, rank: LocalRank, on_reply: Callable[[Refusal | None], None]) -> None:
        """Say a bound rank to its home, now and as a heartbeat. `on_answer` hears the first answer.

        While the home still waits for the rank's former daemon, which may be this one before a restart,
        it is asked again.
        """
        # The home gives a daemon that is silent up after about this time.
        self._join(rank, on_reply, self._context.now + 2 * self._context.settings.silent_after_s)
        self._schedule_heartbeat(rank)

    def _join(self, rank: LocalRank, on_reply: Callable[[Refusal | None], None], deadline: float) -> None:
        agent = rank.agent
        joined = rank.manifest()

        def make(request: int) -> RequestMessage:
            secret = self._secret_for(rank.spec.home)
            return JoinRank(request=request, boot=self._context.boot, manifest=joined, secret=secret)

        def answered(reply: ReplyMessage) -> None:
            if rank.agent != agent:
                return  # another mover has been bound since, and says itself
            if not isinstance(reply, PeerRefused):
                on_reply(None)
                return
            wait_s = reply.retry_after_s
            may_change = reply.code in RETRYABLE_CODES and wait_s > 0
            if may_change and rank.state is RankState.JOINING and self._context.now + wait_s <= deadline:
                self._context.after(("rejoin", rank.session), wait_s, again)
                return
            on_reply(Refusal(reply.code, reply.message, wait_s))

        def again() -> None:
            if rank.agent == agent and rank.state is RankState.JOINING:
                self._join(rank, on_reply, deadline)

        self._peers.request(rank.spec.home, make, self._context.settings.silent_after_s, answered, rank.uid)

    def _homes(self) -> set[Endpoint]:
        """The homes of engines here: they speak by this node's connections to them."""
        return {engine.spec.home for engine in self._registry if engine.spec.home}

    def _secret_for(self, home: Endpoint) -> str:
        """This daemon's secret, for a home that knows the field."""
        return self._secret if self._peers.version_of(home) >= SECRET_VERSION else ""

    def _schedule_heartbeat(self, rank: LocalRank) -> None:
        self._context.after(
            ("heartbeat", rank.session),
            self._context.settings.member_heartbeat_s,
            lambda: self._heartbeat(rank),
        )

    def _heartbeat(self, rank: LocalRank) -> None:
        if rank.state is RankState.READY:
            self.join(rank, lambda refusal: None)
        elif rank.state is RankState.JOINING:
            self._schedule_heartbeat(rank)  # the first answer is still out

    def leave(self, rank: LocalRank, former: AgentName | None = None) -> None:
        """The rank is gone, or has no mover now. `former`: the agent that its home knows, if another."""
        self._context.timers.cancel(("heartbeat", rank.session))
        self._context.timers.cancel(("rejoin", rank.session))
        agent, spec = former or rank.agent, rank.spec
        if agent is None:
            return
        self._peers.request(
            spec.home,
            lambda request: LeaveRank(
                request=request,
                boot=self._context.boot,
                engine_id=spec.engine_id,
                generation=spec.generation,
                rank=spec.rank,
                agent=agent,
                secret=self._secret_for(spec.home),
            ),
            self._context.settings.acknowledge_for_s,
            lambda answer: None,
            rank.uid,
        )

    def report_ready(self, rank: LocalRank, incarnation: Incarnation, transfer_id: TransferId) -> None:
        """The rank has finished writing in that mapping of its memory: the home must know."""
        if rank.is_asleep:
            return  # the bytes are gone, and the home ends what it knew of them as the rank leaves
        spec = rank.spec
        self._peers.request(
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
            self._context.settings.acknowledge_for_s,
            lambda answer: None,
            rank.uid,
        )

    # --- what the home says

    def set_polling(self, home: Endpoint, message: SetRankPolling) -> None:
        """A rank's mover must poll, or need not any more. Only the rank's home may say so."""
        if message.on and self._rank_of(message.agent, home) is None:
            text = f"cannot have agent {message.agent[:80]} poll: it is no mover's of a rank with home {home}"
            self._context.emit(
                SendToPeer(home, PeerRefused(request=message.request, code=Code.NOT_HOME, message=text))
            )
            return
        if message.on:
            self._poll_requests.acquire(message.agent, ("home", home))
            self._pending.append((home, message))
            self.reply_to_polling_requests()
        else:
            self._poll_requests.release(message.agent, ("home", home))
            self._context.emit(SendToPeer(home, Done(request=message.request)))

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
        self._pending = [(home, said) for home, said in self._pending if said.agent != agent]

    def reply_to_polling_requests(self) -> None:
        """A mover has said that it polls: so its home may know."""
        still = []
        for home, message in self._pending:
            if self._poll_requests.is_polling(message.agent):
                self._context.emit(SendToPeer(home, Done(request=message.request)))
            else:
                still.append((home, message))
        # Only the last question of a home about an agent is worth an answer; older ones gave up.
        self._pending = list({(home, said.agent): (home, said) for home, said in still}.values())

    def handle_released(self, home: Endpoint, message: TransferReleased) -> None:
        """The home has released a transfer: this node's ranks of the engine may know.

        From anybody else it is a lie: a rank that believed it would reuse blocks that are still read.
        """
        engine = self._registry.get(EngineKey(message.engine_id, message.generation))
        if engine is not None and engine.spec.home != home:
            text = f"cannot release transfers of engine {engine.key}: its home is not {home}"
            self._context.emit(
                SendToPeer(home, PeerRefused(request=message.request, code=Code.NOT_HOME, message=text))
            )
            return
        for session in sorted(engine.sessions()) if engine else []:
            self._context.emit(
                SendToWorker(session, Released(transfer_id=message.transfer_id, why=message.why))
            )
        self._context.emit(SendToPeer(home, Done(request=message.request)))
