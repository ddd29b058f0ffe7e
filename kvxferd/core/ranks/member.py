"""The member's side of engines that span nodes: report ranks to the home, and do what the home requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import cast

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import SendToPeer, SendToWorker
from kvxferd.core.limits.table import RETRY_AFTER_S
from kvxferd.core.peers.peers import Peers
from kvxferd.core.peers.requests import PeerRequests
from kvxferd.core.ranks.polling import PollRequests
from kvxferd.core.ranks.rank import LocalRank, RankState, Reported
from kvxferd.core.ranks.registry import Registry
from kvxferd.errors import Code
from kvxferd.ids import AgentName, Endpoint, EngineKey, Incarnation, TransferId
from kvxferd.wire.common import RankManifest, Refusal
from kvxferd.wire.peer import (
    JoinRank,
    LeaveRank,
    PeerRefused,
    RankPollingRequest,
    RankReady,
    ReplyMessage,
    RequestDone,
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
        self.on_joined: Callable[[LocalRank, Refusal | None], None] = lambda rank, refusal: None
        peers.pin(self._homes)

    def join(self, rank: LocalRank) -> None:
        """Send a bound rank to its home, now and as a heartbeat. `on_joined` gets each outcome.

        While the home still waits for the rank's former daemon, which may be this one before a restart, the
        request is sent again.
        """
        # After about this time the home gives up a daemon that is silent.
        rank.join_deadline = self._context.now + 2 * self._context.settings.peer.silent_after_s
        self._send_join(rank)

    def _send_join(self, rank: LocalRank) -> None:
        message = JoinRank(
            request=self._peer_requests.next_id(),
            boot=self._context.boot,
            manifest=cast(RankManifest, rank.encoded_manifest()),
            secret=self._secret,
        )
        self._replace_join(rank, message.request)
        rank.joined, rank.asked_to_poll = rank.agent, False
        self._set_timer(rank, self._context.settings.member_heartbeat_s)
        # Reports wait until the rank has joined, and would fill its user's share of requests for minutes.
        timeout_s = self._context.settings.peer.silent_after_s
        self._peers.request(rank.spec.home, message, timeout_s, rank.uid, rank, is_vital=True)

    def _replace_join(self, rank: LocalRank, request: int) -> None:
        """End the rank's open `JoinRank`: sent again, it would undo at the home what is sent from now on."""
        former, rank.join_request = rank.join_request, request
        self._peer_requests.cancel(former)

    def _set_timer(self, rank: LocalRank, after_s: float) -> None:
        self._context.after(("heartbeat", rank.session), after_s, lambda: self._join_again(rank))

    def _join_again(self, rank: LocalRank) -> None:
        if rank.join_request:
            self._set_timer(rank, self._context.settings.member_heartbeat_s)  # it is repeated until its reply
        elif rank.state in (RankState.JOINING, RankState.READY):
            self._send_join(rank)

    def join_answered(self, rank: LocalRank, asked: JoinRank, reply: ReplyMessage) -> None:
        """Report whether the home takes the rank, unless it is asked once more."""
        if rank.join_request != asked.request:
            return  # a later request about the rank is in its place
        rank.join_request = 0
        if not isinstance(reply, PeerRefused):
            self.on_joined(rank, None)
            if isinstance(reply, RequestDone):
                self._do_as_told(rank, reply)
            return
        wait_s = reply.retry_after_s
        may_change = reply.code in RETRYABLE_CODES and 0 < wait_s <= rank.join_deadline - self._context.now
        if may_change:
            self._set_timer(rank, wait_s)
        else:
            self.on_joined(rank, Refusal(reply.code, reply.message, wait_s))

    def _do_as_told(self, rank: LocalRank, reply: RequestDone) -> None:
        if rank.agent is not None and not (reply.polls or rank.asked_to_poll):
            self._poll_requests.release(rank.agent, ("home", rank.spec.home))
        if reply.is_new:  # it ignores what has ended there
            for transfer_id in rank.reported:
                self._context.put_off(rank.uid, partial(self._send_report, rank, transfer_id))

    def _homes(self) -> set[Endpoint]:
        """Return the homes of this node's engines: they send on the connections that this node opened."""
        return {engine.spec.home for engine in self._registry if engine.spec.home}

    def leave(self, rank: LocalRank) -> None:
        """Leave the home, if the rank has joined it: it is gone, sleeps, or has no mover now."""
        self._context.timers.cancel(("heartbeat", rank.session))
        if rank.joined is None:
            return
        rank.joined = None
        self._replace_join(rank, 0)
        message = LeaveRank(
            request=self._peer_requests.next_id(),
            boot=self._context.boot,
            engine_id=rank.spec.engine_id,
            generation=rank.spec.generation,
            rank=rank.spec.rank,
            secret=self._secret,
        )
        timeout_s = self._context.settings.acknowledge_for_s
        self._peers.request(rank.spec.home, message, timeout_s, rank.uid, is_vital=True)

    def forget_reports(self, rank: LocalRank) -> None:
        """Report nothing any more: the rank is gone, or sleeps, and its home ends what it has written."""
        for reported in rank.reported.values():
            self._context.put_off(rank.uid, partial(self._peer_requests.cancel, reported.request))
        rank.reported.clear()

    def report_ready(
        self, rank: LocalRank, incarnation: Incarnation, transfer_id: TransferId, ready_tokens: int = -1
    ) -> None:
        """Report to the home that the rank has finished writing in that mapping of its memory.

        `ready_tokens`: so many tokens of it; -1: all.
        """
        former = rank.reported.get(transfer_id)
        rank.reported[transfer_id] = Reported(incarnation, ready_tokens, former.request if former else 0)
        rank.reported.move_to_end(transfer_id)
        if len(rank.reported) > MAX_REPORTED:
            rank.reported.popitem(last=False)
        self._send_report(rank, transfer_id)

    def _send_report(self, rank: LocalRank, transfer_id: TransferId) -> None:
        """Send what the rank has reported of a transfer, unless that is released or the rank has left."""
        if transfer_id not in rank.reported:
            return
        reported, spec, request = rank.reported[transfer_id], rank.spec, self._peer_requests.next_id()
        rank.reported[transfer_id] = reported._replace(request=request)
        message = RankReady(
            request=request,
            engine_id=spec.engine_id,
            generation=spec.generation,
            rank=spec.rank,
            transfer_id=transfer_id,
            incarnation=reported.incarnation,
            secret=self._secret,
            ready_tokens=reported.ready_tokens,
        )
        self._peers.request(spec.home, message, self._context.settings.acknowledge_for_s, rank.uid, rank)
        # Its successor says as much, or more. Not before that is open: a peer without requests is forgotten.
        self._peer_requests.cancel(reported.request)

    def report_answered(self, rank: LocalRank, report: RankReady, reply: ReplyMessage) -> None:
        """Report once more what found no room among its user's requests: pulls there may wait for it."""
        if isinstance(reply, PeerRefused) and reply.code is Code.BUSY:
            again = partial(self._send_report, rank, report.transfer_id)
            self._context.after(("report", rank.session, report.transfer_id), RETRY_AFTER_S, again)

    # --- requests of the home

    def start_polling(self, home: Endpoint, message: RankPollingRequest) -> None:
        """Have a rank's mover poll. Only the rank's home may request this."""
        rank = self._rank_of(message.agent, home)
        if rank is None:
            text = f"cannot have agent {message.agent[:80]} poll: it is no mover's of a rank with home {home}"
            self._context.emit(
                SendToPeer(home, PeerRefused(request=message.request, code=Code.NOT_HOME, message=text))
            )
            return
        rank.asked_to_poll, rank.polling_request = True, message.request
        self._poll_requests.acquire(message.agent, ("home", home))
        self.reply_to_polling_requests()

    def _rank_of(self, agent: AgentName, home: Endpoint) -> LocalRank | None:
        """Return the local rank that the agent serves, if its home is `home`."""
        ranks = self._registry.local_ranks()
        return next((rank for rank in ranks if (rank.agent, rank.spec.home) == (agent, home)), None)

    def reply_to_polling_requests(self) -> None:
        """Reply to the homes whose movers poll now."""
        for rank in self._registry.local_ranks():
            if rank.polling_request and rank.agent is not None and self._poll_requests.is_polling(rank.agent):
                self._context.emit(SendToPeer(rank.spec.home, RequestDone(request=rank.polling_request)))
                rank.polling_request = 0

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
        if engine is not None and self._note_release(engine.key, message.transfer_id):
            released = Released(transfer_id=message.transfer_id, why=message.why)
            for rank in sorted(engine.local_ranks(), key=lambda rank: rank.session):
                rank.reported.pop(message.transfer_id, None)
                self._context.emit(SendToWorker(rank.session, released))
        self._context.emit(SendToPeer(home, RequestDone(request=message.request)))

    def _note_release(self, engine: EngineKey, transfer_id: TransferId) -> bool:
        """Note a release; return whether it is new. A transfer id is used once in a generation."""
        if (engine, transfer_id) in self._released:
            return False
        self._released[engine, transfer_id] = None
        if len(self._released) > MAX_RELEASED:
            self._released.popitem(last=False)
        return True
