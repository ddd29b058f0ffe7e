"""By which transports each child mover has connected, and what a lost connection of it proves."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvxferd.ids import MoverId
from kvxferd.mover.backends import Backend
from kvxferd.mover.disconnects import transports_prove_over
from kvxferd.ucx_log import TransportsUsed

MAX_EARLY_TRANSPORTS = 256  # lines; a mover writes fewer than 10 of them before its first pull


@dataclass(slots=True)
class _Evidence:
    pid: int = -1  # until it is forked
    used: list[TransportsUsed] = field(default_factory=list)
    has_unknown: bool = False  # a line about a connection of it was lost or cannot be parsed


class TransportEvidence:
    """The lines of UCX's log, by mover. They name processes, whose ids may be used again."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._movers: dict[MoverId, _Evidence] = {}
        self._early: dict[int, list[TransportsUsed]] = {}  # by process id

    def add(self, mover: MoverId) -> None:
        """Add a mover that is not forked yet."""
        self._movers[mover] = _Evidence()

    def set_pid(self, mover: MoverId, pid: int) -> None:
        """Take the process id of a mover that was forked.

        An earlier mover of that id is dead, although its exit is not noticed yet. Nobody can tell whose the
        lines of that process are, so they prove nothing of either.
        """
        forked = self._movers[mover]
        for other in self._movers.values():
            if other.pid == pid:
                other.has_unknown = forked.has_unknown = True
        forked.pid = pid
        forked.used += self._early.pop(pid, [])
        self._drop_early()

    def remove(self, mover: MoverId) -> None:
        """Remove a mover that is gone, or was never forked."""
        del self._movers[mover]
        self._drop_early()

    def lose_lines(self) -> None:
        """Lines may be lost, and they may be of any mover."""
        for one in self._movers.values():
            one.has_unknown = True

    def add_line(self, pid: int, used: TransportsUsed) -> MoverId | None:
        """Take one line; return the mover of which it is, if that is known."""
        found = None
        for mover, one in self._movers.items():
            if one.pid == pid:
                one.used.append(used)
                found = mover
        if found is None:
            self._keep_early(pid, used)
        return found

    def _keep_early(self, pid: int, used: TransportsUsed) -> None:
        """Keep a line of a mover whose `Forked` may still arrive, as that comes by another descriptor.

        Where no fork is pending, the line is that of a dead mover or of no mover.
        """
        if not self._has_pending_forks():
            return
        if self.num_early < MAX_EARLY_TRANSPORTS:
            self._early.setdefault(pid, []).append(used)
        else:
            self.lose_lines()

    def _has_pending_forks(self) -> bool:
        return any(one.pid < 0 for one in self._movers.values())

    def _drop_early(self) -> None:
        if not self._has_pending_forks():
            self._early.clear()

    @property
    def num_early(self) -> int:
        """How many lines are kept for movers whose `Forked` has not arrived."""
        return sum(map(len, self._early.values()))

    def transports_of(self, mover: MoverId) -> tuple[TransportsUsed, ...]:
        """Return by which transports it has connected so far."""
        return tuple(self._movers[mover].used)

    def is_complete(self, mover: MoverId) -> bool:
        """Whether every line about a connection of it was read and parsed."""
        return not self._movers[mover].has_unknown

    def has_no_reads_left(self, mover: MoverId) -> bool:
        """Whether no read is in flight any more on a connection that the mover has lost.

        UCX wrote the connection's line before the mover could read over it. So the shell reads the lines
        that are there before it reports a disconnect.
        """
        return self.is_complete(mover) and transports_prove_over(self._backend, self.transports_of(mover))

    def check_integrity(self, movers: set[MoverId]) -> None:
        """Assert that these are the movers, and that no line is kept for nobody."""
        assert self._movers.keys() == movers, (self._movers.keys(), movers)
        assert not self._early or self._has_pending_forks()
        assert self.num_early <= MAX_EARLY_TRANSPORTS
