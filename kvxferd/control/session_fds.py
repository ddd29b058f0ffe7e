"""Assigns the descriptors of a worker's frames to its session, and counts them for its user."""

from __future__ import annotations

from kvxferd.control.frame_fds import FrameFds
from kvxferd.control.registration_fds import check_regions, check_registration, detach_mover_socket
from kvxferd.control.worker_connection import WorkerConnection
from kvxferd.core.events import FdsArrived
from kvxferd.core.limits.fair_share import FairShare
from kvxferd.core.limits.table import RETRY_LATER_S
from kvxferd.errors import Code, EngineError, ProtocolError, count_busy_refusal
from kvxferd.frame_socket import close_fds
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

    def __init__(self, shares: FairShare) -> None:
        """`shares` counts the descriptors by user."""
        self._shares = shares

    def assign(self, connection: WorkerConnection, message: object, fds: FrameFds) -> Refusal | None:
        """Give the session the descriptors that the message assigns; return why they are refused, or None."""
        if isinstance(message, FdBatch):
            self._keep_late_fds(connection, message, fds)
            return None
        if isinstance(message, Register | Resume):
            return self._keep_registration_fds(connection, message, fds)
        if isinstance(message, NewMover):
            if len(fds) != 1:
                raise ProtocolError(
                    f"cannot take a new mover: {len(fds)} descriptors came, not its socket alone"
                )
            try:
                connection.set_mover_socket(detach_mover_socket(fds))
            except EngineError as error:
                raise ProtocolError(error.message) from error
            return None
        if fds:
            raise ProtocolError(f"cannot take descriptors with {type(message).__name__}")
        return None

    def _keep_registration_fds(
        self, connection: WorkerConnection, message: Register | Resume, fds: FrameFds
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
            connection.set_pending_delivery_fd(fds.detach_last())
            if message.num_descriptors > len(fds) - (message.placement == "resident"):
                connection.incomplete_register = message
        fds.prepend(connection.early_fds.pop_all())
        mover, problem = check_registration(message, fds, connection.incomplete_register is None)
        connection.set_mover_socket(mover)
        if problem is None and not self.charge(connection, len(fds)):
            problem = FD_LIMIT_REFUSAL
            count_busy_refusal("worker_descriptors")
        if problem is not None:
            fds.close()
            connection.incomplete_register = None
            self.charge(connection)
        elif connection.incomplete_register is not None:
            self._add_early_fds(connection, 0, fds)
        else:
            connection.pending_fds = fds.detach_all()
        return problem

    def _keep_late_fds(self, connection: WorkerConnection, part: FdBatch, fds: FrameFds) -> None:
        """Keep descriptors that belong to an admitted registration. An attachment has none."""
        if not connection.has_memory:
            raise ProtocolError(
                "cannot take descriptors before the registration that they belong to", Code.OUT_OF_PLACE
            )
        self._add_early_fds(connection, part.first, fds)
        if not self.charge(connection):
            count_busy_refusal("worker_descriptors")
            raise ProtocolError(FD_LIMIT_REFUSAL.message, Code.BUSY)

    def _add_early_fds(self, connection: WorkerConnection, first: int, fds: FrameFds) -> None:
        surplus_fds = connection.early_fds.add(first, fds.fds)
        fds.detach_all()  # only now `connection` owns them
        close_fds(surplus_fds)

    def complete_registration(self, connection: WorkerConnection) -> FdsArrived | None:
        """Return the core's event once all descriptors of a registration have arrived."""
        announced = connection.incomplete_register
        if announced is None or len(connection.early_fds) < announced.num_descriptors:
            return None
        connection.incomplete_register = None
        connection.pending_fds = connection.early_fds.pop_all()
        return FdsArrived(connection.session, check_regions(announced, connection.pending_fds))

    def charge(self, connection: WorkerConnection, num_more: int = 0) -> bool:
        """Count the session's descriptors and `num_more`; return whether its user may have so many."""
        uid = connection.credentials.uid
        num_kept = len(connection.early_fds) + num_more
        if connection.incomplete_register is not None:
            num_kept = max(num_kept, connection.incomplete_register.num_descriptors)
        count = num_kept + len(connection.pending_fds) + len(connection.registered_fds)
        self._shares.add(uid, count - connection.num_charged_fds)
        is_more, connection.num_charged_fds = count > connection.num_charged_fds, count
        return not is_more or self._shares.has_room(uid, 0)
