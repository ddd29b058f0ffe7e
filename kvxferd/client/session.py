"""One session as data: its connection, its daemon's messages, and the messages to send.

Its engine's requests are in `session_requests`. It has no socket and no thread: `Connection` passes messages
to `handle` and sends what `pop_outgoing` returns. The caller holds the session's lock around every call; time
is an argument.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import NoReturn

from kvxferd.client.events import Disconnected, Emit
from kvxferd.client.fence_slots import FenceSlots
from kvxferd.client.incarnations import KnownIncarnations
from kvxferd.client.memory_export import MemoryExport
from kvxferd.client.mover_watch import LaunchMover
from kvxferd.client.outbox import Outgoing
from kvxferd.client.registration import MemoryState, RankRole, SessionRole
from kvxferd.client.session_requests import SessionRequests, SessionState
from kvxferd.errors import Code, EngineError, KvxferdError, ProtocolError
from kvxferd.ids import BootId, Endpoint
from kvxferd.memory import FencePage
from kvxferd.wire import worker
from kvxferd.wire.common import Message, Refusal

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
        Code.SHAPE_MISMATCH,
        Code.LAYERS_MISSING,
        Code.UNEQUAL_STAGES,
        Code.NOT_HOME,
        Code.ENDPOINT_INVALID,
        Code.GENERATION_STALE,
    }
)


class ClientSession(SessionRequests):
    """The whole state of a client. Its methods return at once."""

    def __init__(
        self,
        name: str,
        fence: FenceSlots,
        delivery_fd: int,
        emit: Emit,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """`delivery_fd`: the movers' end of the socket for deliveries.

        `random_bytes` returns so many bytes that nobody can predict: nonces are made of them.
        """
        super().__init__(fence, emit, random_bytes)
        self._emit = emit
        self._name = name
        self._delivery_fd = delivery_fd
        self._reply_deadline = math.inf  # when the daemon must have replied

    # --- the connection's life

    def connection_made(self, now: float) -> None:
        """Queue Hello: a socket to a daemon is connected."""
        self.epoch += 1
        self.state = SessionState.HANDSHAKING
        self._reply_deadline = now + HANDSHAKE_TIMEOUT_S
        self._outbox.queue_first(worker.Hello(versions=worker.WORKER_VERSIONS, client=self._name))

    def connection_lost(self, now: float, code: Code, why: str) -> None:
        """Handle the connection's end: what was sent is decided, what was not waits for the next."""
        self.state = SessionState.DISCONNECTED
        self._reply_deadline = math.inf
        self._outbox.connection_lost()
        self._pulls.connection_lost(self.epoch, now, code, why)
        self._publishes.connection_lost()
        self.registration.close_and_stop_movers()

    def movers_exited(self, epoch: int) -> None:
        """Handle the death of every mover of a connection that has ended."""
        self._pulls.movers_exited(epoch)
        self.registration.mark_unmapped(epoch)
        self._finish_suspend_if_unmapped()

    def fail_permanently(self, code: Code, message: str) -> None:
        """End the session: no daemon will accept it any more. After `connection_lost`."""
        self.state = SessionState.CLOSED
        self.close_reason = Refusal(code, message)
        self._pulls.fail_queued(code, message)
        self._publishes.release_all_locally(Code.PUBLISHER_GONE)
        self._emit(Disconnected(code, message))

    def resident_movers_exited(self, now: float, code: Code, why: str) -> None:
        """End the pulls safely: every mover of the present connection ran in this process and is gone."""
        self._pulls.connection_lost(self.epoch, now, code, why)
        self.movers_exited(self.epoch)

    def close(self, code: Code, why: str) -> None:
        """End everything, fence words first: the engine closes the client, or the client failed."""
        self._publishes.release_all_locally(Code.PUBLISHER_GONE)
        self._pulls.close(code, why)
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
        if self.state is not SessionState.READY:
            self._publishes.expire(now)
        if now >= self._reply_deadline:
            raise KvxferdError("the daemon did not answer in time", Code.DAEMON_LOST)

    def next_deadline(self) -> float:
        """Return when `tick` is due next, infinity when nothing is timed."""
        lapse = math.inf if self.state is SessionState.READY else self._publishes.next_deadline()
        poll, retry = self._pending_completions.next_poll, self._publishes.next_retry()
        return min(self._pulls.next_deadline(), self._reply_deadline, lapse, poll, retry)

    def pop_short_request(self, most_bytes: int, now: float) -> Message | None:
        """Return the request to send if the session is READY, one waits, and it has so few bytes of ids."""
        if self.state is not SessionState.READY:
            return None
        return self._outbox.pop_short(most_bytes, self.epoch, now)

    def pop_outgoing(self, now: float) -> Outgoing | None:
        """Return the next message to send, None when there is none now."""
        return self._outbox.pop(self.state is SessionState.READY, self.epoch, now)

    # --- being a rank or a publisher

    def register(self, role: SessionRole, launch: LaunchMover | None = None) -> None:
        """Register as a rank or a publisher. Raises EngineError as `Registration.begin` does."""
        self._check_open()
        self.registration.begin(role, launch)
        self._incarnations = KnownIncarnations()
        if isinstance(role, RankRole) and role.exports is not None:
            self._incarnations.set_own(role.engine.rank, role.exports.incarnation)
        self._register_if_needed(math.inf)

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
        else:
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
            self._register_if_needed(math.inf)

    def _register_if_needed(self, reply_deadline: float) -> None:
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
            self._publishes.release_all_locally(Code.SUSPENDED)  # their bytes go
            self.registration.finish_suspend()
            self._emit(worker.Suspended())

    # --- messages of the daemon

    def carries_fence_page(self, message: worker.DaemonMessage) -> bool:
        """Return whether the message carries the session's fence page."""
        return isinstance(message, worker.Registered) and self.registration.expects_fence_page

    def handle(self, message: worker.DaemonMessage, now: float, page: FencePage | None = None) -> None:
        """Handle a message. Raises KvxferdError when the connection must end; its code tells why.

        `page`: where the message carries a fence page. It is the session's then, or closed.
        """
        match message:
            case worker.TicketDelivered():
                self._pulls.handle_delivered(message)
            case worker.Released():
                self._publishes.handle_released(message)
            case worker.Welcome():
                self._handle_welcome(message, now)
            case worker.Registered():
                self._handle_registered(message, now, page)
            case worker.FdsRequest():
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
            case worker.MoverRequest():
                self._require_state(SessionState.READY, message)
                if outgoing := self.registration.build_new_mover():
                    self._outbox.queue_first(outgoing.message, outgoing.fds)
            case worker.TicketFailed():
                self._pulls.handle_failed(message)
            case worker.TicketQuiesced():
                self._pulls.handle_quiesced(message)
            case worker.PullsInterrupted():
                self._require_state(SessionState.READY, message)
                self._outbox.queue(self._pulls.handle_interrupted(message))
            case worker.PublishRefused():
                self._publishes.handle_refused(message, now)
            case worker.Suspended():
                self._handle_suspended(now)
            case worker.Farewell():
                self._handle_farewell(message)

    def _handle_farewell(self, message: worker.Farewell) -> NoReturn:
        if self.registration.was_registered and message.code in RETRIED_ON_REREGISTER:
            text = f"the daemon has ended the session for now: {message.message}"
            raise KvxferdError(text, Code.DAEMON_LOST)
        raise KvxferdError(message.message, message.code)

    @property
    def has_live_pulls(self) -> bool:
        """Whether a mover may report a delivery."""
        return len(self._pulls) > 0

    @property
    def awaits_movers(self) -> bool:
        """Whether a mover's word or end makes an event, also where the session has ended."""
        return self.has_live_pulls or self.registration.memory_state is MemoryState.SUSPENDING

    def handle_delivered_by_mover(self, delivered: worker.TicketDelivered) -> None:
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
        self.state, self._reply_deadline = SessionState.CONNECTED, math.inf
        self.registration.boot = BootId(message.boot_id)
        self._lease_s, self._pulls.max_hold_s = message.lease_s, message.max_hold_s
        self._register_if_needed(now + REREGISTER_TIMEOUT_S if self.registration.was_registered else math.inf)

    def _handle_mover_offered(self, message: worker.MoverOffered) -> None:
        """Acknowledge the mover: the connection watches it already, so it may have the memory."""
        is_suspended = self.registration.memory_state is MemoryState.SUSPENDED
        if is_suspended or not self.registration.expects_mover_offers:
            raise ProtocolError("the daemon offered a mover that nobody requested", Code.OUT_OF_PLACE)
        self.registration.mark_mapped(self.epoch)
        self._outbox.queue_first(worker.MoverAcknowledged(number=message.number))

    def _handle_registered(self, message: worker.Registered, now: float, page: FencePage | None) -> None:
        try:
            self._require_state(SessionState.REGISTERING, message)
            self.registration.handle_accepted(message, self.epoch)
        except ProtocolError:
            if page is not None:
                page.close()
            raise
        if page is not None:
            self._publishes.switch_fence_page(page)
        self.state, self._reply_deadline = SessionState.READY, math.inf
        self._endpoint = Endpoint(message.endpoint)
        if self.registration.memory_state is MemoryState.SUSPENDING:
            self._outbox.queue(worker.Suspend())
            return
        self._outbox.replay(self._publishes.replay(now, self._lease_s))
        for pull in self._pulls.replay():  # behind what was prepared meanwhile, which it takes
            self._outbox.queue(pull)

    def _handle_refused(self, message: worker.Refused) -> None:
        self._require_state(SessionState.REGISTERING, message)
        was_registered = self.registration.is_registered(self.epoch)
        self.state, self._reply_deadline = (
            SessionState.READY if was_registered else SessionState.CONNECTED,
            math.inf,
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
