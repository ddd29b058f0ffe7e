"""Assigns movers to ranks, sends them what the core decides, and reports their messages and their ends."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable

import structlog

from kvxferd.config import MoverConfig
from kvxferd.control.worker_socket import WorkerSocket
from kvxferd.core.effects import BindMover, RequestMover, ShareFencePage
from kvxferd.core.events import (
    Event,
    MoverAssigned,
    MoverDied,
    MoverMessage,
    MoverUnavailable,
)
from kvxferd.core.node import Node
from kvxferd.core.ranks.movers import MoverState
from kvxferd.errors import Code, MoverError, count_busy_refusal
from kvxferd.ids import BootId, MoverId, SessionId
from kvxferd.mover.backends import UCX, Backend
from kvxferd.mover.supervisor.handle import MoverHandle
from kvxferd.mover.supervisor.pool import MoverPool
from kvxferd.mover.supervisor.resident_pool import ResidentHandle, ResidentPool
from kvxferd.telemetry.mover_usage import MoverExit, MoverReading
from kvxferd.wire.common import Message, Refusal
from kvxferd.wire.limits import FENCE_PAGE_BYTES
from kvxferd.wire.mover import FenceRefused, FromMover, MapFence

log = structlog.get_logger()

MOVER_RETRY_AFTER_S = 1.0  # sessions that end release their descriptors


class MoverAssignment:
    """Both pools of movers, and the handles of those that ranks have. Call it on the loop's thread."""

    def __init__(
        self,
        config: MoverConfig,
        boot: BootId,
        node: Node,
        worker_socket: WorkerSocket,
        on_event: Callable[[Event], None],
        lock_fd: int | None = None,
    ) -> None:
        """`on_event` feeds the core. Movers inherit `lock_fd`."""
        self._backend_name = config.backend
        self._node = node
        self._worker_socket = worker_socket
        self._on_event = on_event
        self._handles: dict[MoverId, MoverHandle] = {}
        self._is_stopping = False
        self._exits: Counter[MoverExit] = Counter()
        numbers = itertools.count(1)
        self._resident_pool = ResidentPool(
            boot=boot,
            mover_ids=numbers,
            is_name_used=lambda agent: node.movers.get_by_agent(agent) is not None,
            on_message=self._on_message,
            on_exit=self._on_exit,
        )
        self.pool = MoverPool(
            mover_ids=numbers,
            boot=boot,
            size=config.pool_size,
            on_message=self._on_message,
            on_exit=self._on_exit,
            lock_fd=lock_fd,
            environment=config.environment,
            library=config.library,
            backend=Backend(config.backend, config.backend_parameters),
        )

    async def stop(self) -> None:
        """End all movers. Requests that wait are dropped: their sessions have ended."""
        self._is_stopping = True
        self._resident_pool.close()
        await self.pool.stop()

    # --- effects

    def acquire(self, effect: RequestMover) -> None:
        try:
            resident = self._worker_socket.detach_mover(effect.session) if effect.resident else None
        except OSError as error:
            log.warning("resident mover not assigned", session=effect.session, reason=error.strerror)
            text = f"cannot take the worker's resident mover: {error.strerror}; try again later"
            count_busy_refusal("open_files")
            refusal = Refusal(Code.BUSY, text, MOVER_RETRY_AFTER_S)
            self._on_event(MoverUnavailable(effect.session, refusal))
            return
        if resident is not None and self._backend_name != UCX:
            # Its agent is the worker's, and has UCX: no mover of another backend could read from it. Nor is
            # it known of others that the end of an agent, and not of its process, ends its reads.
            sock, (_, exit_fd) = resident
            sock.close()
            if exit_fd >= 0:
                os.close(exit_fd)
            text = (
                f"cannot use a resident mover: it has {UCX} alone, and mover.backend here is "
                f"{self._backend_name}; set mover.backend to {UCX}, or use memory that can be exported"
            )
            self._on_event(MoverUnavailable(effect.session, Refusal(Code.NIXL_UNAVAILABLE, text)))
            return
        if effect.resident and resident is None:
            refusal = Refusal(Code.MOVER_LOST, "the worker has brought no resident mover")
            self._on_event(MoverUnavailable(effect.session, refusal))
            return

        def on_result(result: MoverHandle | MoverError) -> None:
            self._assign(effect.session, result)

        if resident is not None:
            self._resident_pool.accept(*resident, on_result)
        else:
            self.pool.request(on_result)

    def kill(self, mover: MoverId) -> None:
        """Kill the mover, if it has not exited."""
        if handle := self._handles.get(mover):
            handle.kill()

    def dup_pidfd(self, mover: MoverId) -> tuple[int, ...]:
        """Return a copy of the mover's pidfd; none if it has exited. Raises OSError."""
        handle = self._handles.get(mover)
        return (os.dup(handle.pidfd),) if handle is not None else ()

    def set_busy(self, is_busy: bool) -> None:
        """Report whether pulls run."""
        self.pool.set_busy(is_busy)

    def send(self, mover: MoverId, message: Message, fds: tuple[int, ...] = ()) -> None:
        if handle := self._handles.get(mover):
            handle.send(message, fds)

    def bind(self, effect: BindMover) -> None:
        """Send the regions to the mover. If that fails, kill it: its rank is bound again once it is dead."""
        try:
            self.send(effect.mover, effect.message, self._worker_socket.bind_fds(effect.session))
        except OSError as error:
            log.warning("mover not bound", session=effect.session, reason=error.strerror)
            self._handles[effect.mover].kill()

    def share_fence_page(self, effect: ShareFencePage) -> None:
        fd = self._worker_socket.fence_page_fd(effect.session)
        if fd < 0:
            return
        try:
            message = MapFence(session=effect.session, size_bytes=FENCE_PAGE_BYTES)
            self.send(effect.mover, message, (fd,))
        except OSError as error:
            log.warning("fence page not shared", session=effect.session, reason=error.strerror)
            text = f"cannot hand the page to its mover: {error.strerror}; try again later"
            count_busy_refusal("open_files")
            refused = FenceRefused(session=effect.session, code=Code.BUSY, message=text)
            self._on_event(MoverMessage(effect.mover, refused))

    # --- events

    def _on_message(self, mover: MoverId, message: FromMover) -> None:
        self._on_event(MoverMessage(mover, message))

    def _on_exit(self, mover: MoverId) -> None:
        handle = self._handles.pop(mover)
        cause = self._cause_of_exit(handle)
        self._exits[cause] += 1
        if cause is MoverExit.DIED and not isinstance(handle, ResidentHandle):
            self._log_death(handle)
        self._on_event(MoverDied(mover))

    def _cause_of_exit(self, handle: MoverHandle) -> MoverExit:
        mover = self._node.movers.get(handle.mover_id)
        if mover is None or mover.state is MoverState.DYING:
            return MoverExit.REQUESTED
        if not self._worker_socket.is_worker_alive(mover.session):
            return MoverExit.WORKER_GONE
        return MoverExit.DIED

    def usage(self) -> MoverReading:
        """Return which processes the movers are, and how many ended for which cause."""
        status = self.pool.status()
        exits = self._exits.copy()
        exits[MoverExit.DIED_STARTING] = self.pool.num_died_starting
        exits[MoverExit.DIED_UNASSIGNED] = self.pool.num_died_unassigned
        states = {"starting": status.num_starting, "ready": status.num_warm, "assigned": status.num_assigned}
        return MoverReading(states, exits, self.pool.forkserver_pid, self.pool.pids())

    def _log_death(self, handle: MoverHandle) -> None:
        """Log a mover that nothing ended."""
        mover = self._node.movers.get(handle.mover_id)
        engine = mover.engine.engine_id if mover is not None and mover.engine is not None else ""
        log.warning("mover died", limit_by=engine, engine=engine, agent=handle.agent, pid=handle.pid)

    def _assign(self, session: SessionId, result: MoverHandle | MoverError) -> None:
        if isinstance(result, MoverHandle):
            self._handles[result.mover_id] = result
            resident = isinstance(result, ResidentHandle)
            self._on_event(MoverAssigned(session, result.mover_id, result.agent, result.library, resident))
        elif not self._is_stopping:
            log.warning("mover unavailable", session=session, code=result.code, reason=result.message)
            self._on_event(MoverUnavailable(session, Refusal(result.code, result.message)))
