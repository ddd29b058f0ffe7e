"""What must hold, whatever goes wrong. Everything here raises `Violation`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxferd.core.sink.pulls import MAX_MOVERS_LOST
from tests.property.simulation.agenda import Agenda
from tests.property.simulation.memory import UNIT_BYTES, Buffer

if TYPE_CHECKING:
    from tests.property.simulation.mover import Mover
    from tests.property.simulation.process import Process

GRACE_S = 1.0  # after its deadline a pull must have ended
MAX_RETRIES = 1  # of a read that has failed
DOUBT_S = 30.0  # so long its blocks may be in doubt: a mover that hangs is retired and killed


class Violation(AssertionError):
    """A promise is broken. `kind`: wrong_bytes, violations, hung or leaked."""

    def __init__(self, kind: str, text: str, number: int = 1) -> None:
        super().__init__(text)
        self.kind = kind
        self.number = number


@dataclass(eq=False)
class GpuWork:
    """A kernel that was launched; see `kvxferd.client.gpu_events.Completion`."""

    is_done: bool = False

    def query(self) -> bool:
        """Return whether it is done."""
        return self.is_done


@dataclass(eq=False)
class Pull:
    """One pull of one rank: an attempt to get a transfer."""

    process: Process
    ticket: int
    number: int  # of the transfer's content
    ids: list[int]
    num_tokens: int
    deadline: float
    wanted: Wanted
    after: GpuWork
    num_killed: int | None = None  # movers that have died of it; None: it is not deadly
    num_failed: int = 0  # reads of it that failed in the transport, and are over
    ended: str = ""  # delivered, failed, in-doubt
    is_quiet: bool = False
    ended_at: float = 0.0


@dataclass(eq=False)
class Wanted:
    """What one rank is to get of one transfer, in however many attempts."""

    attempts: int = 0
    is_delivered: bool = False


class Oracle:
    """Watches memory, and the events of all engines."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self.memories: dict[Buffer, Process] = {}
        self.open_pulls: dict[Pull, None] = {}
        self.wanted: list[Wanted] = []
        self.num_checked = 0

    # --- memory

    def on_write(self, buffer: Buffer, offset: int, size: int) -> None:
        """A mover writes into shared memory."""
        process = self.memories.get(buffer)
        if process is None:
            raise Violation("violations", f"a mover writes into {buffer.name}")
        if buffer.is_freed:
            raise Violation("violations", f"{buffer.name} is written after Suspended")
        if not process.is_alive or process.memory is not buffer:
            return
        assert process.content is not None
        block_of = process.content.block_of
        for unit in range(offset // UNIT_BYTES, (offset + size - 1) // UNIT_BYTES + 1):
            block = block_of[unit]
            if block not in process.owners:
                raise Violation(
                    "violations", f"block {block} of {process.name} is written while no pull may do so"
                )
            if not process.owners[block].after.is_done:
                text = f"block {block} of {process.name} is written before its GPU has done with it"
                raise Violation("violations", text)

    def mover_bound(self, mover: Mover, memory: Buffer) -> None:
        """A mover has mapped a rank's memory."""
        if memory.is_freed:
            raise Violation("violations", f"{mover.name} maps {memory.name} after Suspended")

    def suspended(self, process: Process) -> None:
        """A rank is told that nobody maps its memory."""
        memory = process.memory
        assert memory is not None
        mapping = [mover.name for mover in process.movers if mover.is_alive and mover.transport.maps(memory)]
        if mapping:
            raise Violation("violations", f"{process.name} is suspended and mapped by {mapping}")
        waiting = [pull.ticket for pull in self.open_pulls if pull.process is process]
        if waiting:
            text = f"{process.name} is suspended, and its pulls {waiting} have not ended"
            raise Violation("violations", text)

    # --- pulls

    def pull_started(self, pull: Pull) -> None:
        """A rank has called `pull`."""
        self.open_pulls[pull] = None
        pull.process.at(pull.deadline + GRACE_S + 0.001, self._check_hung, pull)

    def _check_hung(self, pull: Pull) -> None:
        if pull.ended:
            return
        # A process that was stopped has its time from there on.
        due = max(pull.deadline, pull.process.last_stop_at) + GRACE_S
        if self._agenda.now < due:
            pull.process.at(due + 0.001, self._check_hung, pull)
            return
        raise Violation("hung", f"pull {pull.ticket} of {pull.process.name} has not ended by its deadline")

    def pull_ended(self, pull: Pull, how: str) -> None:
        """A pull's terminal event has come."""
        if pull.ended:
            raise Violation("violations", f"pull {pull.ticket} of {pull.process.name} ended twice")
        pull.ended, pull.ended_at = how, self._agenda.now
        self.open_pulls.pop(pull, None)
        if how == "delivered":
            self._check_bytes(pull)
            pull.wanted.is_delivered = True
        elif how == "in-doubt":
            pull.process.after(DOUBT_S, self._check_doubt, pull)

    def _check_doubt(self, pull: Pull) -> None:
        process = pull.process
        if pull.is_quiet or not process.is_alive:
            return
        if any(m.is_alive and m.is_stopped and not m.daemon.is_alive for m in process.movers):
            process.after(DOUBT_S, self._check_doubt, pull)  # nobody is there who could kill it
            return
        raise Violation("hung", f"pull {pull.ticket} of {process.name} is in doubt for {DOUBT_S:g} s")

    def read_kills(self, pull: Pull) -> bool:
        """A mover is to read for the pull; return whether it dies of that."""
        if pull.num_failed > MAX_RETRIES:
            text = f"pull {pull.ticket} of {pull.process.name} is read again after {pull.num_failed} failures"
            raise Violation("violations", text)
        if pull.num_killed is None:
            return False
        pull.num_killed += 1
        if pull.num_killed > MAX_MOVERS_LOST + 1:
            text = f"pull {pull.ticket} of {pull.process.name} has killed {pull.num_killed} movers"
            raise Violation("violations", text)
        return True

    def _check_bytes(self, pull: Pull) -> None:
        process = pull.process
        assert process.content is not None
        assert process.memory is not None
        self.num_checked += 1
        wrong = process.content.num_wrong(process.memory.bytes, pull.ids, pull.num_tokens, pull.number)
        if wrong:
            text = f"pull {pull.ticket} of {process.name} delivered {wrong} wrong bytes of t{pull.number}"
            raise Violation("wrong_bytes", text, wrong)

    def pull_quiesced(self, pull: Pull) -> None:
        """Nothing writes a failed pull's blocks any more."""
        if pull.ended != "in-doubt" or pull.is_quiet:
            raise Violation("violations", f"pull {pull.ticket} of {pull.process.name} was safe before")
        pull.is_quiet = True

    def process_died(self, process: Process) -> None:
        """Nobody waits for its pulls any more."""
        for pull in [pull for pull in self.open_pulls if pull.process is process]:
            del self.open_pulls[pull]
