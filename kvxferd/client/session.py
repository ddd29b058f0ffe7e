"""One session as data: its engine's requests, its daemon's messages, and the messages to send.

It has no socket and no thread: `Connection` passes messages to `handle` and sends what `pop_outgoing`
returns. The caller holds the session's lock around every call; time is an argument.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import NoReturn

from kvxferd.client.events import Disconnected, Emit, PullTicket, Suspended
from kvxferd.client.fence_slots import FencePageLike, FenceSlots
from kvxferd.client.gpu_events import Completion, PendingCompletions
from kvxferd.client.incarnations import KnownIncarnations
from kvxferd.client.memory_export import MemoryExport
from kvxferd.client.mover_watch import LaunchMover
from kvxferd.client.outbox import Outbox, Outgoing
from kvxferd.client.publishes import ClientPublish, ClientPublishes, no_reply_message
from kvxferd.client.pulls import ClientPull, ClientPulls
from kvxferd.client.refs import TransferRef
from kvxferd.client.registration import MemoryState, RankRole, Registration, SessionRole
from kvxferd.errors import Code, EngineError, KvxferdError, ProtocolError
from kvxferd.ids import BootId, Endpoint, GroupName, Incarnation, Ticket, TransferId
from kvxferd.wire import common, worker
from kvxferd.wire.block_id_parts import BlocksByGroup
from kvxferd.wire.common import Message, Refusal

CancelPull = Callable[[Ticket], None]

HANDSHAKE_TIMEOUT_S = 10.0  # a daemon replies to Hello at once; one that does not is stuck
REREGISTER_TIMEOUT_S = 30.0  # a registration may wait for a mover to be made, and for an old one to die

# A rank or publisher that was registered before tries again: the session that has its engine id or its rank
# now, or a rank of another shape or with other layers beside it, may leave, or an operator returns the id;
# and another node's daemon may have had the home's address for a while. To end the session instead would let
# one second of squatting end a live engine.
RETRIED_ON_REREGISTER = frozenset(
    {
        Code.NOT_ALLOWED,
        Code.RANK_TAKEN,
        Code.SHAPE_MISMATCH,
        Code.UNEQUAL_STAGES,
        Code.LAYERS_MISSING,
        Code.NOT_HOME,
    }
)

# Refusals that do not change by another attempt. After any other the client keeps trying.
PERMANENT_REFUSALS = frozenset(
    {
        Code.BAD_VERSION,
        Code.NOT_ALLOWED,
        Code.LAYOUT_INVALID,
        Code.REGION_INVALID,
        Code.REGION_UNSEALED,
        Code.REGION_TOO_SMALL,
        Code.RANK_INVALID,
        Code.INCARNATION_CHANGED,
        Code.SHAPE_MISMATCH,
        Code.LAYERS_MISSING,
        Code.UNEQUAL_STAGES,
        Code.NOT_HOME,
        Code.ENDPOINT_INVALID,
        Code.GENERATION_STALE,
    }
)


class SessionState(Enum):
    """From no connection to a registered one."""

    DISCONNECTED = auto()  # no connection
    HANDSHAKING = auto()  # Hello is sent
    CONNECTED = auto()  # welcomed, and not registered
    REGISTERING = auto()  # Register, Attach or Resume is sent
    READY = auto()  # the daemon takes requests
    CLOSED = auto()  # the session has ended


class ClientSession:
    """The whole state of a client. Its methods return at once."""

    def __init__(
        self,
        name: str,
        fence: FenceSlots,
        hello_fds: tuple[int, ...],
        emit: Emit,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """`random_bytes` returns so many bytes that nobody can predict: nonces are made of them."""
        self.state = SessionState.DISCONNECTED
        self.close_reason: Refusal | None = None  # why the session is over
        self.epoch = 0  # counts connections
        self.version = 1  # of the worker protocol, as the present daemon chose
        self.registration = Registration()
        self._pulls = ClientPulls(emit)
        self._fence = fence
        self._publishes = ClientPublishes(fence, emit, random_bytes)
        self._incarnations = KnownIncarnations()
        self._outbox = Outbox(self._pulls, self._publishes)
        self._pending_completions = PendingCompletions()
        self._emit = emit
        self._name = name
        self._hello_fds = hello_fds  # the fence page, and the socket for deliveries
        self._delivery_fd = hello_fds[-1]
        self._lease_s = 0.0
        self._endpoint = Endpoint("")
        self._reply_deadline: float | None = None  # when the daemon must have replied

    # --- the connection's life

    def connection_made(self, now: float) -> None:
        """Queue Hello: a socket to a daemon is connected."""
        self.epoch += 1
        self.state = SessionState.HANDSHAKING
        self._reply_deadline = now + HANDSHAKE_TIMEOUT_S
        hello = worker.Hello(versions=worker.WORKER_VERSIONS, client=self._name, notices=True)
        self._outbox.queue_first(hello, self._hello_fds)

    def connection_lost(self, now: float, code: Code, why: str) -> None:
        """Handle the connection's end: what was sent is decided, what was not waits for the next."""
        if self.state is not SessionState.CLOSED:
            self.state = SessionState.DISCONNECTED
        self._reply_deadline = None
        self._outbox.connection_lost()
        self._pulls.connection_lost(self.epoch, now, code, why)
        self._publishes.connection_lost()
        self.registration.close_and_stop_movers()
        if self.registration.memory_state is MemoryState.SUSPENDING:
            self._publishes.release_all_locally(Code.SUSPENDED)

    def movers_exited(self, epoch: int) -> None:
        """Handle the death of every mover of a connection that has ended."""
        self._pulls.movers_exited(epoch)
        self.registration.mark_unmapped(epoch)
        self._finish_suspend_if_unmapped()

    def fail_permanently(self, code: Code, message: str) -> None:
        """End the session: no daemon will accept it any more. After `connection_lost`."""
        if self.state is SessionState.CLOSED:
            return
        self.state = SessionState.CLOSED
        self.close_reason = Refusal(code, message)
        self._pulls.fail_queued(code, message)
        self._publishes.release_all_locally(Code.PUBLISHER_GONE)
        self._outbox.clear()
        self._emit(Disconnected(code, message))

    def resident_movers_exited(self, now: float, code: Code, why: str) -> None:
        """End the pulls safely: every mover of the present connection ran in this process and is gone."""
        self._pulls.connection_lost(self.epoch, now, code, why)
        self.movers_exited(self.epoch)

    def close(self, code: Code, why: str) -> None:
        """End everything, fence words first: the engine closes the client, or the client failed."""
        self._publishes.release_all_locally(Code.PUBLISHER_GONE)
        self._pulls.close(code, why)
        self._pending_completions.clear()
        self._outbox.clear()
        if self.registration.is_resident:
            self.registration.mark_unmapped(self.epoch)  # from here on only the mover's own state counts
        self.registration.close()
        self.state = SessionState.CLOSED
        if self.close_reason is None:
            self.close_reason = Refusal(code, why)
            if code is Code.INTERNAL:
                self._emit(Disconnected(code, why))

    def tick(self, now: float) -> None:
        """Handle everything that is due. Raises KvxferdError when the daemon has not replied in time."""
        self._finish_suspend_if_unmapped()
        self._pending_completions.poll(now)
        for ticket in self._pulls.expire(now):
            if self.state is SessionState.READY:
                self._outbox.queue(worker.Cancel(ticket=ticket))
        for publish in self._publishes.pop_due_retries(now):
            self._outbox.queue(publish)
        self._publishes.expire_unsent(now)
        if self.state is not SessionState.READY:
            self._publishes.expire(now)
        if self._reply_deadline is not None and now >= self._reply_deadline:
            raise KvxferdError("the daemon did not answer in time", Code.DAEMON_LOST)

    def next_deadline(self) -> float | None:
        """Return when `tick` is due next, None when nothing is timed."""
        times = [self._pulls.next_deadline(), self._publishes.next_retry(), self._reply_deadline]
        times += [self._pending_completions.next_poll(), self._publishes.next_unsent_deadline()]
        if self.state is not SessionState.READY:
            times.append(self._publishes.next_deadline())
        return min((t for t in times if t is not None), default=None)

    def has_one_short_request(self, most_bytes: int) -> bool:
        """Return whether the session is READY and one request waits, with at most `most_bytes` of ids."""
        return self.state is SessionState.READY and self._outbox.has_one_short_item(most_bytes)

    def pop_outgoing(self, now: float) -> Outgoing | None:
        """Return the next message to send, None when there is none now."""
        return self._outbox.pop(self.state is SessionState.READY, self.epoch, self.version, now)

    # --- being a rank or a publisher

    def register(self, role: SessionRole, launch: LaunchMover | None = None) -> None:
        """Register as a rank or a publisher. Raises EngineError as `Registration.begin` does."""
        self._check_open()
        self.registration.begin(role, launch)
        self._incarnations = KnownIncarnations()
        if isinstance(role, RankRole) and role.exports is not None:
            self._incarnations.set_own(role.engine.rank, role.exports.incarnation)
        self._register_if_needed(None)

    def suspend(self) -> None:
        """Request that the memory is unmapped; `Suspended` is emitted once no mover maps it."""
        self._check_open()
        if self.registration.memory_state is not MemoryState.SHARED:
            return
        self.registration.begin_suspend()
        self._pulls.fail_queued(Code.SUSPENDED, "the rank is suspended")
        if self.state is SessionState.READY:
            if (deliveries := self.pop_final_deliveries()) is not None:
                self._outbox.queue(deliveries)
            self._outbox.queue(worker.Suspend())
        elif self.state is not SessionState.REGISTERING:
            self._publishes.release_all_locally(Code.SUSPENDED)
            self._finish_suspend_if_unmapped()

    def resume(self, exports: MemoryExport) -> None:
        """Offer the memory again. Raises EngineError(out-of-place) before `Suspended`."""
        self._check_open()
        if self.registration.memory_state is not MemoryState.SUSPENDED:
            raise EngineError("cannot resume a rank before its Suspended", Code.OUT_OF_PLACE)
        self.registration.begin_resume(exports)
        assert isinstance(self.registration.role, RankRole)
        self._incarnations.set_own(self.registration.role.engine.rank, exports.incarnation)
        if self.state is SessionState.READY:
            self.state = SessionState.REGISTERING
            outgoing = self.registration.build_resume()
            self._outbox.queue_first(outgoing.message, outgoing.fds)
        else:
            self._register_if_needed(None)

    def _register_if_needed(self, reply_deadline: float | None) -> None:
        if self.state is SessionState.CONNECTED and self.registration.should_register:
            self.state, self._reply_deadline = SessionState.REGISTERING, reply_deadline
            outgoing = self.registration.build_request(self._delivery_fd)
            self._outbox.queue_first(outgoing.message, outgoing.fds)

    def _finish_suspend_if_unmapped(self) -> None:
        if self.state is SessionState.REGISTERING:
            # The daemon has the memory's descriptors, and its reply decides. To finish here would let the
            # engine resume with other memory, and that reply would then pass for the resume's.
            return
        if (
            self.registration.memory_state is MemoryState.SUSPENDING
            and self.registration.is_unmapped_elsewhere
        ):
            self._publishes.release_all_locally(Code.SUSPENDED)  # on every path to here the bytes go
            self.registration.finish_suspend()
            self._emit(Suspended())

    # --- requests

    def publish(
        self,
        transfer_id: TransferId,
        blocks: BlocksByGroup,
        *,
        num_tokens: int,
        num_readers: int,
        lease_s: float | None,
        now: float,
        after: Completion | None = None,
        unchecked: Mapping[GroupName, int] | None = None,
        wants_reply: bool = False,
        traceparent: str = "",
        ready_tokens: int = -1,
        nonce: str = "",
    ) -> TransferRef:
        """Publish a transfer; it is sent once `after` is done. Raises EngineError, BusyError.

        `ready_tokens`: of `num_tokens`; the rest follows with `extend`. -1: all. `nonce`: the router's.
        """
        what = f"publish {transfer_id}"
        self._check_not_suspended(what)
        if wants_reply and self.version < worker.FIRST_WITH_PUBLISH_REPLIES:
            raise EngineError(no_reply_message(transfer_id, self.version), Code.BAD_VERSION)
        if not self._incarnations.all and self.version > 1:
            raise EngineError(
                f"cannot {what}: no rank of {self.registration.role} has been registered; register its ranks "
                "first",
                Code.ENGINE_INCOMPLETE,
            )
        lease_s = self._lease_s if lease_s is None else lease_s
        known = self._incarnations.all
        publish = self._publishes.add(
            transfer_id, blocks, num_tokens, num_readers, now + lease_s, known, unchecked, nonce
        )
        publish.lease_s, publish.ready_tokens = lease_s, ready_tokens
        publish.is_by_rank = isinstance(self.registration.role, RankRole)
        publish.wants_reply, publish.traceparent = wants_reply, traceparent
        if after is not None:
            publish.awaits_gpu = True
            self._pending_completions.add(
                after,
                lambda: self._publish_written(publish),
                lambda w: self._publishes.gpu_failed(publish, w),
            )
        elif self.state is SessionState.READY:  # else it is sent with the replay
            self._outbox.queue(publish)
        role = self.registration.role
        assert role is not None
        ref = TransferRef(self._endpoint, role.engine_id, role.generation, transfer_id, publish.nonce)
        return ref.with_trace(traceparent) if traceparent else ref

    def add_blocks(self, transfer_id: TransferId, blocks: BlocksByGroup, now: float) -> None:
        """Add blocks to a transfer of this session that grows. Raises EngineError."""
        self._check_not_suspended(f"extend {transfer_id}")
        if self._keep_blocks(transfer_id, blocks, now):
            self._outbox.queue(worker.Extend(transfer_id=transfer_id, blocks=blocks))

    def _keep_blocks(self, transfer_id: TransferId, blocks: BlocksByGroup, now: float) -> bool:
        """Add blocks to those that are kept; return whether to send them. Else they go with the publish."""
        publish = self._publishes.get(transfer_id)
        if publish is None or publish.ready_tokens < 0:
            raise EngineError(
                f"cannot extend {transfer_id}: this session has published no transfer of that id that grows, "
                "or it is over",
                Code.TRANSFER_UNKNOWN,
            )
        self._publishes.add_blocks(publish, blocks, now)
        return publish.sent_epoch == self.epoch and self.state is SessionState.READY

    def extend(
        self,
        transfer_id: TransferId,
        ready_tokens: int,
        now: float,
        after: Completion | None = None,
        blocks: BlocksByGroup | None = None,
    ) -> None:
        """Send that this rank has written so many tokens (-1: all), once `after` is done.

        `blocks` are sent at once, and where nothing is waited for in one message with the report, so that
        the daemon is woken once. Raises EngineError.
        """
        what = f"extend {transfer_id}"
        self._check_not_suspended(what)
        publish = self._publishes.get(transfer_id)
        if publish is not None and ready_tokens > publish.num_tokens:
            raise EngineError(f"cannot {what} to {ready_tokens} tokens: it has {publish.num_tokens}")
        written = self._incarnations.own
        if after is not None and blocks is not None:
            self.add_blocks(transfer_id, blocks, now)
        if after is not None:
            self._pending_completions.add(
                after,
                lambda: self._send_ready(transfer_id, now, written, ready_tokens),
                lambda why: None,  # never ready: the lease ends the transfer
            )
            return
        to_send = blocks if blocks is not None and self._keep_blocks(transfer_id, blocks, now) else None
        self._send_ready(transfer_id, now, written, ready_tokens, to_send)

    def _publish_written(self, publish: ClientPublish) -> None:
        """Queue a publish whose blocks are now written."""
        if self._publishes.gpu_done(publish) and self._takes_requests:
            self._outbox.queue(publish)

    @property
    def _takes_requests(self) -> bool:
        return self.state is SessionState.READY and self.registration.memory_state is MemoryState.SHARED

    def ready(self, transfer_id: TransferId, now: float, after: Completion | None = None) -> None:
        """Send that this rank has finished writing a transfer, once `after` is done."""
        self._check_not_suspended(f"say that {transfer_id} is ready")
        written = self._incarnations.own
        if after is not None:
            # Work that fails is never ready: the publisher's lease ends the transfer.
            self._pending_completions.add(
                after, lambda: self._send_ready(transfer_id, now, written), lambda why: None
            )
            return
        self._send_ready(transfer_id, now, written)

    def _send_ready(
        self,
        transfer_id: TransferId,
        now: float,
        written: Incarnation,
        ready_tokens: int = -1,
        blocks: BlocksByGroup | None = None,
    ) -> None:
        if written != self._incarnations.own or self.registration.memory_state is not MemoryState.SHARED:
            return  # the rank has slept since, and the bytes are gone
        publish = self._publishes.get(transfer_id)
        if publish is not None and publish.ready_tokens >= 0:
            if ready_tokens == publish.num_tokens:
                ready_tokens = -1
            publish.ready_tokens = -1 if ready_tokens < 0 else max(publish.ready_tokens, ready_tokens)
            publish.expires_at = max(publish.expires_at, now + publish.lease_s)
            if ready_tokens < 0 and self._publishes.pop_whole(publish):
                self._outbox.queue(publish)
        self._publishes.remember_ready(transfer_id, now, written, ready_tokens)
        if blocks is not None:
            self._outbox.queue(
                worker.Extend(
                    transfer_id=transfer_id, blocks=blocks, incarnation=written, ready_tokens=ready_tokens
                )
            )
        elif self.state is SessionState.READY:  # else it is sent with the replay
            self._queue_ready(transfer_id, written, ready_tokens)

    def _queue_ready(self, transfer_id: TransferId, written: Incarnation, ready_tokens: int) -> None:
        if message := self._ready_message(transfer_id, written, ready_tokens):
            self._outbox.queue(message)

    def _ready_message(
        self, transfer_id: TransferId, written: Incarnation, ready_tokens: int
    ) -> worker.Ready | None:
        """Return the message; None where the daemon would take a part for the whole."""
        if ready_tokens >= 0 and self.version < worker.FIRST_WITH_PROGRESS:
            return None
        incarnation = written if self.version > 1 else Incarnation("")
        return worker.Ready(transfer_id=transfer_id, incarnation=incarnation, ready_tokens=ready_tokens)

    def unpublish(self, transfer_id: TransferId) -> None:
        """Withdraw a transfer. One that is over already is not withdrawn again."""
        self._check_open()
        if self.state is not SessionState.READY:
            self._publishes.release_locally(transfer_id, Code.UNPUBLISHED)
        elif self._publishes.withdraw(transfer_id):
            self._outbox.queue(worker.Unpublish(transfer_id=transfer_id))

    def queue_one_way(self, message: worker.Prepare | worker.Abandon) -> None:
        """Queue a message that has no reply, for the next daemon if there is none now."""
        self._check_open()
        self._outbox.check_room("tell the daemon")
        self._outbox.queue(message)

    def pull(
        self,
        ref: common.TransferRef,
        blocks: BlocksByGroup,
        num_tokens: int,
        deadline: float,
        cancel: CancelPull,
        after: Completion | None = None,
        unchecked: Mapping[GroupName, int] | None = None,
        *,
        progressive: bool = False,
        wants_progress: bool = False,
    ) -> PullTicket:
        """Start a pull; it is sent once `after` is done. Raises EngineError, BusyError."""
        self._check_not_suspended(f"pull {ref.transfer_id}")
        pull = self._pulls.add(ref, blocks, num_tokens, deadline, cancel, unchecked)
        pull.progressive, pull.wants_progress = progressive, wants_progress
        if after is None:
            self._outbox.queue(pull)
        else:
            self._pending_completions.add(
                after, lambda: self._outbox.queue(pull), lambda why: self._pulls.gpu_failed(pull, why)
            )
        return pull.ticket

    def next_unchecked(self) -> ClientPull | ClientPublish | None:
        """Return the next request whose block ids must be checked before it is sent; None where none is."""
        return self._outbox.next_unchecked()

    def checked(self, request: ClientPull | ClientPublish, problem: str) -> None:
        """Let the request be sent, or refuse it where there is a problem with its block ids."""
        request.unchecked = {}
        if not problem:
            return
        if isinstance(request, ClientPull):
            self._pulls.refuse(request, Code.BLOCKS_INVALID, problem)
        else:
            self._publishes.refuse(request, Code.BLOCKS_INVALID, problem)

    def cancel(self, ticket: Ticket) -> None:
        """End a pull early."""
        if self._pulls.cancel(ticket) and self.state is SessionState.READY:
            self._outbox.queue(worker.Cancel(ticket=ticket))

    def _check_not_suspended(self, what: str) -> None:
        self._check_open()
        self._outbox.check_room(what)
        if self.registration.memory_state is not MemoryState.SHARED:
            raise EngineError(f"cannot {what}: the rank is suspended; resume it first", Code.SUSPENDED)

    def _check_open(self) -> None:
        if self.close_reason is not None:
            raise KvxferdError(f"the session is over: {self.close_reason.message}", self.close_reason.code)

    # --- messages of the daemon

    def carries_fence_page(self, message: worker.DaemonMessage) -> bool:
        """Return whether the message carries the session's fence page, which is offered before `handle`."""
        makes_pages = self.version >= worker.FIRST_WITH_FENCE_PAGES
        return makes_pages and isinstance(message, worker.Registered) and self.registration.expects_fence_page

    def offer_fence_page(self, page: FencePageLike) -> None:
        """Keep the page that came with the message that is handled next."""
        self._fence.offer_page(page)

    def handle(self, message: worker.DaemonMessage, now: float) -> None:
        """Handle a message. Raises KvxferdError when the connection must end; its code tells why."""
        match message:
            case worker.Welcome():
                self._handle_welcome(message, now)
            case worker.Registered():
                self._handle_registered(message, now)
            case worker.FdsWanted():
                self._require_state(SessionState.REGISTERING, message)
                for batch in self.registration.build_fd_batches(message.request):
                    self._outbox.queue_first(batch.message, batch.fds)
            case worker.EngineRanks():
                self._incarnations.update(message.ranks)
            case worker.Refused():
                self._handle_refused(message)
            case worker.MoverChanged():
                self.registration.close_daemon_ends()  # a pidfd is the connection's business
            case worker.MoverOffered():
                self._handle_mover_offered(message)
            case worker.MoverWanted():
                self._require_state(SessionState.READY, message)
                if outgoing := self.registration.build_new_mover():
                    self._outbox.queue_first(outgoing.message, outgoing.fds)
            case worker.Progress():
                self._pulls.handle_progress(message)
            case worker.Delivered():
                self._pulls.handle_delivered(message)
            case worker.Failed():
                self._pulls.handle_failed(message)
            case worker.Quiesced():
                self._pulls.handle_quiesced(message)
            case worker.PullsInterrupted():
                self._require_state(SessionState.READY, message)
                self._outbox.queue(self._pulls.handle_interrupted(message))
            case worker.Released():
                self._publishes.handle_released(message.transfer_id, message.why)
            case worker.PublishRefused():
                self._publishes.handle_refused(message, now)
            case worker.PublishAccepted():
                self._publishes.handle_accepted(message.transfer_id)
            case worker.Suspended():
                self._handle_suspended(now)
            case worker.Farewell():
                self._handle_farewell(message)

    def _handle_farewell(self, message: worker.Farewell) -> NoReturn:
        if self.state is SessionState.HANDSHAKING and message.code is Code.BAD_FRAME:
            # A daemon that is too old to ignore a hello's unknown fields replies like this.
            raise KvxferdError(
                f"cannot speak with the daemon: it does not understand hello ({message.message}); "
                "upgrade the older",
                Code.BAD_VERSION,
            )
        if self.registration.was_registered and message.code in RETRIED_ON_REREGISTER:
            text = f"the daemon has ended the session for now: {message.message}"
            raise KvxferdError(text, Code.DAEMON_LOST)
        raise KvxferdError(message.message, message.code)

    @property
    def has_live_pulls(self) -> bool:
        """Whether a mover may report a delivery."""
        return len(self._pulls) > 0

    def handle_delivered_by_mover(self, delivered: worker.Delivered) -> None:
        """Handle a mover's own Delivered. Raises KvxferdError as `handle` does."""
        self._pulls.handle_delivered_by_mover(delivered)

    def pop_final_deliveries(self) -> worker.DeliveredByMover | None:
        """Return the deliveries to report before the rank's mover ends; None where there are none."""
        if self.state is not SessionState.READY or not (tickets := self._pulls.pop_delivered_by_mover()):
            return None
        return worker.DeliveredByMover(tickets=tickets)

    def _handle_welcome(self, message: worker.Welcome, now: float) -> None:
        self._require_state(SessionState.HANDSHAKING, message)
        versions = worker.WORKER_VERSIONS
        if not versions.oldest <= message.version <= versions.newest:
            raise ProtocolError(
                f"the daemon chose protocol version {message.version}, not one offered", Code.BAD_VERSION
            )
        self.state, self._reply_deadline = SessionState.CONNECTED, None
        self.version = self.registration.version = message.version
        self.registration.boot = BootId(message.boot_id)
        self._lease_s = message.lease_s
        self._register_if_needed(now + REREGISTER_TIMEOUT_S if self.registration.was_registered else None)

    def _handle_mover_offered(self, message: worker.MoverOffered) -> None:
        """Acknowledge the mover: the connection watches it already, so it may have the memory."""
        can_be = self.state in (SessionState.REGISTERING, SessionState.READY)
        if (
            not can_be
            or self.registration.memory_state is MemoryState.SUSPENDED
            or not self.registration.expects_mover_offers
        ):
            raise ProtocolError("the daemon offered a mover that nobody asked for", Code.OUT_OF_PLACE)
        self.registration.mark_mapped(self.epoch)
        self._outbox.queue_first(worker.MoverAcknowledged(number=message.number))

    def _handle_registered(self, message: worker.Registered, now: float) -> None:
        self._require_state(SessionState.REGISTERING, message)
        self.registration.handle_accepted(message, self.epoch)
        if self.registration.expects_fence_page:
            self._publishes.switch_fence_page()
        self.state, self._reply_deadline = SessionState.READY, None
        self._endpoint = Endpoint(message.endpoint)
        if self.registration.memory_state is MemoryState.SUSPENDING:
            self._publishes.release_all_locally(Code.SUSPENDED)
            self._outbox.queue(worker.Suspend())
            return
        if self.version < 2 and not self._is_sole_writer:
            # Version 1 cannot name the other ranks' memory, and one of them may have slept meanwhile.
            self._publishes.release_all_locally(Code.RANK_LOST)
        transfers, ready = self._publishes.replay(now, self._lease_s)
        messages = [self._ready_message(*one) for one in ready]
        self._outbox.replay([*transfers, *(message for message in messages if message is not None)])

    @property
    def _is_sole_writer(self) -> bool:
        """Whether a publish of this session reports only this rank's memory as written."""
        role = self.registration.role
        if not isinstance(role, RankRole):
            return False
        return not role.engine.publish_implies_ready or len(role.engine.ranks()) == 1

    def _handle_refused(self, message: worker.Refused) -> None:
        self._require_state(SessionState.REGISTERING, message)
        was_registered = self.registration.is_registered(self.epoch)
        self.state, self._reply_deadline = (
            SessionState.READY if was_registered else SessionState.CONNECTED,
            None,
        )
        caller_waited = self.registration.handle_refused(message, self.epoch)
        self._finish_suspend_if_unmapped()
        if not caller_waited and self.registration.memory_state is MemoryState.SHARED:
            if message.code in RETRIED_ON_REREGISTER:
                text = f"the daemon does not take the session back: {message.message}"
                raise KvxferdError(text, Code.DAEMON_LOST)
            raise KvxferdError(message.message, message.code)

    def _handle_suspended(self, now: float) -> None:
        if self.registration.memory_state is not MemoryState.SUSPENDING:
            raise ProtocolError("the daemon suspended a rank that did not ask for it", Code.OUT_OF_PLACE)
        self._pulls.connection_lost(self.epoch, now, Code.SUSPENDED, "the rank was suspended")
        self._publishes.release_all_locally(Code.SUSPENDED)
        self.registration.mark_unmapped(self.epoch)
        if not self.registration.stop_movers():
            self._pulls.movers_exited(self.epoch)
        self._finish_suspend_if_unmapped()

    def _require_state(self, state: SessionState, message: Message) -> None:
        if self.state is not state:
            raise ProtocolError(
                f"the daemon sent {type(message).__name__} while the session was {self.state.name}",
                Code.OUT_OF_PLACE,
            )
