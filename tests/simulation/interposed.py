"""What stands in the place of the standard library's calls that wait, tell the time or name processes.

All else of it stays: sockets, pipes, files, memory, asyncio, selectors.
"""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import errno
import os
import queue
import random
import secrets
import select
import selectors
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from functools import cache
from types import BuiltinFunctionType, FunctionType
from typing import Any, Protocol

from kvxferd import fd_wait
from kvxferd.mover.chunks import scatterer
from tests.simulation.kernel import Kernel, Process, SimulationError, Task

_SO_PEERPIDFD = 77
_SHORT_PAUSE_S = 1e-4  # as a mover's or client's between two polls
_CLOCKS: frozenset[object] = frozenset({time.monotonic, time.perf_counter, time.time})
_real_epoll_select = selectors.EpollSelector.select
_real_poll = select.poll
_real_precise_wait = fd_wait.PreciseWait.wait
_real_start = threading.Thread.start
_real_connect = socket.socket.connect
_real_accept = socket.socket.accept
_real_listen = socket.socket.listen
_real_send = socket.socket.send
_real_sendmsg = socket.socket.sendmsg
_real_recvmsg_into = socket.socket.recvmsg_into
_real_socketpair = socket.socketpair
_real_mkstemp = tempfile.mkstemp
_real_getsockopt = socket.socket.getsockopt
_real_condition_wait = threading.Condition.wait


class _Waiter:
    """One thread that waits for a condition; `threading.Condition.notify` releases it."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._task = kernel.current
        self.is_released = False

    def release(self) -> None:
        self.is_released = True
        self._kernel.notify(self._task)


class SimLock:
    """`threading.Lock`: who finds it taken lets others run."""

    kernel: Kernel

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        kernel = self.kernel
        if not self._is_taken:
            self._is_taken = True
            return True
        if not blocking:
            return False
        deadline = None if timeout < 0 else kernel.now + timeout
        while self._is_taken:
            if deadline is not None and kernel.now >= deadline:
                return False
            self._waiting.append(kernel.current)
            kernel.wait((), None if deadline is None else deadline - kernel.now)
        self._is_taken = True
        return True

    def release(self) -> None:
        if not self._is_taken:
            raise RuntimeError("release unlocked lock")
        self._is_taken = False
        if self._waiting:
            self.kernel.notify(self._waiting.popleft())

    def locked(self) -> bool:
        return self._is_taken

    def _at_fork_reinit(self) -> None:
        self._is_taken = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class LockOfProcess:
    """A lock of a module: each process has its own, so one that is killed with it keeps no other waiting."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._locks: defaultdict[Process, SimLock] = defaultdict(SimLock)

    def __enter__(self) -> bool:
        return self._locks[self._kernel.current.process].acquire()

    def __exit__(self, *_: object) -> None:
        self._locks[self._kernel.current.process].release()


class SimRLock(SimLock):
    """`threading.RLock`."""

    def __init__(self) -> None:
        super().__init__()
        self._owner: Task | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._owner is not self.kernel.current:
            if not super().acquire(blocking, timeout):
                return False
            self._owner = self.kernel.current
        self._count += 1
        return True

    def release(self) -> None:
        if self._owner is not self.kernel.current:
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            super().release()

    def _release_save(self) -> int:
        count, self._count = self._count, 1
        self.release()
        return count

    def _acquire_restore(self, count: int) -> None:
        self.acquire()
        self._count = count

    def _is_owned(self) -> bool:
        return self._owner is self.kernel.current


class SimQueue:
    """`queue.SimpleQueue`."""

    kernel: Kernel

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting: deque[Task] = deque()

    def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        if self._waiting:
            self.kernel.notify(self._waiting.popleft())

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        kernel = self.kernel
        deadline = None if timeout is None else kernel.now + timeout
        while not self._items:
            if not block or (deadline is not None and kernel.now >= deadline):
                raise queue.Empty
            self._waiting.append(kernel.current)
            kernel.wait((), None if deadline is None else deadline - kernel.now)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    put_nowait = put

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items


