"""One worker session's connection: its socket, and the descriptors that came over it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field

from kvxferd.core.limits.ledger import FairShare
from kvxferd.frame_socket import close_fds
from kvxferd.frame_stream import FrameStream
from kvxferd.ids import SessionId
from kvxferd.memory.fence import FencePage
from kvxferd.unix_socket import Credentials
from kvxferd.wire.fd_batches import FdBatchAssembly
from kvxferd.wire.worker import Register

TURNS_AFTER_EXIT = 64  # of a dead worker: a process forked from it may still send


@dataclass(slots=True)
class WorkerConnection:
    """One session's socket, and the descriptors that came over it."""

    session: SessionId
    stream: FrameStream
    credentials: Credentials
    exit_fd: int  # readable once the worker is dead: a pidfd, or else a pipe
    exit_pipe_writer: int  # if `exit_fd` is a pipe, its other end; else -1
    has_first_frame: bool = False  # whose versions were checked
    fence_page: FencePage | None = None  # from its first use on
    pending_delivery_fd: int = -1  # of a registration that is not committed; -1: there is none
    delivery_fd: int = -1  # on which movers send Delivered themselves
    is_admitted: bool = False  # its registration or attachment was found valid
    has_memory: bool = False  # it was a registration: more descriptors may follow
    early_fds: FdBatchAssembly = field(default_factory=FdBatchAssembly)
    incomplete_register: Register | None = None  # waits for more descriptors
    charged: dict[str, int] = field(default_factory=dict)  # to its user's shares, by name
    pending_fds: tuple[int, ...] = ()  # descriptors of the last Register or Resume
    registered_fds: tuple[int, ...] = ()  # of the current registration
    mover_socket: socket.socket | None = None  # to a resident mover, until it is detached
    num_turns_left: int = TURNS_AFTER_EXIT  # left once its worker is dead
    is_worker_dead: bool = False  # the frames that it sent before are being handled
    is_closing: bool = False  # handles no more frames; queued ones are still sent
    is_ended: bool = False  # the loop no longer watches its socket; released once its events are handled

    def close(self) -> None:
        """Close everything."""
        self.stream.close()
        self.set_mover_socket(None)
        if self.fence_page is not None:
            self.fence_page.close()
        own = (fd for fd in (self.delivery_fd, self.exit_fd, self.exit_pipe_writer) if fd >= 0)
        self.close_pending()
        close_fds([*self.registered_fds, *own])
        self.registered_fds = ()

    def page(self) -> FencePage:
        """Return the session's fence page, made at its first use. Raises OSError."""
        if self.fence_page is None:
            self.fence_page = FencePage.create()
        return self.fence_page

    def charge(self, shares: FairShare, name: str, amount: int) -> bool:
        """Count for the user what the session keeps now. False: it is more, and more than the user may."""
        before = self.charged.get(name, 0)
        if amount == before:
            return True  # nearly always: nothing is kept
        shares.add(self.credentials.uid, amount - before)
        self.charged[name] = amount
        return amount <= before or shares.has_room(self.credentials.uid, 0)

    def close_pending(self) -> None:
        """Close the descriptors that do not belong to a committed registration."""
        close_fds([*self.early_fds.pop_all(), *self.pending_fds])
        self.pending_fds, self.incomplete_register = (), None
        self.set_pending_delivery_fd(-1)

    def set_pending_delivery_fd(self, fd: int) -> None:
        """Keep the delivery socket of an uncommitted registration; -1: there is none."""
        if self.pending_delivery_fd >= 0:
            os.close(self.pending_delivery_fd)
        self.pending_delivery_fd = fd

    def commit_pending(self) -> None:
        """Make the last descriptors those of the registration."""
        close_fds(self.registered_fds)
        self.registered_fds, self.pending_fds = self.pending_fds, ()
        if self.pending_delivery_fd >= 0:
            close_fds([self.delivery_fd] if self.delivery_fd >= 0 else [])
            self.delivery_fd, self.pending_delivery_fd = self.pending_delivery_fd, -1
        self.is_admitted = self.has_memory = True

    def set_mover_socket(self, mover: socket.socket | None) -> None:
        """Keep the socket of a resident mover; close an earlier one."""
        if self.mover_socket is not None:
            self.mover_socket.close()
        self.mover_socket = mover
