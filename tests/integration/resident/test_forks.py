"""A process that is forked from a worker with a resident mover holds copies of the mover's descriptors."""

from __future__ import annotations

import os
import select
import socket
import threading

from kvxferd.errors import Code, MoverError
from kvxferd.ids import AgentName
from kvxferd.mover.transport.base import Transport
from kvxferd.resident.thread_mover import ThreadMover

WAIT_MS = 20_000


def readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(WAIT_MS))


def test_a_movers_end_is_known_though_a_forked_process_holds_its_descriptors() -> None:
    """Else its rank would never be suspended, and blocks in doubt stay so until that process ends."""
    inherited: list[int] = []
    may_end = threading.Event()

    def make(agent: AgentName) -> Transport:
        may_end.wait()
        raise MoverError("no library", Code.NIXL_UNAVAILABLE)

    mover = ThreadMover(AgentName("a"), (), make)
    inherited += [os.dup(mover._socket.fileno()), os.dup(mover._quiesced_write_fd)]
    daemon = socket.socket(fileno=os.dup(mover.daemon_end))
    try:
        may_end.set()
        assert readable(mover.fileno())
        assert readable(daemon.fileno())
        while daemon.recv(4096):
            assert readable(daemon.fileno())
        assert mover.wait(0)
    finally:
        daemon.close()
        for fd in inherited:
            os.close(fd)
        mover.close()
