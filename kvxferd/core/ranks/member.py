"""The member's side of engines that span nodes: report ranks to the home, and do what the home requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import SendToPeer, SendToWorker
from kvxferd.core.peers.peers import Peers
from kvxferd.core.peers.requests import PeerRequests
from kvxferd.core.ranks.polling import PollRequests
from kvxferd.core.ranks.rank import LocalRank, RankState
from kvxferd.core.ranks.registry import Registry
from kvxferd.errors import Code
from kvxferd.ids import AgentName, Endpoint, EngineKey, Incarnation, SessionId, TransferId
from kvxferd.wire.common import Refusal
from kvxferd.wire.peer import (
    JoinRank,
    LeaveRank,
    PeerRefused,
    RankReady,
    ReplyMessage,
    RequestDone,
    SetRankPolling,
    TransferReleased,
)
from kvxferd.wire.worker import Released

# A home has 8,192 transfers of an engine at most, and repeats a report for two minutes.
MAX_RELEASED = 16_384
# What a rank has reported, the latest: 30 transfers a second that live for some seconds. Each takes half a
# KiB, 32 MiB of a user who has all ranks of a node.
MAX_REPORTED = 512
# Refusals of a home that may end with time, where they carry `retry_after_s`.
RETRYABLE_CODES = frozenset({Code.NOT_ALLOWED, Code.RANK_TAKEN, Code.BUSY})


@dataclass(frozen=True, slots=True)
class Join:
    """A rank that is being joined, with the mover that it had then."""

    rank: LocalRank
    agent: AgentName | None
    deadline: float  # until when a home that may change its mind is asked again


class Member:
    """Joins this node's ranks whose engine has its home on another node."""

    def __init__(
        self,
        context: NodeContext,
        registry: Registry,
        peers: Peers,
        peer_requests: PeerRequests,
        poll_requests: PollRequests,
    ) -> None:
        self._context = context
        self._registry = registry
        self._peers = peers
        self._peer_requests = peer_requests
        self._poll_requests = poll_requests
        self._secret = context.new_token()  # for as long as this daemon runs
        # Transfers that a home has reported as released, the latest: it reports again where it gets no reply.
        self._released: OrderedDict[tuple[EngineKey, TransferId], None] = OrderedDict()
        # What each rank has reported as written and not heard to be released: a home that restarts lost it.
        self._reported: dict[SessionId, OrderedDict[TransferId, tuple[Incarnation, int]]] = {}
        self._joined: dict[SessionId, AgentName] = {}  # the agent that each rank's home may know
        self._open_joins: dict[SessionId, int] = {}  # the request of each rank's last `JoinRank`
        self._pending: list[tuple[Endpoint, SetRankPolling]] = []  # until the mover polls
        self.on_joined: Callable[[LocalRank, Refusal | None], None] = lambda rank, refusal: None
        peers.pin(self._homes)

    def join(self, rank: LocalRank) -> None:
        """Send a bound rank to its home, now and as a heartbeat. `on_joined` gets each outcome.

        While the home still waits for the rank's former daemon, which may be this one before a restart, the
        request is sent again.
        """
        # After about this time the home gives up a daemon that is silent.
        deadline = self._context.now + 2 * self._context.settings.silent_after_s
        self._send_join(Join(rank, rank.agent, deadline))
        self._schedule_heartbeat(rank)

    def _send_join(self, join: Join) -> None:
        rank = join.rank
        message = JoinRank(
            request=self._peer_requests.next_id(),
            boot=self._context.boot,
            manifest=rank.manifest(),
            secret=self._secret,
        )
        self._cancel_join(rank)
        self._joined[rank.session] = message.manifest.binding.agent
        self._open_joins[rank.session] = message.request
        # Reports wait until the rank has joined, and would fill its user's share of requests for minutes.
        timeout_s = self._context.settings.silent_after_s
        self._peers.request(rank.spec.home, message, timeout_s, rank.uid, join, is_vital=True)

    def join_answered(self, join: Join, request: int, reply: ReplyMessage) -> None:
        """Report whether the home takes the rank, unless it is asked once more."""
        rank = join.rank
        if self._open_joins.get(rank.session) != request:
            return  # a later request about the rank is in its place
        del self._open_joins[rank.session]
        if rank.agent != join.agent:
            return  # another mover has been bound since, and its join is under way
        if not isinstance(reply, PeerRefused):
            self.on_joined(rank, None)
            if isinstance(reply, RequestDone) and reply.is_new:
                self._report_again(rank)
            return
        wait_s = reply.retry_after_s
        may_change = reply.code in RETRYABLE_CODES and wait_s > 0
        if may_change and rank.state is RankState.JOINING and self._context.now + wait_s <= join.deadline:
            self._context.after(("rejoin", rank.session), wait_s, partial(self._rejoin, join))
            return
        self.on_joined(rank, Refusal(reply.code, reply.message, wait_s))

    def _rejoin(self, join: Join) -> None:
        if join.rank.agent == join.agent and join.rank.state is RankState.JOINING:
            self._send_join(join)

    def _cancel_join(self, rank: LocalRank) -> None:
        """End the rank's open `JoinRank`: sent again, it would undo at the home what is sent from now on."""
        self._peer_requests.cancel(self._open_joins.pop(rank.session, 0))

    def _homes(self) -> set[Endpoint]:
        """Return the homes of this node's engines: they send on the connections that this node opened."""
        return {engine.spec.home for engine in self._registry if engine.spec.home}

    def _schedule_heartbeat(self, rank: LocalRank) -> None:
        self._context.after(
            ("heartbeat", rank.session),
            self._context.settings.member_heartbeat_s,
            lambda: self._heartbeat(rank),
        )

    def _heartbeat(self, rank: LocalRank) -> None:
        if rank.state is RankState.READY:
            self.join(rank)
        elif rank.state is RankState.JOINING:
            self._schedule_heartbeat(rank)  # the first reply is still due

    def has_joined(self, rank: LocalRank, agent: AgentName) -> bool:
        """Whether the rank's home may know that agent as the rank's."""
        return self._joined.get(rank.session) == agent

    def leave(self, rank: LocalRank) -> None:
        """Leave the home, if the rank has joined it: it is gone, sleeps, or has no mover now."""
        self._context.timers.cancel(("heartbeat", rank.session))
        self._context.timers.cancel(("rejoin", rank.session))
        self._reported.pop(rank.session, None)  # its home ends what it has written
        if self._joined.pop(rank.session, None) is None:
            return
        self._cancel_join(rank)
        spec = rank.spec
        message = LeaveRank(
            request=self._peer_requests.next_id(),
            boot=self._context.boot,
            engine_id=spec.engine_id,
            generation=spec.generation,
            rank=spec.rank,
            secret=self._secret,
        )
        self._peers.request(
            spec.home, message, self._context.settings.acknowledge_for_s, rank.uid, is_vital=True
        )

    def report_ready(
        self, rank: LocalRank, incarnation: Incarnation, transfer_id: TransferId, ready_tokens: int = -1
    ) -> None:
        """Report to the home that the rank has finished writing in that mapping of its memory.

        `ready_tokens`: so many tokens of it; -1: all.
        """
        reported = self._reported.setdefault(rank.session, OrderedDict())
        reported[transfer_id] = incarnation, ready_tokens
        reported.move_to_end(transfer_id)
        if len(reported) > MAX_REPORTED:
            reported.popitem(last=False)
        self._send_ready(rank, incarnation, transfer_id, ready_tokens)

    def _report_again(self, rank: LocalRank) -> None:
        """Report all that a home that is new does not know. It ignores what has ended there."""
        reported: Mapping[TransferId, tuple[Incarnation, int]] = self._reported.get(rank.session, {})
        for transfer_id, (incarnation, ready_tokens) in reported.items():
            report = partial(self._send_ready, rank, incarnation, transfer_id, ready_tokens)
            self._context.put_off(rank.uid, report)

    def _send_ready(
        self, rank: LocalRank, incarnation: Incarnation, transfer_id: TransferId, ready_tokens: int
    ) -> None:
        spec = rank.spec
        message = RankReady(
            request=self._peer_requests.next_id(),
            engine_id=spec.engine_id,
            generation=spec.generation,
            rank=spec.rank,
            transfer_id=transfer_id,
            incarnation=incarnation,
            secret=self._secret,
            ready_tokens=ready_tokens,
        )
        self._peers.request(spec.home, message, self._context.settings.acknowledge_for_s, rank.uid)

    # --- requests of the home

    def set_polling(self, home: Endpoint, message: SetRankPolling) -> None:
        """Have a rank's mover poll, or let it stop. Only the rank's home may request this."""
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
            self._context.emit(SendToPeer(home, RequestDone(request=message.request)))

    def _rank_of(self, agent: AgentName, home: Endpoint) -> LocalRank | None:
        """Return the local rank that the agent serves, if its home is `home`."""
        for engine in self._registry:
            if engine.spec.home == home:
                for record in engine.ranks.values():
                    if isinstance(record, LocalRank) and record.agent == agent:
                        return record
        return None

    def mover_gone(self, agent: AgentName) -> None:
        """Drop the requests for a dead mover to poll."""
        self._pending = [(home, message) for home, message in self._pending if message.agent != agent]

    def reply_to_polling_requests(self) -> None:
        """Reply to the homes whose movers poll now."""
        still = []
        for home, message in self._pending:
            if self._poll_requests.is_polling(message.agent):
                self._context.emit(SendToPeer(home, RequestDone(request=message.request)))
            else:
                still.append((home, message))
        # Only the last request of a home about an agent needs a reply; older ones were withdrawn.
        self._pending = list({(home, message.agent): (home, message) for home, message in still}.values())

    def handle_released(self, home: Endpoint, message: TransferReleased) -> None:
        """Report a transfer that the home released to this node's ranks of the engine.

        Only the home may send this: after a false one a rank would reuse blocks that are still read.
        """
        engine = self._registry.get(EngineKey(message.engine_id, message.generation))
        if engine is not None and engine.spec.home != home:
            text = f"cannot release transfers of engine {engine.key}: its home is not {home}"
            self._context.emit(
                SendToPeer(home, PeerRefused(request=message.request, code=Code.NOT_HOME, message=text))
            )
            return
        if engine is not None and self._is_first_report(engine.key, message.transfer_id):
            for session in sorted(engine.sessions()):
                if reported := self._reported.get(session):
                    reported.pop(message.transfer_id, None)
                self._context.emit(
                    SendToWorker(session, Released(transfer_id=message.transfer_id, why=message.why))
                )
        self._context.emit(SendToPeer(home, RequestDone(request=message.request)))

    def _is_first_report(self, engine: EngineKey, transfer_id: TransferId) -> bool:
        """Return whether the ranks are to be told; a transfer id is used once in a generation."""
        if (engine, transfer_id) in self._released:
            return False
        self._released[engine, transfer_id] = None
        if len(self._released) > MAX_RELEASED:
            self._released.popitem(last=False)
        return True
