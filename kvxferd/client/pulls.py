"""A session's pulls, from `pull` to their end, as data. No I/O; time is an argument.

Each pull emits exactly one terminal event (Delivered or Failed), and Quiesced at most once, only
after a Failed that was not safe: `MOVES` has no other path.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum, auto

from kvxferd.client.events import Delivered, Emit, Failed, PullTicket, Quiesced
from kvxferd.errors import BusyError, Code, ProtocolError
from kvxferd.ids import Ticket
from kvxferd.layout import BlocksByGroup, unpack_blocks
from kvxferd.wire import worker
from kvxferd.wire.common import TransferRef
from kvxferd.wire.limits import MAX_DELIVERED_BY_MOVER

DEADLINE_GRACE_S = 0.5  # the daemon keeps the deadline too, and knows better whether blocks are safe
MOVER_DEATH_S = 1.0  # movers of a dead daemon are gone within this, or something holds them
# An engine of 1,024 running requests has at most as many pulls; 64 times that is one that leaks.
MAX_LIVE_PULLS = 1 << 16
MIN_STALE_TIMERS = 1024  # some 100 KB; with more, and more than the live pulls have, they are dropped


class ClientPullPhase(IntEnum):  # as a key it costs no call of Python's
    """The state of a live pull."""

    QUEUED = auto()  # no daemon has received it
    SENT = auto()  # the daemon owes a terminal message
    LOST = auto()  # its daemon is gone; judged when the mover is dead, or has not died in time
    IN_DOUBT = auto()  # it has failed, and its blocks may still be written
    ENDED = auto()


class ClientPullSignal(IntEnum):
    """What can happen to a pull."""

    SENT = auto()
    DELIVERED = auto()  # daemon: the bytes are there
    FAILED_SAFE = auto()  # daemon: no bytes, nothing writes
    FAILED_UNSAFE = auto()  # daemon: no bytes, something may write
    QUIESCED = auto()  # daemon: nothing writes any more
    CANCELLED = auto()  # engine, before it was sent
    DROPPED = auto()  # the session ends or is suspended, before it was sent
    TIMER = auto()
    CONNECTION_LOST = auto()  # the connection it was sent on has ended
    MOVERS_EXITED = auto()  # every mover of that connection is dead


class EngineEvent(Enum):
    """The event that a move emits to the engine."""

    NOTHING = auto()
    DELIVERED = auto()
    FAILED_SAFE = auto()
    FAILED_UNSAFE = auto()
    QUIESCED = auto()


# A pair that is not here is a bug of the client or of the daemon.
MOVES: dict[tuple[ClientPullPhase, ClientPullSignal], tuple[ClientPullPhase, EngineEvent]] = {
    (ClientPullPhase.QUEUED, ClientPullSignal.SENT): (ClientPullPhase.SENT, EngineEvent.NOTHING),
    (ClientPullPhase.QUEUED, ClientPullSignal.CANCELLED): (ClientPullPhase.ENDED, EngineEvent.FAILED_SAFE),
    (ClientPullPhase.QUEUED, ClientPullSignal.DROPPED): (ClientPullPhase.ENDED, EngineEvent.FAILED_SAFE),
    (ClientPullPhase.QUEUED, ClientPullSignal.TIMER): (ClientPullPhase.ENDED, EngineEvent.FAILED_SAFE),
    (ClientPullPhase.SENT, ClientPullSignal.DELIVERED): (ClientPullPhase.ENDED, EngineEvent.DELIVERED),
    (ClientPullPhase.SENT, ClientPullSignal.FAILED_SAFE): (ClientPullPhase.ENDED, EngineEvent.FAILED_SAFE),
    (ClientPullPhase.SENT, ClientPullSignal.FAILED_UNSAFE): (
        ClientPullPhase.IN_DOUBT,
        EngineEvent.FAILED_UNSAFE,
    ),
    (ClientPullPhase.SENT, ClientPullSignal.TIMER): (ClientPullPhase.IN_DOUBT, EngineEvent.FAILED_UNSAFE),
    (ClientPullPhase.SENT, ClientPullSignal.CONNECTION_LOST): (ClientPullPhase.LOST, EngineEvent.NOTHING),
    (ClientPullPhase.LOST, ClientPullSignal.DELIVERED): (
        ClientPullPhase.ENDED,
        EngineEvent.DELIVERED,
    ),  # the mover's own message outlives the daemon
    (ClientPullPhase.LOST, ClientPullSignal.MOVERS_EXITED): (ClientPullPhase.ENDED, EngineEvent.FAILED_SAFE),
    (ClientPullPhase.LOST, ClientPullSignal.TIMER): (ClientPullPhase.IN_DOUBT, EngineEvent.FAILED_UNSAFE),
    # After the client gave up by itself, a daemon's terminal message proves only that nothing writes.
    (ClientPullPhase.IN_DOUBT, ClientPullSignal.DELIVERED): (ClientPullPhase.ENDED, EngineEvent.QUIESCED),
    (ClientPullPhase.IN_DOUBT, ClientPullSignal.FAILED_SAFE): (ClientPullPhase.ENDED, EngineEvent.QUIESCED),
    (ClientPullPhase.IN_DOUBT, ClientPullSignal.FAILED_UNSAFE): (
        ClientPullPhase.IN_DOUBT,
        EngineEvent.NOTHING,
    ),
    (ClientPullPhase.IN_DOUBT, ClientPullSignal.QUIESCED): (ClientPullPhase.ENDED, EngineEvent.QUIESCED),
    (ClientPullPhase.IN_DOUBT, ClientPullSignal.MOVERS_EXITED): (ClientPullPhase.ENDED, EngineEvent.QUIESCED),
}


@dataclass(slots=True)
class ClientPull:
    """One pull that has not ended."""

    ticket: PullTicket
    ref: TransferRef
    blocks: BlocksByGroup
    num_tokens: int
    deadline: float
    phase: ClientPullPhase = ClientPullPhase.QUEUED
    epoch: int = 0  # the connection it was sent on
    timer_at: float | None = None  # when its timer fires
    code: Code = Code.DEADLINE  # why it fails when its timer fires, or its mover dies
    message: str = ""
    retry_after_s: float = 0.0
    progressive: bool = False
    awaits_gpu: bool = False  # its blocks are still in use: no daemon receives it


class ClientPulls:
    """Every pull of a session that has not ended, or whose blocks are in doubt."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._live: dict[Ticket, ClientPull] = {}
        self._timers: list[tuple[float, Ticket]] = []
        self._next_number = 1
        self.max_hold_s = 0.0  # for which the daemon has a progressive pull wait until all is ready
        self._delivered_by_mover: deque[Ticket] = deque(maxlen=MAX_DELIVERED_BY_MOVER)

    def __len__(self) -> int:
        return len(self._live)

    def add(
        self,
        ref: TransferRef,
        blocks: BlocksByGroup,
        num_tokens: int,
        deadline: float,
        cancel: Callable[[Ticket], None],
    ) -> ClientPull:
        """Add a pull, which the outbox sends. Raises BusyError where a limit is reached."""
        if len(self._live) >= MAX_LIVE_PULLS:
            raise BusyError(f"cannot pull {ref.transfer_id}: {MAX_LIVE_PULLS} pulls have not ended", 1.0)
        ticket = PullTicket(Ticket(self._next_number), ref.transfer_id, cancel)
        self._next_number += 1
        message = f"cannot pull {ref.transfer_id}: its deadline passed before a daemon could take it"
        pull = ClientPull(ticket, ref, blocks, num_tokens, deadline, message=message)
        self._live[ticket.number] = pull
        self._set_timer(pull, deadline)
        return pull

    def build_message(self, pull: ClientPull, epoch: int, now: float) -> worker.PullRequest | None:
        """Return the message to send, with the remaining time; None if the pull has ended meanwhile."""
        if pull.phase is not ClientPullPhase.QUEUED or now >= pull.deadline:  # then its timer ends it
            return None
        pull.epoch = epoch
        pull.message = f"cannot pull {pull.ref.transfer_id}: its deadline passed, and the daemon is silent"
        self._move(pull, ClientPullSignal.SENT)
        deadline_s = pull.deadline - now
        if pull.progressive:
            pull.deadline += self.max_hold_s
        self._set_timer(pull, pull.deadline + DEADLINE_GRACE_S)
        return worker.PullRequest(
            ticket=pull.ticket.number,
            ref=pull.ref,
            blocks=pull.blocks,
            num_tokens=pull.num_tokens,
            deadline_s=deadline_s,
            progressive=pull.progressive,
        )

    def replay(self) -> list[ClientPull]:
        """Return the pulls that were never sent, and may be."""
        return [p for p in self._live.values() if p.phase is ClientPullPhase.QUEUED and not p.awaits_gpu]

    def cancel(self, number: Ticket) -> bool:
        """Return whether `Cancel` must be sent; a pull that was never sent fails at once."""
        pull = self._live.get(number)
        if pull is None:
            return False
        if pull.phase is ClientPullPhase.QUEUED:
            _set_reason(pull, Code.CANCELLED, "it was cancelled")
            self._move(pull, ClientPullSignal.CANCELLED)
            return False
        return pull.phase is ClientPullPhase.SENT

    def handle_delivered(self, message: worker.TicketDelivered) -> None:
        """Handle the daemon's Delivered."""
        if pull := self._find(message.ticket):
            self._move(pull, ClientPullSignal.DELIVERED, message)

    def handle_delivered_by_mover(self, message: worker.TicketDelivered) -> None:
        """Handle the mover's own Delivered, which the daemon may not have received yet."""
        if (pull := self._find(message.ticket)) is not None and pull.phase is not ClientPullPhase.IN_DOUBT:
            self._delivered_by_mover.append(message.ticket)
        self.handle_delivered(message)

    def handle_interrupted(self, message: worker.PullsInterrupted) -> worker.PullsResumed:
        """Return which of these pulls are to be read again.

        Call it only after every delivery that their mover sent has been handled.
        """
        tickets = set(message.tickets)
        live = (
            number
            for number in tickets
            if (pull := self._find(number)) and pull.phase is ClientPullPhase.SENT
        )
        return worker.PullsResumed(
            number=message.number,
            tickets=tuple(sorted(live)),
            arrived=tuple(sorted(tickets.intersection(self._delivered_by_mover))),
        )

    def pop_delivered_by_mover(self) -> tuple[Ticket, ...]:
        """Return and remove the last pulls that a mover reported as delivered."""
        tickets = tuple(self._delivered_by_mover)
        self._delivered_by_mover.clear()
        return tickets

    def handle_failed(self, message: worker.TicketFailed) -> None:
        """Handle the daemon's Failed."""
        if pull := self._find(message.ticket):
            if pull.phase is ClientPullPhase.SENT:
                pull.code, pull.message = message.code, message.message
                pull.retry_after_s = message.retry_after_s
            self._move(
                pull,
                ClientPullSignal.FAILED_SAFE if message.safe_to_reuse else ClientPullSignal.FAILED_UNSAFE,
            )

    def handle_quiesced(self, message: worker.TicketQuiesced) -> None:
        """Handle the daemon's Quiesced."""
        if pull := self._find(message.ticket):
            self._move(pull, ClientPullSignal.QUIESCED)

    def connection_lost(self, epoch: int, now: float, code: Code, why: str) -> None:
        """Handle the end of the connection: its pulls are decided by the death of their mover.

        Those that are lost already, as the session closes, keep their reason.
        """
        for pull in self._sent_in(epoch):
            if pull.phase is ClientPullPhase.SENT:
                self._move(pull, ClientPullSignal.CONNECTION_LOST)
                _set_reason(pull, code, why)
                self._set_timer(pull, min(now + MOVER_DEATH_S, pull.deadline + DEADLINE_GRACE_S))

    def movers_exited(self, epoch: int) -> None:
        """End the connection's pulls: nothing that it started writes any more. After `connection_lost`."""
        for pull in self._sent_in(epoch):
            self._move(pull, ClientPullSignal.MOVERS_EXITED)

    def _sent_in(self, epoch: int) -> list[ClientPull]:
        return [p for p in self._live.values() if p.epoch == epoch and p.phase is not ClientPullPhase.QUEUED]

    def gpu_failed(self, pull: ClientPull, why: str) -> None:
        """Fail a pull that was never sent, if it has not ended."""
        if pull.phase is ClientPullPhase.QUEUED:
            _set_reason(pull, Code.DEVICE_ERROR, why)
            self._move(pull, ClientPullSignal.DROPPED)

    def fail_queued(self, code: Code, why: str) -> None:
        """Fail every pull that was never sent."""
        for pull in [p for p in self._live.values() if p.phase is ClientPullPhase.QUEUED]:
            _set_reason(pull, code, why)
            self._move(pull, ClientPullSignal.DROPPED)

    def close(self, code: Code, why: str) -> None:
        """End every pull. The blocks of a pull that was sent may still be written: Failed is not safe."""
        self.fail_queued(code, why)
        for pull in list(self._live.values()):
            if pull.phase is ClientPullPhase.SENT:
                _set_reason(pull, code, why)
                self._move(pull, ClientPullSignal.CONNECTION_LOST)
            if pull.phase is ClientPullPhase.LOST:
                self._move(pull, ClientPullSignal.TIMER)

    def expire(self, now: float) -> list[Ticket]:
        """Fail the pulls that are due. Return the tickets to send `Cancel` for."""
        to_cancel: list[Ticket] = []
        while self._timers and self._timers[0][0] <= now:
            due, number = heapq.heappop(self._timers)
            pull = self._live.get(number)
            if pull is None or pull.timer_at != due:
                continue  # the timer of an earlier phase
            if pull.phase is ClientPullPhase.SENT:
                to_cancel.append(number)
            self._move(pull, ClientPullSignal.TIMER)
        return to_cancel

    def next_deadline(self) -> float:
        """Return when `expire` is due next, infinity while nothing is timed; it may be too early."""
        return self._timers[0][0] if self._timers else math.inf

    def _set_timer(self, pull: ClientPull, when: float) -> None:
        pull.timer_at = when
        heapq.heappush(self._timers, (when, pull.ticket.number))
        # Timers of earlier phases and of ended pulls stay until they are due, which may be in years.
        if len(self._timers) > MIN_STALE_TIMERS + 2 * len(self._live):
            due = ((live.timer_at, number) for number, live in self._live.items())
            self._timers = [(at, number) for at, number in due if at is not None]
            heapq.heapify(self._timers)

    def _find(self, number: Ticket) -> ClientPull | None:
        # A pull that has ended here may have ended in the daemon at the same time: that changes nothing.
        if not 0 < number < self._next_number:
            raise ProtocolError(
                f"the daemon ended pull {number}, which was never requested", Code.OUT_OF_PLACE
            )
        return self._live.get(number)

    def _move(
        self, pull: ClientPull, signal: ClientPullSignal, delivered: worker.TicketDelivered | None = None
    ) -> None:
        if (move := MOVES.get((pull.phase, signal))) is None:
            raise ProtocolError(
                f"pull {pull.ticket.number} cannot take {signal.name} while {pull.phase.name}",
                Code.OUT_OF_PLACE,
            )
        pull.phase, event = move
        if pull.phase in (ClientPullPhase.ENDED, ClientPullPhase.IN_DOUBT):
            pull.timer_at = None
        if pull.phase is ClientPullPhase.ENDED:
            del self._live[pull.ticket.number]
        self._emit_event(pull, event, delivered)
        if pull.phase is ClientPullPhase.ENDED:
            pull.blocks = {}  # the outbox may still hold the pull, and must not keep its ids alive

    def _emit_event(
        self, pull: ClientPull, event: EngineEvent, delivered: worker.TicketDelivered | None
    ) -> None:
        match event:
            case EngineEvent.NOTHING:
                pass
            case EngineEvent.DELIVERED:
                assert delivered is not None
                pull.ticket.delivered = True
                self._emit(Delivered(pull.ticket, delivered.bytes, delivered.runs, delivered.wire_s))
            case EngineEvent.QUIESCED:
                pull.ticket.delivered = False
                self._emit(Quiesced(pull.ticket, unpack_blocks(pull.blocks)))
            case EngineEvent.FAILED_SAFE | EngineEvent.FAILED_UNSAFE:
                safe = event is EngineEvent.FAILED_SAFE
                blocks = unpack_blocks(pull.blocks)
                pull.ticket.delivered = False if safe else None
                self._emit(Failed(pull.ticket, pull.code, pull.message, blocks, safe, pull.retry_after_s))


def _set_reason(pull: ClientPull, code: Code, why: str) -> None:
    """Set the code and message with which the pull fails."""
    pull.code, pull.message = code, f"cannot pull {pull.ref.transfer_id}: {why}"
