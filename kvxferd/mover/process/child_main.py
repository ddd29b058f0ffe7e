"""A mover's process after the fork: it isolates itself, makes its agent, and serves."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import select
import signal
import socket
from typing import NamedTuple, NoReturn

from kvxferd.die_with_parent import die_with_parent
from kvxferd.errors import KvxferdError
from kvxferd.frame_socket import FrameSocket
from kvxferd.ids import AgentName
from kvxferd.mover.backends import Backend
from kvxferd.mover.linux_process import (
    close_all_but,
    exit_when,
    prepare_thread,
)
from kvxferd.mover.process.backoff import PollBackoff
from kvxferd.mover.process.loop import MoverLoop
from kvxferd.mover.transport.nixl import NixlTransport, TransferLibrary
from kvxferd.mover.transport.ucx_lines import UcxLines

_LOG = logging.getLogger(__name__)


class MoverCount:
    """How many movers run. The forkserver counts; the movers read."""

    def __init__(self, num_cores: int) -> None:
        self._num_cores = num_cores
        self._page = mmap.mmap(-1, mmap.PAGESIZE)  # shared by the processes forked later
        self._count = ctypes.c_uint32.from_buffer(self._page)

    def set(self, num_movers: int) -> None:
        """Set the number; the forkserver does."""
        self._count.value = num_movers

    @property
    def is_oversubscribed(self) -> bool:
        """Whether there are more movers than cores, so that one that spins keeps another from working."""
        return self._count.value > self._num_cores


class ForkContext(NamedTuple):
    """What a mover inherits from the forkserver."""

    forkserver_pid: int
    mover_count: MoverCount
    keep_fds: tuple[int, ...]  # descriptors that stay open besides the mover's own
    backend: Backend


def run(
    socket_fd: int,
    output: tuple[int, int],
    agent: AgentName,
    library: TransferLibrary,
    context: ForkContext,
) -> NoReturn:
    """Serve as a mover on the socket until the daemon, the forkserver or the worker is gone.

    `output`: what `open_output` returned. Ends the process; never returns.
    """
    status = 1
    try:
        die_with_parent(context.forkserver_pid)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        prepare_thread("kvxferd-mover")
        writing, reading = output
        os.dup2(writing, 1)
        close_all_but((0, 1, 2, socket_fd, reading, *context.keep_fds))
        # No events: poll reports a hang-up always, and nothing else ends the mover.
        exit_when(socket_fd, 0, "lifeline")
        stream = FrameSocket(socket.socket(fileno=socket_fd))
        ucx_lines = UcxLines(reading, context.backend)
        transport = NixlTransport(library, agent, context.backend, ucx_lines)
        backoff = PollBackoff(lambda: context.mover_count.is_oversubscribed)
        MoverLoop(stream, transport, backoff, _exit_with_worker, ucx_lines=ucx_lines).serve()
        status = 0
    except KvxferdError as error:
        _LOG.error("mover ended: agent=%s reason=%s", agent, error.message)
    except ConnectionError:
        status = 0  # the daemon is gone
    except BaseException:
        _LOG.exception("mover ended: agent=%s", agent)
    finally:
        # Not sys.exit: destructors of the transfer library have nothing left to do, and could hang.
        os._exit(status)


def _exit_with_worker(pidfd: int) -> None:
    exit_when(pidfd, select.POLLIN, "worker")
