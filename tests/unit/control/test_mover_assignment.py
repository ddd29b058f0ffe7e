"""A resident mover where the node's movers have another backend: refused, and nothing of it is kept."""

from __future__ import annotations

import os
import socket
from typing import Any, cast

import pytest

from kvxferd.config import MoverConfig
from kvxferd.control.mover_assignment import MoverAssignment
from kvxferd.control.worker_socket import WorkerSocket
from kvxferd.core.effects import RequestMover
from kvxferd.core.events import Event, MoverUnavailable
from kvxferd.core.node import Node
from kvxferd.errors import Code
from kvxferd.ids import BootId, SessionId

SESSION = SessionId(7)


class OneMover:
    """As much of the worker socket as hands over a session's resident mover."""

    def __init__(self, sock: socket.socket, exit_fd: int) -> None:
        self._brought = sock, (os.getpid(), exit_fd)

    def detach_mover(self, session: SessionId) -> Any:
        assert session == SESSION
        return self._brought


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_a_resident_mover_is_refused_beside_another_backend(has_pidfd: bool) -> None:
    ours, theirs = socket.socketpair()
    exit_fd = os.dup(0) if has_pidfd else -1
    events: list[Event] = []
    assignment = MoverAssignment(
        MoverConfig(backend="LIBFABRIC"),
        BootId("here"),
        cast(Node, None),
        cast(WorkerSocket, OneMover(ours, exit_fd)),
        events.append,
    )
    assignment.acquire(RequestMover(SESSION, resident=True))
    (event,) = events
    assert isinstance(event, MoverUnavailable)
    assert (event.session, event.refusal.code) == (SESSION, Code.NIXL_UNAVAILABLE)
    assert "mover.backend here is LIBFABRIC" in event.refusal.message
    assert theirs.recv(1) == b"", "the daemon's end is closed, so the worker's thread ends"
    if has_pidfd:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(exit_fd)
    theirs.close()
