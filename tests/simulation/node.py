"""A node's processes: the daemon, its forkserver and its movers, each with the product's own loop."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from kvxferd import frame_socket
from kvxferd.client import gpu_events
from kvxferd.config import Config, LoadedConfig
from kvxferd.core.ranks import movers
from kvxferd.daemon import Daemon
from kvxferd.errors import ConfigError, KvxferdError
from kvxferd.frame_socket import FrameSocket
from kvxferd.ids import AgentName, Digest
from kvxferd.mover.forkserver_protocol import TO_FORKSERVER, Fork, Forked, ForkFailed
from kvxferd.mover.process import backoff, forkserver
from kvxferd.mover.process.backoff import PollBackoff
from kvxferd.mover.process.loop import MoverLoop
from kvxferd.mover.supervisor import processes
from kvxferd.mover.transport import probe
from kvxferd.plan import decode_plan, plan_bytes
from kvxferd.resident import registration, thread_mover
from kvxferd.resident.thread_mover import ThreadMover
from kvxferd.wire.codec import TO_MOVER
from kvxferd.wire.framing import Frame
from kvxferd.wire.mover import DropPlan, DropRemote, LoadPlan, LoadRemote, SetPolling, ToMover
from tests.simulation.fabric import Fabric, SimTransport
from tests.simulation.kernel import Kernel, Process

RESTART_S = 0.5


class SimLibrary:
    """`TransferLibrary`: that there is one."""

    description = "simulated"


class Nodes:
    """Starts daemons; what they start follows."""

    def __init__(self, kernel: Kernel, fabric: Fabric, replace: Callable[[Any, str, object], None]) -> None:
        self.kernel = kernel
        self.fabric = fabric
        self.exits: dict[str, int] = {}  # by a daemon's process: what it ended with
        self.on_broken: Callable[[str], None] = lambda text: None  # by a daemon's own word
        self.on_many: Callable[[str], None] = lambda text: None  # a mover is to keep more than it should
        replace(processes, "start_forkserver", self._start_forkserver)
        replace(forkserver, "_load_library", lambda use, backend: SimLibrary())
        # The simulated library ends a mover's pause where there is something to see: in use pauses are short,
        # and most of an episode would be polls that see nothing.
        for pause in ("MIN_PAUSE_S", "MAX_SERVING_PAUSE_S", "MAX_IDLE_PAUSE_S"):
            replace(backoff, pause, 1.0)
        replace(backoff, "MIN_YIELD_S", 5e-3)  # a resident mover pauses after each post, too
        replace(backoff, "MAX_READING_PAUSE_S", 5e-2)
        # What each process does twice in a millisecond, at rest too.
        replace(gpu_events, "POLL_S", 5e-3)
        replace(frame_socket, "READ_BUFFER_BYTES", 16 << 10)  # it is filled with zeros
        replace(gc, "collect", lambda *_: 0)  # see the decision: it would close descriptors of others
        replace(probe, "tcp_bytes_received", lambda: 0)  # it looks at the first process's descriptors
        replace(registration, "_RUNNING_MOVERS", _RunningMoversOfProcess(kernel))
        replace(os, "waitpid", lambda pid, options: (pid, 0))
        replace(os, "kill", lambda pid, number: kernel.kill(kernel.processes[pid]))

    def start_daemon(self, name: str, config: Config) -> Process:
        """Start a daemon."""

        def main() -> None:
            while True:
                with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner, suppress(ConfigError):
                    self.exits[process.name] = runner.run(SimDaemon(config, self.on_broken).run())
                    return
                self.kernel.sleep(RESTART_S)  # whoever starts it tries again

        process = self.kernel.spawn(name, main)
        return process

    # --- the forkserver

    def _start_forkserver(
        self,
        environment: object,
        library: str,
        backend: object,
        lock_fd: int | None,
        control: int,
        stderr: int,
    ) -> SimForkserverProcess:
        daemon = self.kernel.current.process
        locks = () if lock_fd is None else (lock_fd,)

        def main() -> None:
            stream = FrameSocket(socket.socket(fileno=control))
            stream.accept_lost_fds()
            with suppress(KvxferdError, ConnectionError):  # as in `forkserver.main`
                _Forkserver(self, stream, locks).serve()

        name = f"{daemon.name} forkserver"
        return SimForkserverProcess(
            self.kernel, self.kernel.spawn(name, main, (control, *locks), daemon.uid, daemon)
        )

    def start_mover(self, socket_fd: int, agent: AgentName, locks: Sequence[int]) -> Process:
        """Fork a mover of the running forkserver, which it does not outlive."""
        parent = self.kernel.current.process

        def main() -> None:
            sock = socket.socket(fileno=socket_fd)
            self._exit_when(sock.fileno(), 0)
            stream = _MoverSocket(sock, lambda text: self.on_many(f"{process.name} {text}"))
            transport = SimTransport(self.fabric, agent)
            watch = partial(self._exit_when, events=_POLLIN)
            with suppress(KvxferdError, ConnectionError):  # as in `child_main.run`: it ends
                max_runs = thread_mover.MAX_RUNS_AT_ONCE  # where that is low, it is for both kinds
                MoverLoop(stream, transport, PollBackoff(lambda: True), watch, max_runs=max_runs).serve()

        process = self.kernel.spawn(
            f"{parent.name} mover {agent}", main, (socket_fd, *locks), parent.uid, parent
        )
        parent.on_death.append(lambda: self.kernel.kill(process))
        return process

    def _exit_when(self, fd: int, events: int) -> None:
        """`linux_process.exit_when`: the process ends once the descriptor is ready, or hung up."""
        process = self.kernel.current.process
        own = os.dup(fd)  # the mover's loop waits for the other

        def watch() -> None:
            self.kernel.wait(((own, events),), None)
            self.kernel.kill(process)

        self.kernel.start_thread(f"{process.name} watch", watch)


_POLLIN = 1
EVENTS_A_CHECK = 8


class _MoverSocket(FrameSocket):
    """A mover's end of its socket: it is sent nothing twice, nor more plans to keep than it may have."""

    def __init__(self, connected: socket.socket, on_many: Callable[[str], None]) -> None:
        super().__init__(connected)
        self._on_many = on_many
        self._plans: dict[Digest, int] = {}  # bytes of each
        self._remotes: set[tuple[AgentName, bytes]] = set()  # what it is to know of others
        self._polls = False

    def handle_frames(self, handle: Callable[[Frame], None], *arguments: int) -> int | None:
        def look(frame: Frame) -> None:
            if any(name in frame.payload[:16] for name in (b"Plan", b"Remote", b"SetPolling")):
                self._look(TO_MOVER.decode(frame.payload))
            handle(frame)

        return super().handle_frames(look, *arguments)

    def _look(self, message: ToMover) -> None:
        is_new = True
        match message:
            case LoadPlan(digest=digest, encoded=encoded):
                is_new = digest not in self._plans
                self._plans[digest] = plan_bytes(decode_plan(encoded))
            case DropPlan(digest=digest):
                is_new = self._plans.pop(digest, None) is not None
            case LoadRemote(agent=agent, metadata=metadata):
                is_new = (agent, metadata) not in self._remotes
                self._remotes.add((agent, metadata))
            case DropRemote(agent=agent):
                kept = {one for one in self._remotes if one[0] != agent}
                is_new, self._remotes = kept != self._remotes, kept
            case SetPolling(on=on):
                is_new, self._polls = on is not self._polls, on
        if not is_new:
            self._on_many(f"is sent what it knows: {message}")
        if len(self._plans) > 1 and sum(self._plans.values()) > movers.MAX_PLAN_BYTES_PER_MOVER:
            self._on_many(f"is to keep plans of {[*self._plans.values()]} bytes")