class SimJobs(SimQueue):
    """A queue of jobs whose ends another thread of the process polls: that sees them soon."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self._items:
            for task in self.kernel.current.process.tasks:
                self.kernel.end_pause(task, _SHORT_PAUSE_S)
        return super().get(block, timeout)


class HasFileno(Protocol):
    """What has a descriptor."""

    def fileno(self) -> int: ...


class SimPoll:
    """`select.poll`."""

    kernel: Kernel

    def __init__(self) -> None:
        self._real = _real_poll()
        self._events: dict[int, int] = {}

    def register(
        self, of: int | HasFileno, events: int = select.POLLIN | select.POLLPRI | select.POLLOUT
    ) -> None:
        fd = of if isinstance(of, int) else of.fileno()
        self._events[fd] = events
        self._real.register(fd, events)

    modify = register

    def unregister(self, of: int | HasFileno) -> None:
        fd = of if isinstance(of, int) else of.fileno()
        del self._events[fd]
        self._real.unregister(fd)

    def poll(self, timeout_ms: float | None = None) -> list[tuple[int, int]]:
        found = self._real.poll(0)
        if found or timeout_ms == 0:
            return found
        timeout_s = None if timeout_ms is None or timeout_ms < 0 else timeout_ms / 1000
        self.kernel.wait(tuple(self._events.items()), timeout_s)
        return self._real.poll(0)


def install(kernel: Kernel, seed: int, send_buffer: int = 0) -> None:
    """Put the kernel under this process, for good: the process serves one episode.

    `send_buffer`: bytes that a Unix socket takes without its reader; 0: as many as usual.
    """
    for kind in (SimLock, SimQueue, SimPoll):
        kind.kernel = kernel
    _install_time(kernel)
    _install_threads(kernel)
    _install_descriptors(kernel)
    _install_sockets(kernel, send_buffer)
    _install_files(kernel)
    _install_processes(kernel, send_buffer)
    _install_chance(seed)


@cache
def functions_with_clocks() -> list[FunctionType]:
    """Return the functions of the package that have a clock as the default of an argument."""
    modules = [module for name, module in sys.modules.items() if name.startswith("kvxferd.")]
    kinds = {id(kind): kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    functions = [
        one for kind in kinds.values() for one in vars(kind).values() if isinstance(one, FunctionType)
    ]
    return [one for one in functions if _defaults_of(one) & _CLOCKS]


def _defaults_of(function: FunctionType) -> set[object]:
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return {value for value in values if isinstance(value, BuiltinFunctionType)}


def _install_time(kernel: Kernel) -> None:
    for function in functions_with_clocks():
        if function.__defaults__:
            function.__defaults__ = tuple(
                kernel.clock if isinstance(value, BuiltinFunctionType) and value in _CLOCKS else value
                for value in function.__defaults__
            )
        for name, value in (function.__kwdefaults__ or {}).items():
            if isinstance(value, BuiltinFunctionType) and value in _CLOCKS:
                function.__kwdefaults__[name] = kernel.clock
    set_on(time, "monotonic", kernel.clock)
    set_on(time, "perf_counter", kernel.clock)
    set_on(time, "thread_time", kernel.cpu_clock)
    set_on(time, "process_time", kernel.cpu_clock)
    set_on(time, "time", lambda: 1.7e9 + kernel.peek())
    set_on(time, "monotonic_ns", lambda: int(kernel.peek() * 1e9))
    set_on(time, "perf_counter_ns", lambda: int(kernel.peek() * 1e9))
    set_on(time, "time_ns", lambda: int((1.7e9 + kernel.peek()) * 1e9))
    set_on(time, "clock_gettime", lambda clock: kernel.peek())
    set_on(time, "sleep", kernel.sleep)
    set_on(threading, "_time", kernel.peek)  # read while a condition's lock is held


def _install_threads(kernel: Kernel) -> None:
    set_on(threading, "Lock", SimLock)
    set_on(threading, "RLock", SimRLock)
    set_on(queue, "SimpleQueue", SimQueue)
    set_on(scatterer, "SimpleQueue", SimJobs)
    set_on(concurrent.futures.thread, "_global_shutdown_lock", LockOfProcess(kernel))  # threads wait with it

    def wait(condition: Any, timeout: float | None = None) -> bool:
        waiter = _Waiter(kernel)
        condition._waiters.append(waiter)
        saved = condition._release_save()
        kernel.wait((), timeout)
        condition._acquire_restore(saved)
        if not waiter.is_released:
            condition._waiters.remove(waiter)
        return waiter.is_released

    def start(thread: Any) -> None:
        if not kernel.current.process.can_start_threads:
            raise RuntimeError("can't start new thread")
        thread._started.set()
        thread._sim_task = kernel.start_thread(thread.name, thread.run)

    def join(thread: Any, timeout: float | None = None) -> None:
        kernel.join(thread._sim_task, timeout)

    set_on(threading.Condition, "wait", wait)
    set_on(threading.Thread, "start", start)
    set_on(threading.Thread, "join", join)
    set_on(threading.Thread, "is_alive", lambda thread: thread._sim_task.state.name != "DONE")


def _install_descriptors(kernel: Kernel) -> None:
    def select_ready(selector: selectors.EpollSelector, timeout: float | None = None) -> Any:
        if timeout is not None and timeout <= 0:
            kernel.preempt()
        elif not kernel.wait(((selector.fileno(), select.EPOLLIN),), timeout):
            return []
        return _real_epoll_select(selector, 0)

    def precise_wait(waiting: Any, timeout_s: float | None, *, writable: bool = False) -> bool:
        events = select.EPOLLIN | (select.EPOLLOUT if writable else 0)
        task = kernel.current
        task.is_pausing = timeout_s is not None
        if timeout_s is not None and task.is_next_pause_short:
            timeout_s, task.is_next_pause_short = min(timeout_s, _SHORT_PAUSE_S), False
        is_ready = kernel.wait(((waiting._pollfd.fd, events),), timeout_s)
        task.is_pausing = False
        return is_ready and _real_precise_wait(waiting, 0.0, writable=writable)

    set_on(selectors.EpollSelector, "select", select_ready)
    set_on(fd_wait.PreciseWait, "wait", precise_wait)
    set_on(select, "poll", SimPoll)


def _install_sockets(kernel: Kernel, send_buffer: int) -> None:
    """Unix sockets that take and give few bytes at a time, break in the middle of a frame, or are small."""
    # A worker makes these to its resident movers: their end proves that the thread at the other end is over,
    # and only that thread ends them.
    of_resident_movers: set[int] = set()  # by inode

    def sendmsg(sock: socket.socket, buffers: Any, ancillary: Any = (), flags: int = 0, *to: Any) -> int:
        process, parts, is_stream = kernel.current.process, list(buffers), sock.type == socket.SOCK_STREAM
        cut = process.at_cut
        if cut is not None and is_stream and os.fstat(sock.fileno()).st_ino not in of_resident_movers:
            process.at_cut = None
            cut()
            with contextlib.suppress(OSError):
                _real_sendmsg(sock, [memoryview(parts[0])[: len(parts[0]) // 2]], ancillary, flags)
            sock.shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        if process.io_bytes and is_stream:
            parts = [memoryview(parts[0])[: process.io_bytes]]
        return _real_sendmsg(sock, parts, ancillary, flags, *to)

    def send(sock: socket.socket, content: Any, flags: int = 0) -> int:
        if len(content) == 1:  # by which a loop wakes itself
            return _real_send(sock, content, flags)
        return sock.sendmsg([bytes(content)], (), flags)  # asyncio resizes its buffer in spite of an error

    def recvmsg_into(sock: socket.socket, buffers: Any, *more: Any) -> Any:
        if size := kernel.current.process.io_bytes:
            buffers = [memoryview(buffers[0])[:size]]
        return _real_recvmsg_into(sock, buffers, *more)

    def socketpair(*arguments: Any) -> tuple[socket.socket, socket.socket]:
        made = _real_socketpair(*arguments)
        name = kernel.current.process.name
        is_of_resident_mover = "/" in name and " mover " not in name and not arguments
        for one in made:
            if is_of_resident_mover:
                of_resident_movers.add(os.fstat(one.fileno()).st_ino)
            if send_buffer:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        return made

    set_on(socket.socket, "sendmsg", sendmsg)
    set_on(socket.socket, "send", send)
    set_on(socket.socket, "recvmsg_into", recvmsg_into)
    set_on(socket, "socketpair", socketpair)


def _install_files(kernel: Kernel) -> None:
    def mkstemp(*arguments: Any, **named: Any) -> tuple[int, str]:
        if kernel.current.process.is_disk_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return _real_mkstemp(*arguments, **named)

    set_on(tempfile, "mkstemp", mkstemp)


def _install_processes(kernel: Kernel, send_buffer: int) -> None:
    connecting: dict[str, deque[Process]] = {}  # by the listener's path: who was not accepted yet
    accepted: dict[int, Process] = {}  # by a socket's inode

    def connect(sock: socket.socket, address: Any) -> None:
        _real_connect(sock, address)
        if sock.family == socket.AF_UNIX:
            if send_buffer:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
            connecting.setdefault(os.fspath(address), deque()).append(kernel.current.process)
            if (act := kernel.at_connect.pop(kernel.current.process, None)) is not None:
                act()

    def listen(sock: socket.socket, *backlog: int) -> None:
        _real_listen(sock, *backlog)
        if sock.family == socket.AF_UNIX:
            connecting.pop(sock.getsockname(), None)  # those of a listener that is gone

    def accept(sock: socket.socket) -> tuple[socket.socket, Any]:
        made, address = _real_accept(sock)
        if sock.family == socket.AF_UNIX:
            if send_buffer:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
            accepted[os.fstat(made.fileno()).st_ino] = connecting[sock.getsockname()].popleft()
        return made, address

    def getsockopt(sock: socket.socket, level: int, option: int, *size: int) -> Any:
        if level != socket.SOL_SOCKET or option not in (socket.SO_PEERCRED, _SO_PEERPIDFD):
            return _real_getsockopt(sock, level, option, *size)
        peer = accepted[os.fstat(sock.fileno()).st_ino]
        if option == socket.SO_PEERCRED:
            return struct.pack("iII", peer.pid, peer.uid, peer.uid)
        return struct.pack("i", kernel.open_pidfd(peer.pid))

    def send_signal(fd: int, number: int, *_: object) -> None:
        process = kernel.process_of_pidfd(fd)
        if number != signal.SIGKILL:
            raise SimulationError(f"signal {number} is not simulated")
        kernel.kill(process)

    def getaddrinfo(host: str, *_: object, **__: object) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "no name is known here")

    set_on(socket, "getaddrinfo", getaddrinfo)
    set_on(socket.socket, "connect", connect)
    set_on(socket.socket, "accept", accept)
    set_on(socket.socket, "listen", listen)
    set_on(socket.socket, "getsockopt", getsockopt)
    set_on(signal, "pidfd_send_signal", send_signal)
    set_on(os, "pidfd_open", lambda pid, flags=0: kernel.open_pidfd(pid))
    set_on(os, "sched_getaffinity", lambda pid: {0, 1})
    set_on(os, "cpu_count", lambda: 2)
    set_on(os, "getpid", lambda: kernel.current.process.pid)


def _install_chance(seed: int) -> None:
    drawn = random.Random(seed)
    random.seed(seed)
    set_on(os, "urandom", drawn.randbytes)
    set_on(secrets, "token_hex", lambda size=32: drawn.randbytes(size).hex())


def set_on(place: Any, name: str, value: object) -> None:
    """Replace a name of a module or a class, which must have it: one that has gone is replaced in vain."""
    assert hasattr(place, name), f"{place} has no {name}"
    setattr(place, name, value)
