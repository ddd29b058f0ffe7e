"""The forkserver: imports the transfer library once, makes no agent, and forks movers on request.

    python -m kvxferd.mover.process.forkserver --control-fd N [--lock-fd M]...

Ends when the daemon closes its end of the control socket; its movers are killed with it.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import socket
import sys
from contextlib import ExitStack

from kvxferd.errors import Code, MoverError, ProtocolError
from kvxferd.fd_wait import wait_readable, wait_writable
from kvxferd.frame_socket import LOST_FD, FrameSocket, close_fds
from kvxferd.mover.backends import Backend, take_backend
from kvxferd.mover.forkserver_protocol import (
    TO_FORKSERVER,
    Fork,
    Forked,
    ForkFailed,
    LibraryLoaded,
    LibraryUnavailable,
)
from kvxferd.mover.linux_process import prepare_thread
from kvxferd.mover.process import child_main
from kvxferd.mover.process.log_formatter import OneLineFormatter
from kvxferd.mover.shm import make_shm_directory, remove_left_files, remove_shm_directory
from kvxferd.mover.transport.nixl import TransferLibrary, import_library
from kvxferd.mover.transport.ucx_lines import copy_output, open_output
from kvxferd.wire.codec import encode
from kvxferd.wire.common import Message
from kvxferd.wire.framing import Frame

_LOG = logging.getLogger(__name__)


class Forkserver:
    """Forks movers and reaps them. One thread, or a child could inherit a lock that no thread releases."""

    def __init__(
        self, control: FrameSocket, keep_fds: tuple[int, ...], library_choice: str, backend: Backend
    ) -> None:
        self._control = control
        self._library_choice = library_choice
        self._mover_count = child_main.MoverCount(len(os.sched_getaffinity(0)))
        self._backend = backend
        self._fork_context = child_main.ForkContext(os.getpid(), self._mover_count, keep_fds, self._backend)
        self._pidfds: dict[int, int] = {}  # pidfd: pid
        self._outputs: dict[int, int] = {}  # pidfd: what reads that process's standard output

    def serve(self) -> None:
        """Run until the daemon is gone."""
        try:
            library = _load_library(self._library_choice, self._backend)
        except MoverError as error:
            self._send(LibraryUnavailable(reason=error.message))
            self._wait_for_daemon()
            return
        self._send(LibraryLoaded(library=library.description))
        # Objects that exist now are never collected: the collector's marks would copy every page in each
        # child.
        gc.collect()
        gc.freeze()
        try:
            while self._serve_once(library):
                pass
        finally:
            self._end_movers()

    def _serve_once(self, library: TransferLibrary) -> bool:
        control = self._control.fileno()
        readable = wait_readable([control, *self._pidfds])
        for fd in readable:
            if fd != control:
                self._reap(fd)
        if control not in readable:
            return True
        frames = self._control.receive()
        for frame in frames or ():
            self._fork(frame, library)
        return frames is not None

    def _fork(self, frame: Frame, library: TransferLibrary) -> None:
        request: Fork = TO_FORKSERVER.decode(frame.payload)
        (socket_fd,) = frame.fds
        if socket_fd == LOST_FD:
            self._send(ForkFailed(mover=request.mover, reason="no descriptor is left for its socket"))
            return
        with ExitStack() as closing, ExitStack() as undoing:
            closing.callback(os.close, socket_fd)
            try:
                output = open_output()
                closing.callback(os.close, output[0])
                undoing.callback(os.close, output[1])
                pid = os.fork()
            except OSError as error:
                self._send(ForkFailed(mover=request.mover, reason=str(error)))
                return
            if pid == 0:
                child_main.run(socket_fd, output, request.agent, library, self._fork_context)
            try:
                pidfd, copy = _open_pidfds(pid)
            except OSError as error:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self._send(ForkFailed(mover=request.mover, reason=f"its pidfd cannot be opened: {error}"))
                return
            undoing.pop_all()
        self._pidfds[pidfd] = pid
        self._outputs[pidfd] = output[1]
        self._mover_count.set(len(self._pidfds))
        self._send(Forked(mover=request.mover, pid=pid), (copy,))

    def _reap(self, pidfd: int) -> None:
        os.waitpid(self._pidfds.pop(pidfd), 0)
        os.close(pidfd)
        self._copy_rest(self._outputs.pop(pidfd))
        remove_left_files(self._pidfds.values())
        self._mover_count.set(len(self._pidfds))

    def _copy_rest(self, output: int) -> None:
        """Log what a dead mover has left: why it crashed, perhaps."""
        for _ in copy_output(output):
            pass
        os.close(output)

    def _end_movers(self) -> None:
        """Kill and reap all movers. They would die with this process, but perhaps without being reaped."""
        for pid in self._pidfds.values():
            os.kill(pid, signal.SIGKILL)
        for pidfd in list(self._pidfds):
            self._reap(pidfd)

    def _send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send a message; `fds` are closed once they are sent."""
        self._control.send(encode(message), fds)
        self._control.flush()
        while not self._control.is_flushed:
            wait_writable(self._control.fileno())
            self._control.flush()

    def _wait_for_daemon(self) -> None:
        frames: list[Frame] | None = []
        while frames is not None:
            wait_readable([self._control.fileno()])
            frames = self._control.receive()
            for frame in frames or ():
                close_fds(frame.fds)


