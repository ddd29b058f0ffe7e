"""A session's pulls: from asked to ended, as data. No I/O; time is an argument.

Each pull says exactly one terminal thing (Delivered or Failed), and Quiesced at most once, only
after a Failed that was not safe: `MOVES` has no other path.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from kvxferd.client.blocks import Packed, unpack
from kvxferd.client.events import Delivered, Emit, Failed, PullTicket, Quiesced
from kvxferd.errors import BusyError, Code, ProtocolError
from kvxferd.ids import Ticket
from kvxferd.wire import common, worker
from kvxferd.wire.limits import MAX_NOTICED

DEADLINE_GRACE_S = 0.5  # the daemon keeps the deadline too, and knows better whether blocks are safe
MOVER_DEATH_S = 1.0  # movers of a dead daemon are gone within this, or something holds them
# An engine of 1,024 running requests has at most as many pulls; 64 times that is one that leaks.
MAX_LIVE_PULLS = 1 << 16


class Phase(Enum):
    """Where a live pull stands."""

    QUEUED = auto()  # no daemon has heard of it
    SENT = auto()  # the daemon owes a terminal message
    LOST = auto()  # its daemon is gone; judged when the mover is dead, or has not died in time
    DOUBT = auto()  # it has failed, and its blocks may still be written
    ENDED = auto()


class Signal(Enum):
    """What can happen to it."""

    SENT = auto()
    DELIVERED = auto()  # daemon: the bytes are there
    FAILED_SAFE = auto()  # daemon: no bytes, nothing writes
    FAILED_UNSAFE = auto()  # daemon: no bytes, something may write
    QUIESCED = auto()  # daemon: nothing writes any more
    CANCELLED = auto()  # engine, before it was sent
    DROPPED = auto()  # the session ends or is suspended, before it was sent
    TIMER = auto()
    LOSS = auto()  # the connection it was sent on has ended
    QUIET = auto()  # every mover of that connection is dead


class Says(Enum):
    """What the engine is told."""

    NOTHING = auto()
    DELIVERED = auto()
    FAILED_SAFE = auto()
    FAILED_UNSAFE = auto()
    QUIESCED = auto()


# A pair that is not here is a bug or a lying daemon.
MOVES: dict[tuple[Phase, Signal], tuple[Phase, Says]] = {
    (Phase.QUEUED, Signal.SENT): (Phase.SENT, Says.NOTHING),
    (Phase.QUEUED, Signal.CANCELLED): (Phase.ENDED, Says.FAILED_SAFE),
    (Phase.QUEUED, Signal.DROPPED): (Phase.ENDED, Says.FAILED_SAFE),
    (Phase.QUEUED, Signal.TIMER): (Phase.ENDED, Says.FAILED_SAFE),
    (Phase.SENT, Signal.DELIVERED): (Phase.ENDED, Says.DELIVERED),
    (Phase.SENT, Signal.FAILED_SAFE): (Phase.ENDED, Says.FAILED_SAFE),
    (Phase.SENT, Signal.FAILED_UNSAFE): (Phase.DOUBT, Says.FAILED_UNSAFE),
    (Phase.SENT, Signal.TIMER): (Phase.DOUBT, Says.FAILED_UNSAFE),
    (Phase.SENT, Signal.LOSS): (Phase.LOST, Says.NOTHING),
    (Phase.LOST, Signal.DELIVERED): (Phase.ENDED, Says.DELIVERED),  # the mover's word outlives the daemon
    (Phase.LOST, Signal.QUIET): (Phase.ENDED, Says.FAILED_SAFE),
    (Phase.LOST, Signal.TIMER): (Phase.DOUBT, Says.FAILED_UNSAFE),
    # A daemon's terminal message after the client gave up by itself proves quiet, no more.
    (Phase.DOUBT, Signal.DELIVERED): (Phase.ENDED, Says.QUIESCED),
    (Phase.DOUBT, Signal.FAILED_SAFE): (Phase.ENDED, Says.QUIESCED),
    (Phase.DOUBT, Signal.FAILED_UNSAFE): (Phase.DOUBT, Says.NOTHING),
    (Phase.DOUBT, Signal.QUIESCED): (Phase.ENDED, Says.QUIESCED),
    (Phase.DOUBT, Signal.QUIET): (Phase.ENDED, Says.QUIESCED),
    (Phase.DOUBT, Signal.LOSS): (Phase.DOUBT, Says.NOTHING),
}


@dataclass(slots=True)
class Pull:
    """One pull that is not over."""

    ticket: PullTicket
    ref: common.TransferRef
    blocks: Packed
    num_tokens: int
    deadline: float
    phase: Phase = Phase.QUEUED
    epoch: int = 0  # the connection it was sent on
    due: float | None = None  # when its timer fires
    code: Code = Code.DEADLINE  # why it fails when its timer fires, or its mover dies
    message: str = ""
    retry_after_s: float = 0.0


class Pulls:
    """Every pull of a session that has not ended, or whose blocks are in doubt."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._live: dict[Ticket, Pull] = {}
        self._timers: list[tuple[float, Ticket]] = []
        self._next = 1
        self._noticed: deque[Ticket] = deque(maxlen=MAX_NOTICED)

    def __len__(self) -> int:
        return len(self._live)

    def ask(
        self,
        ref: common.TransferRef,
        blocks: Packed,
        num_tokens: int,
        deadline: float,
        cancel: Callable[[Ticket], None],
    ) -> PullTicket:
        """Take a pull that is to be sent. Raises BusyError where a limit is reached."""
        if len(self._live) >= MAX_LIVE_PULLS:
            raise BusyError(f"cannot pull {ref.transfer_id}: {MAX_LIVE_PULLS} pulls have not ended", 1.0)
        ticket = PullTicket(Ticket(self._next), ref.transfer_id, cancel)
        self._next += 1
        message = f"cannot pull {ref.transfer_id}: its deadline passed before a daemon could take it"
        pull = Pull(ticket, ref, blocks, num_tokens, deadline, message=message)
        self._live[ticket.number] = pull
        self._arm(pull, deadline)
        return ticket

    def send(self, number: Ticket, epoch: int, now: float) -> worker.Pull | None:
        """Return what to send; None if the pull has ended meanwhile, or its deadline passed."""
        pull = self._live.get(number)
        if pull is None or pull.phase is not Phase.QUEUED:
            return None
        if now >= pull.deadline:
            self._step(pull, Signal.TIMER)
            return None
        pull.epoch = epoch
        pull.message = f"cannot pull {pull.ref.transfer_id}: its deadline passed, and the daemon is silent"
        self._step(pull, Signal.SENT)
        self._arm(pull, pull.deadline + DEADLINE_GRACE_S)
        return worker.Pull(
            ticket=number,
            ref=pull.ref,
            blocks=pull.blocks,
            num_tokens=pull.num_tokens,
            deadline_s=pull.deadline - now,
        )

    def num_id_bytes(self, number: Ticket) -> int:
        """Bytes of block ids of a pull; 0 once it has ended."""
        pull = self._live.get(number)
        return sum(len(one.ids) for one in pull.blocks.values()) if pull is not None else 0

    def cancel(self, number: Ticket) -> bool:
        """Return whether the daemon must be told; a pull that it never heard of fails here and now."""
        pull = self._live.get(number)
        if pull is None:
            return False
        if pull.phase is Phase.QUEUED:
            pull.code, pull.message = Code.CANCELLED, f"pull of {pull.ref.transfer_id} was cancelled"
            self._step(pull, Signal.CANCELLED)
            return False
        return pull.phase is Phase.SENT

    def delivered(self, message: worker.Delivered) -> None:
        """The daemon's word."""
        if pull := self._known(message.ticket):
            self._step(pull, Signal.DELIVERED, message)

    def noticed(self, message: worker.Delivered) -> None:
        """The mover's word, which the daemon may not have heard yet."""
        if (pull := self._known(message.ticket)) is not None and pull.phase is not Phase.DOUBT:
            self._noticed.append(message.ticket)
        self.delivered(message)

    def interrupted(self, message: worker.PullsInterrupted) -> worker.PullsResumed:
        """Return which of these pulls are to be read again. Only after what their mover had to say."""
        tickets = set(message.tickets)
        live = (number for number in tickets if (pull := self._known(number)) and pull.phase is Phase.SENT)
        return worker.PullsResumed(
            number=message.number,
            tickets=tuple(sorted(live)),
            arrived=tuple(sorted(tickets.intersection(self._noticed))),
        )

    def take_noticed(self) -> tuple[Ticket, ...]:
        """Return the last pulls that a mover said Delivered of, and forget them."""
        tickets = tuple(self._noticed)
        self._noticed.clear()
        return tickets

    def failed(self, message: worker.Failed) -> None:
        """The daemon's word."""
        if pull := self._known(message.ticket):
            if pull.phase is Phase.SENT:
                pull.code, pull.message = message.code, message.message
                pull.retry_after_s = message.retry_after_s
            self._step(pull, Signal.FAILED_SAFE if message.safe_to_reuse else Signal.FAILED_UNSAFE)

    def quiesced(self, message: worker.Quiesced) -> None:
        """The daemon's word."""
        if pull := self._known(message.ticket):
            self._step(pull, Signal.QUIESCED)

    def lose(self, epoch: int, now: float, code: Code, why: str) -> None:
        """The connection has ended: its pulls are judged by their mover's death."""
        for pull in [p for p in self._live.values() if p.epoch == epoch and p.phase is not Phase.QUEUED]:
            self._step(pull, Signal.LOSS)
            if pull.phase is Phase.LOST:
                pull.code, pull.message = code, f"cannot pull {pull.ref.transfer_id}: {why}"
                self._arm(pull, min(now + MOVER_DEATH_S, pull.deadline + DEADLINE_GRACE_S))

    def quiet(self, epoch: int) -> None:
        """Nothing that this connection started writes any more. Only after `lose`."""
        for pull in [p for p in self._live.values() if p.epoch == epoch and p.phase is not Phase.QUEUED]:
            self._step(pull, Signal.QUIET)

    def fail_held(self, number: Ticket, why: str) -> None:
        """Fail a pull that no daemon has heard of, if it has not ended."""
        pull = self._live.get(number)
        if pull is not None and pull.phase is Phase.QUEUED:
            pull.code, pull.message = Code.DEVICE_ERROR, f"cannot pull {pull.ref.transfer_id}: {why}"
            self._step(pull, Signal.DROPPED)

    def drop_queued(self, code: Code, why: str) -> None:
        """Fail every pull that no daemon has heard of."""
        for pull in [p for p in self._live.values() if p.phase is Phase.QUEUED]:
            pull.code, pull.message = code, f"cannot pull {pull.ref.transfer_id}: {why}"
            self._step(pull, Signal.DROPPED)

    def close(self, code: Code, why: str) -> None:
        """End every pull. What was sent may still be written: nobody is left to prove otherwise."""
        self.drop_queued(code, why)
        for pull in list(self._live.values()):
            if pull.phase is Phase.SENT:
                pull.code, pull.message = code, f"cannot pull {pull.ref.transfer_id}: {why}"
                self._step(pull, Signal.LOSS)
            if pull.phase is Phase.LOST:
                self._step(pull, Signal.TIMER)

    def expire(self, now: float) -> list[Ticket]:
        """Fail what is due. Returns the tickets that the daemon should be told to cancel."""
        to_cancel: list[Ticket] = []
        while self._timers and self._timers[0][0] <= now:
            due, number = heapq.heappop(self._timers)
            pull = self._live.get(number)
            if pull is None or pull.due != due:
                continue  # the timer of an earlier phase
            if pull.phase is Phase.SENT:
                to_cancel.append(number)
            self._step(pull, Signal.TIMER)
        return to_cancel

    def next_deadline(self) -> float | None:
        """When `expire` wants to be called; maybe too early."""
        return self._timers[0][0] if self._timers else None

    def _arm(self, pull: Pull, when: float) -> None:
        pull.due = when
        heapq.heappush(self._timers, (when, pull.ticket.number))

    def _known(self, number: Ticket) -> Pull | None:
        # A pull that is over here may have ended there at the same time: that word says nothing new.
        if not 0 < number < self._next:
            raise ProtocolError(f"the daemon ended pull {number}, which was never asked", Code.OUT_OF_PLACE)
        return self._live.get(number)

    def _step(self, pull: Pull, signal: Signal, word: worker.Delivered | None = None) -> None:
        if (move := MOVES.get((pull.phase, signal))) is None:
            raise ProtocolError(
                f"pull {pull.ticket.number} cannot take {signal.name} while {pull.phase.name}",
                Code.OUT_OF_PLACE,
            )
        pull.phase, says = move
        if pull.phase in (Phase.ENDED, Phase.DOUBT):
            pull.due = None
        if pull.phase is Phase.ENDED:
            del self._live[pull.ticket.number]
        self._say(pull, says, word)

    def _say(self, pull: Pull, says: Says, word: worker.Delivered | None) -> None:
        match says:
            case Says.NOTHING:
                pass
            case Says.DELIVERED:
                assert word is not None
                self._emit(Delivered(pull.ticket, word.bytes, word.runs, word.wire_s))
            case Says.QUIESCED:
                self._emit(Quiesced(pull.ticket, unpack(pull.blocks)))
            case Says.FAILED_SAFE | Says.FAILED_UNSAFE:
                safe = says is Says.FAILED_SAFE
                blocks = unpack(pull.blocks)
                self._emit(Failed(pull.ticket, pull.code, pull.message, blocks, safe, pull.retry_after_s))
