"""A mover as a thread of the worker: made for one daemon's run, and ended with its agent."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

from kvxferd.errors import Code, KvxferdError
from kvxferd.fd_wait import wait_writable
from kvxferd.frame_socket import FrameSocket, close_fds
from kvxferd.ids import AgentName
from kvxferd.mover.linux_process import prepare_thread
from kvxferd.mover.process.backoff import YieldingBackoff
from kvxferd.mover.process.loop import MoverLoop
from kvxferd.mover.transport.base import Transport
from kvxferd.wire.codec import encode
from kvxferd.wire.mover import MoverLeaving
from kvxferd.wire.worker import RegionExport

_LOG = logging.getLogger(__name__)

# Runs of a pull that are expanded at a time: the interpreter's lock is held for some 100 us.
MAX_RUNS_AT_ONCE = 4096
CLOSE_RETRY_S = 1.0
LEAVING_TIMEOUT_S = 0.2  # for the last message; the mover ends whether or not it is sent

MakeTransport = Callable[[AgentName], Transport]


class ThreadMover:
    """One resident mover; keeps the contract of `kvxferd.client.mover_watch.ResidentMover`.

    Its thread makes the agent, alone uses it, and destroys it. Then, and not before, it closes its
    end of the stream, which the daemon sees, and writes into a pipe, which the client sees.
    """

    def __init__(
        self, agent: AgentName, regions: Sequence[RegionExport], make_transport: MakeTransport
    ) -> None:
        """Start the thread. Raises OSError. `regions`: those in this process's memory that it may bind."""
        self.agent = agent
        self.is_quiesced = False
        self._regions = tuple(regions)
        self._make_transport = make_transport
        self._lock = threading.Lock()  # both ends of the socket are closed while other threads use them
        self._quiesced_fd, self._quiesced_write_fd = os.pipe2(os.O_CLOEXEC)
        try:
            self._socket, theirs = socket.socketpair()
        except OSError:
            close_fds((self._quiesced_fd, self._quiesced_write_fd))
            raise
        self.daemon_end = theirs.detach()
        self._thread = threading.Thread(target=self._run, name="kvxferd-mover", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._quiesced_fd

    def close_daemon_end(self) -> None:
        with self._lock:
            if self.daemon_end >= 0:
                os.close(self.daemon_end)
                self.daemon_end = -1

    def stop(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)  # the thread reads EOF next

    def wait(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return self.is_quiesced

    def close(self) -> None:
        """Close the descriptors. Call it only once `is_quiesced`."""
        self.close_daemon_end()
        with self._lock:
            if self._quiesced_fd >= 0:
                os.close(self._quiesced_fd)
                self._quiesced_fd = -1

    # --- the thread

    def _run(self) -> None:
        prepare_thread("kvxferd-mover")
        stream = FrameSocket(self._socket)
        movers: list[MoverLoop] = []
        transports: list[Transport] = []
        leaving = self._serve(stream, transports, movers)
        if leaving is not None:
            _LOG.error("resident mover ended: agent=%s reason=%s", self.agent, leaving.message)
            _send_leaving(stream, leaving)
        # No exception is alive here: a traceback would keep handles alive, and so the agent.
        for transport in transports:
            self._destroy(transport)
        for mover in movers:
            mover.close()
        self.is_quiesced = True
        # A byte, because closing is not enough: a forked process may hold a copy of the descriptor.
        os.write(self._quiesced_write_fd, b"q")
        os.close(self._quiesced_write_fd)
        with self._lock:
            stream.close()

    def _serve(
        self, stream: FrameSocket, transports: list[Transport], movers: list[MoverLoop]
    ) -> MoverLeaving | None:
        """Serve until the daemon or the client closes the stream; return why it ended if neither did."""
        try:
            transport = self._make_transport(self.agent)
            transports.append(transport)
            mover = MoverLoop(
                stream,
                transport,
                YieldingBackoff(),
                os.close,  # the worker is this process
                own_regions=self._regions,
                max_runs=MAX_RUNS_AT_ONCE,
            )
            movers.append(mover)
            mover.serve()
        except KvxferdError as error:
            return MoverLeaving(code=error.code, message=error.message)
        except ConnectionError:
            return None
        except BaseException as error:
            return MoverLeaving(code=Code.INTERNAL, message=f"the resident mover failed: {error!r}")
        return None

    def _destroy(self, transport: Transport) -> None:
        """Return once the agent is gone. Its memory counts as in use until then."""
        has_logged = False
        while True:
            try:
                transport.close()
                return
            except Exception:
                if not has_logged:
                    _LOG.exception("resident agent not ended: agent=%s", self.agent)  # it is tried again
                    has_logged = True
            time.sleep(CLOSE_RETRY_S)


def _send_leaving(stream: FrameSocket, message: MoverLeaving) -> None:
    """Send the last message, and wait for at most `LEAVING_TIMEOUT_S` until it is sent."""
    stream.send(encode(message))
    deadline = time.monotonic() + LEAVING_TIMEOUT_S
    while True:
        stream.flush()
        left_s = deadline - time.monotonic()
        if stream.is_flushed or left_s <= 0:
            return
        wait_writable(stream.fileno(), left_s)
