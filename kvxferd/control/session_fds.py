"""Assigns the descriptors of a worker's frames to its session, and counts them for its user.

The descriptors of a frame are a list until each has its one owner: a new owner takes its own out of the
list, and what is left is closed. A descriptor that is closed twice may by then be another file, or a socket
of libzmq, which aborts the process when it finds its socket closed.
"""

from __future__ import annotations

import socket

from kvxferd.control.worker_connection import WorkerConnection
from kvxferd.core.events import FdsArrived
from kvxferd.core.limits.ledger import FairShare
from kvxferd.core.limits.table import RETRY_LATER_S
from kvxferd.errors import Code, EngineError, ProtocolError, count_busy_refusal
from kvxferd.frame_socket import close_fds
from kvxferd.memory.validate import check_exports
from kvxferd.wire.common import FdBatch, Refusal
from kvxferd.wire.worker import NewMover, Register, Resume

FD_LIMIT_REFUSAL = Refusal(
    Code.BUSY,
    "cannot take more descriptors: the ranks of this user, or of this node, have all that workers may; "
    "put more memory behind each, raise the daemon's limit of open files, or try again later",
    RETRY_LATER_S,
)


class SessionFds:
    """Keeps the descriptors of all sessions of one socket, each in its `WorkerConnection`."""

    def __init__(self, max_descriptors: int) -> None:
        """`max_descriptors`: of all workers' memory, see `fd_budget`."""
        self.shares = FairShare(max_descriptors)  # by user

    def assign(self, connection: WorkerConnection, message: object, fds: list[int]) -> Refusal | None:
        """Give the session the descriptors that the message assigns, out of `fds`.

        Return why they are refused, or None. Raises ProtocolError.
        """
        match message:
            case FdBatch():
                self._keep_late_fds(connection, message, fds)
            case Register() | Resume():
                return self._keep_registration_fds(connection, message, fds)
            case NewMover():
                if len(fds) != 1:
                    raise ProtocolError(
                        f"cannot take a new mover: {len(fds)} descriptors came, not its socket alone"
                    )
                try:
                    connection.set_mover_socket(pop_mover_socket(fds))
                except EngineError as error:
                    raise ProtocolError(error.message) from error
            case _ if fds:
                raise ProtocolError(f"cannot take descriptors with {type(message).__name__}")
        return None

    def _keep_registration_fds(
        self, connection: WorkerConnection, message: Register | Resume, fds: list[int]
    ) -> Refusal | None:
        if isinstance(message, Resume):
            connection.set_pending_delivery_fd(-1)  # the rank keeps its present one
        elif connection.incomplete_register is not None:
            # The core has the first registration's regions, but the check would use this one's.
            raise ProtocolError(
                "cannot register again: descriptors of the registration before are still to come",
                Code.OUT_OF_PLACE,
            )
        close_fds(connection.pending_fds)
        connection.pending_fds, connection.incomplete_register = (), None
        if isinstance(message, Register):
            if not fds:
                raise ProtocolError(
                    "cannot register without a socket for deliveries, the last descriptor of the frame"
                )
            connection.set_pending_delivery_fd(fds.pop())
            if message.num_descriptors > len(fds) - (message.placement == "resident"):
                connection.incomplete_register = message
        fds[:0] = connection.early_fds.pop_all()
        problem = None
        try:
            connection.set_mover_socket(take_mover_socket(message, fds))
            if connection.incomplete_register is None:
                check_exports(message.regions, fds)
        except EngineError as error:
            problem = Refusal(error.code, error.message)
        if problem is None and not self.charge(connection, len(fds)):
            problem = FD_LIMIT_REFUSAL
            count_busy_refusal("worker_descriptors")
        if problem is not None:
            connection.incomplete_register = None
            self.charge(connection)
        elif connection.incomplete_register is not None:
            self._add_early_fds(connection, 0, fds)
        else:
            connection.pending_fds = tuple(fds)
            fds.clear()
        return problem

    def _keep_late_fds(self, connection: WorkerConnection, part: FdBatch, fds: list[int]) -> None:
        """Keep descriptors that belong to an admitted registration. An attachment has none."""
        if not connection.has_memory:
            raise ProtocolError(
                "cannot take descriptors before the registration that they belong to", Code.OUT_OF_PLACE
            )
        self._add_early_fds(connection, part.first, fds)
        if not self.charge(connection):
            count_busy_refusal("worker_descriptors")
            raise ProtocolError(FD_LIMIT_REFUSAL.message, Code.BUSY)

    def _add_early_fds(self, connection: WorkerConnection, first: int, fds: list[int]) -> None:
        # Once it has not raised, `connection` owns these, and the list those of an earlier start.
        fds[:] = connection.early_fds.add(first, tuple(fds))

    def complete_registration(self, connection: WorkerConnection) -> FdsArrived | None:
        """Return the core's event once all descriptors of a registration have arrived."""
        announced = connection.incomplete_register
        if announced is None or len(connection.early_fds) < announced.num_descriptors:
            return None
        connection.incomplete_register = None
        connection.pending_fds = connection.early_fds.pop_all()
        problem = None
        try:
            check_exports(announced.regions, connection.pending_fds)
        except EngineError as error:
            problem = Refusal(error.code, error.message)
        return FdsArrived(connection.session, problem)

    def charge(self, connection: WorkerConnection, num_more: int = 0) -> bool:
        """Count the session's descriptors and `num_more`; return whether its user may have so many."""
        num_kept = len(connection.early_fds) + num_more
        if connection.incomplete_register is not None:
            num_kept = max(num_kept, connection.incomplete_register.num_descriptors)
        count = num_kept + len(connection.pending_fds) + len(connection.registered_fds)
        return connection.charge(self.shares, "memory", count)


def take_mover_socket(message: Register | Resume, fds: list[int]) -> socket.socket | None:
    """Take a resident mover's socket out of `fds`; None for a child process. Raises EngineError."""
    if message.placement == "resident":
        return pop_mover_socket(fds)
    if message.placement != "child":
        raise EngineError(
            f"cannot place a mover as {message.placement[:80]!r}; child and resident are known",
            Code.REGION_INVALID,
        )
    if any(export.kind == "resident" for export in message.regions):
        raise EngineError(
            "cannot reach memory of the worker's own from a child process: its mover must be resident; "
            "register through kvxferd.resident",
            Code.REGION_INVALID,
        )
    return None


def pop_mover_socket(fds: list[int]) -> socket.socket:
    """Take the last descriptor as the socket of a resident mover.

    Raises EngineError if it is no such socket; then nothing is taken.
    """
    if fds:
        try:
            connected = socket.socket(fileno=fds[-1])
        except OSError:
            pass
        else:
            if (connected.family, connected.type) == (socket.AF_UNIX, socket.SOCK_STREAM):
                fds.pop()
                return connected
            connected.detach()  # not closed: the list still owns it
    raise EngineError(
        "cannot use a resident mover: its socket, a Unix stream, is the last descriptor of its frame",
        Code.REGION_INVALID,
    )