def _open_pidfds(pid: int) -> tuple[int, int]:
    """Return a pidfd to keep and one to send. Raises OSError, and then keeps none."""
    pidfd = os.pidfd_open(pid)
    try:
        return pidfd, os.dup(pidfd)
    except OSError:
        os.close(pidfd)
        raise


_INSTALL_NIXL = "run: pip install 'kvxferd[daemon,nixl]'"
_INSTALL = {"rixl": "install it, or set mover.library to auto"}


def _load_library(use: str, backend: Backend) -> TransferLibrary:
    try:
        library = import_library(use)
    except MoverError as error:
        # Engines get this text too, and have an environment of their own.
        raise MoverError(
            f"{error.message}; in the daemon's environment {_INSTALL.get(use, _INSTALL_NIXL)}, and start the "
            "daemon again (`kvxferd doctor --check software` tries it)",
            error.code,
        ) from error
    try:
        library.preload(backend)
    except MoverError:
        raise
    except Exception as error:
        raise MoverError(f"cannot use {library.description}: {error}", Code.NIXL_UNAVAILABLE) from error
    return library


def main() -> None:
    """Run the forkserver."""
    arguments = argparse.ArgumentParser(prog="kvxferd.mover.process.forkserver", description=__doc__)
    arguments.add_argument("--control-fd", type=int, required=True)
    arguments.add_argument(
        "--lock-fd",
        type=int,
        action="append",
        default=[],
        help="kept open by every mover, so that its flock tells",
    )
    arguments.add_argument(
        "--library", default="auto", help="nixl, rixl, or auto for the first that is there"
    )
    given = arguments.parse_args()
    os.dup2(2, 1)  # the library logs to standard output, which belongs to the daemon
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter("%(levelname)s %(name)s[%(process)d] %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    prepare_thread("kvxferd-parent")
    make_shm_directory()
    if "UCX_LOG_FILE" not in os.environ:
        os.environ.setdefault("UCX_LOG_LEVEL", "info")  # see `ucx_lines`
    control = FrameSocket(socket.socket(fileno=given.control_fd))
    control.accept_lost_fds()
    try:
        Forkserver(control, tuple(given.lock_fd), given.library, take_backend(os.environ)).serve()
    except (ConnectionError, ProtocolError):  # it may have gone in the middle of a frame
        _LOG.info("daemon gone")
    finally:
        remove_shm_directory(os.getpid())


if __name__ == "__main__":
    main()
