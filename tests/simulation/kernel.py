"""The simulation's kernel: processes, threads and time. One thread of all of them runs at any moment.

A process is a thread of the operating system with a table of descriptors of its own (`unshare(CLONE_FILES)`),
and the threads that it starts share that table: so sockets, pipes, memory files and the descriptors that go
over sockets are real, and a process that is killed loses its descriptors as the real kernel takes them. What
would wait (a selector, a condition, a queue, a sleep) hands over to whichever thread is next by the virtual
clock; `tests.simulation.interposed` puts these in the place of the standard library's. Which thread is next,
and when, is drawn from one seeded generator.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import errno
import fcntl
import heapq
import itertools
import os
import random
import resource
import select
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NoReturn

CLONE_FILES = 0x400
FIRST_PID = 1000
MAX_FD = 8192
EPOLL_FD = 900  # in every process: what tells which thread's descriptors are ready
MAX_LOOKS = 100  # at the clock without a wait: a thread that spins has to let others run
SLICE_S, MAX_SLICE_S = 5e-5, 2e-2
TICK_S = 2e-7  # how much each look at the clock takes, so that a loop over it ends
_EPOLL_CTL_ADD, _EPOLL_CTL_MOD = 1, 3

_libc = ctypes.CDLL(None, use_errno=True)


class _EpollEvent(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


class SimulationError(Exception):
    """The simulation itself is wrong, or stuck."""


class TaskState(Enum):
    """What a thread is at."""

    READY = auto()  # it runs at a time that is set, or now
    BLOCKED = auto()  # until a descriptor is ready, it is notified, or its time is over
    DONE = auto()


@dataclass(eq=False)
class Task:
    """One thread. `baton` is free while it may run."""

    id: int
    process: Process
    name: str
    baton: _thread.LockType = field(default_factory=_thread.allocate_lock)
    state: TaskState = TaskState.READY
    turn: int = 0  # counts its waits: a wake-up of an earlier one is void
    waiters: list[Task] = field(default_factory=list)  # until it is done
    killer: Task | None = None  # who waits until this process's descriptors are closed
    watches: dict[int, Watch] = field(default_factory=dict)  # by descriptor
    is_fd_ready: bool = False  # which ended its last wait
    is_pausing: bool = False  # between two polls of something: `end_pause` ends that
    is_next_pause_short: bool = False
    cpu_s: float = 0.0


@dataclass(eq=False)
class Watch:
    """A descriptor that a thread waits for. `fd`: as epoll knows it."""

    task: Task
    fd: int
    number: int = -1
    is_armed: bool = False
    is_known: bool = False


@dataclass(eq=False)
class Process:
    """One process: `leader` is its first thread, and closes its descriptors when it ends."""

    pid: int
    name: str
    uid: int
    parent: Process | None
    tasks: list[Task] = field(default_factory=list)
    thread_id: int = 0  # the operating system's, of the leader
    exit_read_fd: int = -1
    exit_write_fd: int = -1
    exit_inode: int = 0
    is_dead: bool = False
    is_over: bool = False  # its main has returned
    is_dying: bool = False  # it was killed, and waits for a call of the kernel: no thread runs
    is_stopped: bool = False
    slowness: float = 1.0  # how much longer than others it waits for a processor
    max_fd: int = MAX_FD  # RLIMIT_NOFILE: a new descriptor has a lower number
    io_bytes: int = 0  # a call on one of its Unix sockets moves so many at most; 0: as many as there are
    # Its next frame breaks off in the middle, and the connection with it: then this is called.
    at_cut: Callable[[], None] | None = None
    is_disk_full: bool = False
    can_start_threads: bool = True
    can_fork: bool = True
    num_wakes: int = 0  # how often a thread of it has run
    held: list[Task] = field(default_factory=list)  # that would run, were it not stopped
    on_death: list[Callable[[], None]] = field(default_factory=list)

    @property
    def leader(self) -> Task:
        """Its first thread."""
        return self.tasks[0]

    @property
    def may_run(self) -> bool:
        """Whether it has not been killed."""
        return not (self.is_dead or self.is_dying)


class Kernel:
    """The processes of one episode. Every method is called by the one thread that runs."""

    def __init__(self, seed: int, latencies_s: Sequence[float] = (2e-5, 1e-4, 4e-4)) -> None:
        """`latencies_s`: how long a thread that could run waits for a processor, drawn for each wait."""
        self.rng = random.Random(seed)
        self.now = 1_000.0
        self.began = self.now
        self.latencies_s = latencies_s
        self._looks = self._spins = 0
        self.preempt_share = 0.0  # of the looks at the clock after which another thread runs
        self.num_switches = 0
        self._max_fd = 0
        self._limit_fds(MAX_FD)
        self._is_between = False  # no thread runs, but what was to happen at a time
        self.failures: list[tuple[Process, str]] = []  # what threads have raised
        self.on_strike: Callable[..., None] = lambda process, seconds=0.0: None  # killed, stopped, resumed
        self.dying_s: Callable[[Process], float] = lambda process: 0.0  # how long what is killed takes to end
        self.at_connect: dict[Process, Callable[[], None]] = {}  # when it next connects to a listener
        self.processes: dict[int, Process] = {}
        self._tasks: list[Task] = []
        self._watches: list[Watch] = []
        self._heap: list[tuple[float, int, Task | Callable[[], None], int]] = []
        self._order = itertools.count()
        with select.epoll() as made:
            os.dup2(made.fileno(), EPOLL_FD)
        self._epoll = select.epoll.fromfd(EPOLL_FD)
        self.host = host = Process(FIRST_PID - 1, "host", 0, None)
        self._event = _EpollEvent()
        self.current = self._add_task(host, "host")
        self.current.baton.acquire()
        host.thread_id = _thread.get_native_id()

    # --- time

    def clock(self) -> float:
        """Return the time. A look at it may be where another thread takes over, and many looks are."""
        self.now += TICK_S
        self.current.cpu_s += TICK_S
        self._looks += 1
        if self._looks > MAX_LOOKS:
            self._spins += 1
            self.wait((), min(MAX_SLICE_S, SLICE_S * self._spins))
        if self.preempt_share and self.rng.random() < self.preempt_share:
            self.preempt()
        return self.now

    def peek(self) -> float:
        """Return the time, without more."""
        self.now += TICK_S
        self.current.cpu_s += TICK_S
        return self.now

    def cpu_clock(self) -> float:
        """Return the processor time of the running thread: looks at clocks are all that takes any."""
        self.peek()
        return self.current.cpu_s

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        """Call `act` at that time, between two threads. It must not touch descriptors."""
        heapq.heappush(self._heap, (time_s, next(self._order), act, 0))

    # --- waiting

    def wait(self, fds: Sequence[tuple[int, int]], timeout_s: float | None) -> bool:
        """Wait until one of (descriptor, poll's events) is ready, or the time is over, or a notification.

        Return whether a descriptor was ready.
        """
        task = self.current
        watched = [self._watch(fd, events, task) for fd, events in fds]
        task.state, task.is_fd_ready = TaskState.BLOCKED, False
        task.turn += 1
        if timeout_s is not None:
            deadline = self.now + max(0.0, timeout_s)
            heapq.heappush(self._heap, (deadline, next(self._order), task, task.turn))
        self._looks = 0
        self._switch()
        if timeout_s is None or fds:
            self._spins = 0
        for watch in watched:
            watch.is_armed = False
        return task.is_fd_ready

    def sleep(self, seconds: float) -> None:
        """Let others run for so long."""
        self.wait((), seconds)

    def notify(self, task: Task) -> None:
        """Wake a thread that waits."""
        if task.state is TaskState.BLOCKED:
            self._make_ready(task)

    def end_pause(self, task: Task, delay_s: float) -> None:
        """Have a thread that pauses between two polls then poll so soon, as if its pauses were short."""

        def end() -> None:
            if task.is_pausing:
                self.notify(task)
            else:  # it may have polled before, and pause now
                task.is_next_pause_short = True

        self.at(self.now + delay_s, end)

    def preempt(self) -> None:
        """Let others run first."""
        task = self.current
        self._make_ready(task)
        self._switch()

    # --- processes

    def spawn(
        self,
        name: str,
        main: Callable[[], None],
        keep_fds: Sequence[int] = (),
        uid: int = 0,
        parent: Process | None = None,
    ) -> Process:
        """Fork a process: the child keeps these descriptors alone, and runs `main`. No `parent`: the host."""
        self._limit_fds(MAX_FD)
        pid = FIRST_PID + len(self.processes)
        process = Process(pid, name, uid, parent or self.host)
        self.processes[pid] = process
        task = self._add_task(process, name)
        forked = _thread.allocate_lock()
        forked.acquire()
        failures: list[BaseException] = []

        def run() -> None:
            try:
                self._become_process(process, keep_fds)
            except BaseException as error:
                failures.append(error)
            task.baton.acquire()
            forked.release()
            self._await_baton(task)
            try:
                main()
            except BaseException:
                self.failures.append((process, traceback.format_exc()))
            self.kill(process, is_over=True)

        _thread.start_new_thread(run, ())
        forked.acquire()
        if failures:
            raise SimulationError(f"cannot fork {name}") from failures[0]
        self._make_ready(task)
        return process

    def start_thread(self, name: str, run: Callable[[], None]) -> Task:
        """Start a thread of the running process."""
        task = self._add_task(self.current.process, name)
        task.baton.acquire()

        def body() -> None:
            self._await_baton(task)
            try:
                run()
            except BaseException:
                self.failures.append((task.process, traceback.format_exc()))
            self.finish(task)

        _thread.start_new_thread(body, ())
        self._make_ready(task)
        return task

    def finish(self, task: Task) -> NoReturn:
        """End a thread that is no leader: it never runs again."""
        task.state = TaskState.DONE
        for waiter in task.waiters:
            self.notify(waiter)
        self._give_up()

    def join(self, task: Task, timeout_s: float | None) -> None:
        """Wait for a thread's end."""
        deadline = None if timeout_s is None else self.now + timeout_s
        while task.state is not TaskState.DONE and (deadline is None or self.now < deadline):
            task.waiters.append(self.current)
            self.wait((), None if deadline is None else deadline - self.now)

    def kill(self, process: Process, *, is_over: bool = False) -> None:
        """Kill a process, wherever it is. Idempotent. The caller's own does not return.

        It ends when its calls in the kernel have come back: until then its descriptors are open. `is_over`:
        it has none, and no memory any more.
        """
        if process.is_dead or process.is_dying:
            return
        process.is_over = is_over
        seconds = 0.0 if is_over else self.dying_s(process)
        self.on_strike(process, seconds)
        if not seconds:
            self._end(process)
            return
        process.is_dying = True
        self.at(self.now + seconds, lambda: self._end(process))
        if process is self.current.process and not self._is_between:
            me = self.current
            self._run(self._next_task())
            self._await_baton(me)  # until it ends

    def _end(self, process: Process) -> None:
        """Close a process's descriptors, and have it be gone."""
        me = self.current
        process.is_dead = True
        if process is me.process:
            self._close_fds(process)
        else:
            process.leader.killer = me
            self.current = process.leader
            process.leader.baton.release()
            me.baton.acquire()
        for act in process.on_death:
            act()
        if process is me.process and not self._is_between:
            self._give_up()

    def stop(self, process: Process) -> None:
        """Stop a process (SIGSTOP)."""
        process.is_stopped = True
        self.on_strike(process)

    def resume(self, process: Process) -> None:
        """Have a stopped process go on (SIGCONT)."""
        process.is_stopped = False
        self.on_strike(process)
        held, process.held = process.held, []
        for task in held:
            self._make_ready(task)

    def take_fds(self, process: Process, num_left: int) -> None:
        """Have a process run out of descriptors once it has opened so many more."""
        taken = {int(name) for name in os.listdir(f"/proc/self/task/{process.thread_id}/fd")}
        free = (number for number in itertools.count() if number not in taken)
        process.max_fd = next(itertools.islice(free, num_left, None))

    def open_pidfd(self, pid: int) -> int:
        """Return a descriptor that is readable once the process is dead. Raises ProcessLookupError."""
        process = self.processes.get(pid)
        if process is None or process.is_dead:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        path = f"/proc/self/task/{process.thread_id}/fd/{process.exit_read_fd}"
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def process_of_pidfd(self, fd: int) -> Process:
        """Return the process that a pidfd is of. Raises ProcessLookupError where it is dead."""
        inode = os.fstat(fd).st_ino
        for process in self.processes.values():
            if not process.is_dead and process.exit_inode == inode:
                return process
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))

    # --- inside

    def _add_task(self, process: Process, name: str) -> Task:
        task = Task(len(self._tasks), process, name)
        self._tasks.append(task)
        process.tasks.append(task)
        return task

    def _become_process(self, process: Process, keep_fds: Sequence[int]) -> None:
        if _libc.unshare(CLONE_FILES):
            raise OSError(ctypes.get_errno(), "unshare")
        process.thread_id = _thread.get_native_id()
        close_all_but({0, 1, 2, EPOLL_FD, *keep_fds})
        process.exit_read_fd, process.exit_write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        process.exit_inode = os.fstat(process.exit_read_fd).st_ino

    def _await_baton(self, task: Task) -> None:
        task.baton.acquire()
        if (killer := task.killer) is not None:
            self._close_fds(task.process)
            self.current = killer
            killer.baton.release()
            _park()

    def _close_fds(self, process: Process) -> None:
        """Close the descriptors of a process that has ended, on one of its threads."""
        self._limit_fds(MAX_FD)
        os.write(process.exit_write_fd, b"x")
        close_all_but({0, 1, 2, EPOLL_FD})

    def _make_ready(self, task: Task) -> None:
        task.state = TaskState.READY
        task.turn += 1
        delay = self.rng.choice(self.latencies_s) * task.process.slowness
        heapq.heappush(self._heap, (self.now + delay, next(self._order), task, task.turn))

    def _switch(self) -> None:
        """Run whichever thread is next; return when this one is."""
        me = self.current
        chosen = self._next_task()
        if chosen is me:
            return
        has_ended = me.process.is_dead  # whom it hands over to may kill it, and waits for it
        self._run(chosen)
        if has_ended:
            _park()
        self._await_baton(me)

    def lift_fd_limit(self) -> None:
        """Let the running process open descriptors until it waits next: those are not its own."""
        self._limit_fds(MAX_FD)

    def _limit_fds(self, number: int) -> None:
        if number != self._max_fd:
            self._max_fd = number
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (number, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
            )

    def _give_up(self) -> NoReturn:
        """Run whichever thread is next, and never this one."""
        self._run(self._next_task())
        _park()

    def _run(self, task: Task) -> None:
        self.num_switches += 1
        task.process.num_wakes += 1
        self._limit_fds(task.process.max_fd)
        self.current = task
        task.baton.release()

    def _next_task(self) -> Task:
        heap = self._heap
        while True:
            for number, _ in self._epoll.poll(0):
                watch = self._watches[number]
                if watch.is_armed and watch.task.state is TaskState.BLOCKED:
                    watch.task.is_fd_ready = True
                    self._make_ready(watch.task)
            if not heap:
                raise SimulationError(f"nothing is left to run\n{self.describe()}")
            time_s, _, what, turn = heapq.heappop(heap)
            self.now = max(self.now, time_s)
            if not isinstance(what, Task):
                self._is_between = True
                self._limit_fds(MAX_FD)
                try:
                    what()
                except BaseException:
                    self.failures.append((self.host, traceback.format_exc()))
                self._is_between = False
                continue
            if not what.process.may_run or what.turn != turn or what.state is TaskState.DONE:
                continue
            if what.state is TaskState.BLOCKED:
                what.state = TaskState.READY
            self._limit_fds(what.process.max_fd)
            if what.process.is_stopped:
                what.process.held.append(what)
                continue
            return what

    def _watch(self, fd: int, events: int, task: Task) -> Watch:
        """Have a descriptor wake a thread, once.

        Two processes may have one open file under one number, which epoll takes for the same: then a copy is
        watched. What is watched stays so, and wakes nobody while it is not armed.
        """
        watch = task.watches.get(fd)
        if watch is None:
            watch = task.watches[fd] = Watch(task, fd)
            self._watches.append(watch)
            watch.number = len(self._watches) - 1
        watch.is_armed = True
        events |= select.EPOLLONESHOT
        if not self._control(_EPOLL_CTL_MOD, watch.fd, events, watch.number) and watch.is_known:
            return watch
        if watch.fd != fd:
            os.close(watch.fd)
        watch.fd, watch.is_known = fd, True
        while error := self._control(_EPOLL_CTL_ADD, watch.fd, events, watch.number):
            if error != errno.EEXIST:
                raise OSError(error, f"cannot wait for descriptor {fd} of {task.name}")
            self._limit_fds(MAX_FD)
            copy = fcntl.fcntl(watch.fd, fcntl.F_DUPFD_CLOEXEC, watch.fd + 1)
            self._limit_fds(task.process.max_fd)
            if watch.fd != fd:
                os.close(watch.fd)
            watch.fd = copy
        return watch

    def _control(self, operation: int, fd: int, events: int, data: int) -> int:
        event = self._event
        event.events, event.data = events, data
        return ctypes.get_errno() if _libc.epoll_ctl(EPOLL_FD, operation, fd, ctypes.byref(event)) else 0

    def describe(self) -> str:
        """Return what each thread is at, for people."""
        return "\n".join(
            f"{task.process.pid} {task.name}: {'dead' if task.process.is_dead else task.state.name}"
            for task in self._tasks
        )


def can_fork() -> bool:
    """Whether the system lets a thread have descriptors of its own: some containers do not."""
    refused = []

    def probe() -> None:
        refused.append(_libc.unshare(CLONE_FILES))

    thread = threading.Thread(target=probe)
    thread.start()
    thread.join()
    return refused == [0]


def close_all_but(keep: set[int]) -> None:
    """Close descriptors of the calling thread's table."""
    for name in os.listdir("/proc/thread-self/fd"):
        fd = int(name)
        if fd not in keep:
            with contextlib.suppress(OSError):  # the one by which the list was read
                os.close(fd)


def _park() -> NoReturn:
    forever = _thread.allocate_lock()
    forever.acquire()
    forever.acquire()
    raise SimulationError("a parked thread runs")