class _RunningMoversOfProcess:
    """`resident.registration._RunningMovers`, one for each process: it is a variable of a module."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._of: dict[Process, registration._RunningMovers] = {}

    def add(self, mover: ThreadMover) -> None:
        process = self._kernel.current.process
        self._of.setdefault(process, registration._RunningMovers()).add(mover)


class SimForkserverProcess:
    """`ForkserverProcess`."""

    def __init__(self, kernel: Kernel, process: Process) -> None:
        self._kernel, self._process = kernel, process
        self.pid = process.pid
        self.pidfd = kernel.open_pidfd(process.pid)

    def kill(self) -> None:
        """Kill it."""
        self._kernel.kill(self._process)

    def reap(self) -> None:
        """Do nothing: the kernel keeps no zombies."""


class _Forkserver(forkserver.Forkserver):
    """The forkserver; the kernel forks."""

    def __init__(self, nodes: Nodes, control: FrameSocket, locks: tuple[int, ...]) -> None:
        super().__init__(control, locks, "auto", None)  # type: ignore[arg-type]
        self._nodes, self._locks = nodes, locks

    def _fork(self, frame: Frame, library: object) -> None:
        request: Fork = TO_FORKSERVER.decode(frame.payload)
        (socket_fd,) = frame.fds
        if not self._nodes.kernel.current.process.can_fork:
            os.close(socket_fd)
            self._send(ForkFailed(mover=request.mover, reason="Resource temporarily unavailable"))
            return
        mover = self._nodes.start_mover(socket_fd, request.agent, self._locks)
        os.close(socket_fd)
        pidfd = os.pidfd_open(mover.pid)
        self._pidfds[pidfd], self._outputs[pidfd] = mover.pid, -1
        self._send(Forked(mover=request.mover, pid=mover.pid), (os.dup(pidfd),))

    def _copy_rest(self, output: int) -> None:
        """There is none: nobody logs."""


class SimDaemon(Daemon):
    """The daemon, which checks its own tables; signals and the process's own limits are not simulated."""

    def __init__(self, config: Config, on_broken: Callable[[str], None]) -> None:
        super().__init__(LoadedConfig(config))
        self._on_broken = on_broken
        self._num_checks = 0

    def _after_events(self) -> None:
        super()._after_events()
        self._num_checks += 1
        if self._num_checks % EVENTS_A_CHECK == 0:
            try:
                self._node.check_integrity()
            except AssertionError as error:
                self._on_broken(f"{error or traceback.format_exc()}")

    def _watch_signals(self) -> None:
        """There are none."""
