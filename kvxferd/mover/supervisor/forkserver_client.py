"""The daemon's end of the forkserver: starts it, requests movers from it, and detects its exit."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from kvxferd.errors import ProtocolError
from kvxferd.frame_socket import LOST_FD, close_fds, dup_fds
from kvxferd.frame_stream import FrameStream
from kvxferd.ids import AgentName, MoverId
from kvxferd.mover.backends import Backend, backend_environment
from kvxferd.mover.forkserver_protocol import (
    FROM_FORKSERVER,
    Fork,
    Forked,
    ForkFailed,
    LibraryLoaded,
    LibraryUnavailable,
)
from kvxferd.mover.shm import remove_shm_directory
from kvxferd.mover.supervisor.stderr_reader import StderrReader
from kvxferd.wire.codec import encode
from kvxferd.wire.framing import Frame

_LOG = logging.getLogger(__name__)

# What UCX prints while 64 ranks connect, 100 lines of 150 bytes each; an unprivileged user gets no more.
STDERR_PIPE_BYTES = 1 << 20

ForkserverMessage = LibraryLoaded | LibraryUnavailable | Forked | ForkFailed


class ForkserverClient:
    """One run of `kvxferd.mover.process.forkserver`.

    The constructor raises OSError, and then leaves neither process nor descriptor behind.

    `on_message` gets its messages, with the pidfd that came with a `Forked` (which the callee owns).
    `on_exit` is called once, after the last message.
    """

    def __init__(
        self,
        start: Callable[[int, int], ForkserverProcess],
        on_message: Callable[[ForkserverMessage, int], None],
        on_exit: Callable[[], None],
    ) -> None:
        """`start` is called with the process's ends of its socket and of the pipe for standard error."""
        self._on_message = on_message
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        with ExitStack() as undoing:
            ours, theirs = socket.socketpair()
            undoing.callback(ours.close)
            with theirs:
                reading, writing = _stderr_pipe()
                undoing.callback(os.close, reading)
                try:
                    self._process = start(theirs.fileno(), writing)
                finally:
                    os.close(writing)
            undoing.pop_all()
        self._stream = FrameStream(ours, self._read, self._on_stream_end)
        self._stream.accept_lost_fds()
        self._stderr = StderrReader(reading)
        self._stream.set_reading()
        self._loop.add_reader(self._process.pidfd, self._handle_exit)

    @property
    def pid(self) -> int:
        """The forkserver's process id."""
        return self._process.pid

    def fork(self, mover: MoverId, agent: AgentName, sock: socket.socket) -> None:
        """Request a mover on the given end of a socketpair, which the caller closes.

        After `shutdown` nothing is requested: `on_exit` follows.
        """
        self._stream.send(encode(Fork(mover=mover, agent=agent)), dup_fds([sock.fileno()]))

    def shutdown(self) -> None:
        """Make it end its movers and itself; `on_exit` follows. Idempotent."""
        self._stream.close()

    def kill(self) -> None:
        """Kill its process, and so its movers, whatever they do; `on_exit` follows. Idempotent."""
        self._process.kill()

    def _read(self) -> bool:
        return self._stream.read(self._decode_frame)

    def _on_stream_end(self, reason: str) -> None:
        if reason:
            _LOG.error("forkserver cut off: reason=%s", reason)
        self._stream.close()
        self.kill()

    def _decode_frame(self, frame: Frame) -> None:
        try:
            message = FROM_FORKSERVER.decode(frame.payload)
            if len(frame.fds) != isinstance(message, Forked):
                raise ProtocolError(f"cannot take {len(frame.fds)} descriptors with {type(message).__name__}")
        except ProtocolError:
            close_fds(frame.fds)
            raise
        if isinstance(message, Forked) and frame.fds == (LOST_FD,):
            # Without a pidfd its exit cannot be detected. It ends when its socket is closed.
            message = ForkFailed(mover=message.mover, reason="no descriptor is left for its pidfd")
        self._on_message(message, frame.fds[0] if isinstance(message, Forked) else -1)

    def _handle_exit(self) -> None:
        self._loop.remove_reader(self._process.pidfd)
        os.close(self._process.pidfd)
        while self._read():
            pass
        self._stream.close()
        self._stderr.read_rest_and_close()
        self._process.reap()
        self._on_exit()


class ForkserverProcess(subprocess.Popen[bytes]):
    """A forkserver's process. `pidfd`, which its user closes, is readable once it is dead: then `reap` it."""

    def __init__(self, command: list[str], **options: Any) -> None:
        """Start it. Raises OSError, and then leaves nothing behind."""
        super().__init__(command, **options)
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError:
            self.kill()
            self.reap()  # it holds nothing yet that delays its death
            raise

    def reap(self) -> None:
        """Wait until the process is gone, and remove what it left."""
        self.wait()
        remove_shm_directory(self.pid)


def _stderr_pipe() -> tuple[int, int]:
    """Return both ends of a pipe whose writers lose lines rather than wait for a daemon that is stopped.

    The non-blocking flag is set on the writing end, which only the movers share. C's stdio and Python's
    logging drop what the pipe does not take.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writing, False)
    with suppress(OSError):  # beyond the user's limit of pipe memory it keeps its 64 KiB
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, STDERR_PIPE_BYTES)
    return reading, writing


def start_forkserver(
    environment: Mapping[str, str],
    library: str,
    backend: Backend,
    lock_fd: int | None,
    control: int,
    stderr: int,
) -> ForkserverProcess:
    """Start a forkserver with these two descriptors. Raises OSError."""
    # -P: modules in the daemon's working directory are not imported. -u, for C's buffers too: UCX logs
    # its transports to standard output, and a mover logs too little to fill a buffer of 4 KiB soon.
    command = [sys.executable, "-P", "-u", "-m", "kvxferd.mover.process.forkserver"]
    command += ["--control-fd", str(control), "--library", library]
    inherited = [control]
    if lock_fd is not None:
        command += ["--lock-fd", str(lock_fd)]
        inherited.append(lock_fd)
    # numpy's linear algebra would start a thread per core, and a process with threads must not fork.
    quiet = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return ForkserverProcess(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stderr,  # the library logs to standard output too, and the daemon's own is not for that
        stderr=stderr,
        pass_fds=inherited,
        env={**os.environ, **quiet, **environment, **backend_environment(backend)},
        start_new_session=True,  # a terminal's Ctrl-C is for the daemon, which then ends its movers
    )
