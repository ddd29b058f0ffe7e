"""A session's one I/O thread: it reaches the daemon, sends, receives and keeps the time."""

from __future__ import annotations

import math
import os
import random
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from kvxferd.client.events import Event
from kvxferd.client.fence import FenceSlots
from kvxferd.client.mailbox import Mailbox
from kvxferd.client.movers import MoverWatch, all_quiet
from kvxferd.client.notices import Notices
from kvxferd.client.session import Session
from kvxferd.client.standing import FINAL
from kvxferd.errors import Code, EngineError, KvxferdError, ProtocolError
from kvxferd.ids import Ticket
from kvxferd.link import Link, close_all
from kvxferd.memory import FencePage
from kvxferd.wire import worker
from kvxferd.wire.codec import DAEMON_MESSAGES, encode
from kvxferd.wire.framing import Frame

# Seconds between tries to reach a daemon: a restarted one is found within 2 s, and a missing one
# costs next to nothing. Spread, so that a node's ranks do not come all at once.
RETRY_S = (0.05, 0.1, 0.2, 0.4, 0.8)
CLOSE_S = 2.0  # a resident mover is gone within milliseconds, or is stuck in its library
# Of a request that an engine's thread sends itself. A longer one waits for the other thread: encoding
# 64 KiB of block ids and handing them to the kernel takes as long as waking it.
DIRECT_BYTES = 32 << 10
# For some seconds after a request the thread looks at the session each second: the next request's deadline
# is later than that, so it need not be woken for each, beside the engine's thread that has just asked.
BUSY_S = 5.0
LOOK_S = 1.0
MAX_PAUSE_S = 3600.0
LIVED_S = 2.0  # a connection that lasted this long starts the tries anew


class Connection:
    """Owns the thread, the socket, the fence page and every descriptor. `close` gives all back."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self._given_back = ExitStack()
        try:
            self._open(path, name)
        except BaseException:
            self._given_back.close()
            raise

    def _open(self, path: Path, name: str) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)  # the session's standing, or an answer
        self.mailbox = Mailbox()
        self._given_back.callback(self.mailbox.close)
        page = FencePage.create()
        fence = FenceSlots(page)
        self._given_back.callback(fence.close)
        self._notices = Notices()
        self._given_back.callback(self._notices.close)
        self._events = select.epoll()  # readable while the mailbox or the notices are
        self._given_back.callback(self._events.close)
        for source in (self.mailbox, self._notices):
            self._events.register(source.fileno(), select.EPOLLIN)
        hello = (page.fd, self._notices.far_end)
        self.session = Session(name, fence, hello, self.mailbox.put)
        self.trouble: OSError | None = None  # why the daemon was not reached just now
        self._selector = selectors.DefaultSelector()
        self._given_back.callback(self._selector.close)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._given_back.callback(os.close, self._wake_fd)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._woken)
        self._movers = MoverWatch(self._selector, self._quiet)
        self._link: Link | None = None
        self._sending = threading.Lock()  # of who sends on the link or closes it; taken after `lock`
        self._looks_at = 0.0  # when the thread looks at the session by itself
        self._asked_at = -math.inf  # when an engine's thread last sent a request
        self._watching = selectors.EVENT_READ
        self._linked_at = 0.0
        self._tries = 0
        self._retry_at = 0.0
        self._closing = False
        self._hang_up = False
        self._hang_up_why = (Code.DAEMON_LOST, "")
        self._thread = threading.Thread(target=self._run, name=f"kvxferd-client-{path.name}", daemon=True)
        self._thread.start()

    # --- the engine's threads

    def pass_on(self) -> None:
        """Have what was queued sent: here if that takes a moment, else by the thread. With the lock held.

        A short request that goes out from the engine's own thread is with the daemon before the
        other thread would have woken up.
        """
        link = self._link
        if (
            link is None
            or self._hang_up
            or not link.idle
            or not self.session.has_little_to_say(DIRECT_BYTES)
            or not self._sending.acquire(blocking=False)
        ):
            self.wake()
            return
        self._asked_at = time.monotonic()
        try:
            if self._link is link and (outgoing := self.session.next_outgoing(self._asked_at)) is not None:
                link.send(encode(outgoing.message))
                link.flush()
            is_done = link.idle
        finally:
            self._sending.release()
        deadline = self.session.next_deadline()
        if not is_done or (deadline is not None and deadline < self._looks_at):
            self.wake()

    def wake(self) -> None:
        """Have the thread look at the session. With the lock held."""
        if not self._closing:
            os.eventfd_write(self._wake_fd, 1)

    def hang_up(self, code: Code = Code.DAEMON_LOST, why: str = "the client gave the connection up") -> None:
        """Have the thread end this connection to the daemon. With the lock held."""
        self._hang_up, self._hang_up_why = True, (code, why)
        self.wake()

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Return whether `ready` came true in time. With the lock held."""
        return self.changed.wait_for(ready, timeout_s)

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a pull, from any thread."""
        with self.lock:
            self.session.cancel(ticket)
            self.pass_on()

    def fileno(self) -> int:
        """Return the descriptor that is readable while there are events; -1 after `close`."""
        return -1 if self._events.closed else self._events.fileno()

    def take_events(self) -> list[Event]:
        """Return all events, oldest first, and forget them."""
        if self.session.awaits_notices:
            with self.lock:
                self._take_notices()
        return self.mailbox.take()

    def _take_notices(self) -> None:
        """Take what movers have said: before anything else is decided of a pull. With the lock held."""
        try:
            for delivered in self._notices.take():
                self.session.noticed(delivered)
        except KvxferdError as error:
            self.hang_up(error.code, f"a mover spoke nonsense: {error.message}")

    def close(self) -> None:
        """End the session and give everything back. Idempotent; waits for no daemon."""
        with self.lock:
            if not self._closing:
                self._closing = True
                os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        with self.lock:
            self._given_back.close()

    # --- the I/O thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
            self._finish(Code.CANCELLED, "the client was closed")
        except BaseException as error:
            # Our own bug. The engine must hear of it, and nothing may wait for a thread that is gone.
            self._finish(Code.INTERNAL, f"the client's I/O thread failed: {error!r}")
            raise

    def _turn(self) -> None:
        now = time.monotonic()
        if self._hang_up:
            self._hang_up = False
            self._drop(*self._hang_up_why)
        try:
            with self.lock:
                self._take_notices()
                self.session.tick(now)
        except KvxferdError as error:
            self._drop(error.code, error.message)
        if self._link is None and now >= self._retry_at and self.session.final is None:
            self._dial(now)
        self._send()
        for key, _ in self._selector.select(self._pause()):
            key.data()

    def _pause(self) -> float | None:
        now = time.monotonic()
        with self.lock:
            times = [self.session.next_deadline()]
            if now < self._asked_at + BUSY_S:
                times.append(now + LOOK_S)
            if self._link is None and self.session.final is None:
                times.append(self._retry_at)
            earliest = min((t for t in times if t is not None), default=None)
            self._looks_at = math.inf if earliest is None else earliest
        # Selectors count milliseconds in an int: a lease of years would be too much for them.
        return None if earliest is None else min(max(0.0, earliest - now), MAX_PAUSE_S)

    def _woken(self) -> None:
        os.eventfd_read(self._wake_fd)

    def _dial(self, now: float) -> None:
        try:
            self._link = Link(_connected(self.path))
        except OSError as error:
            with self.lock:
                self.trouble = error
                self.changed.notify_all()
            self._retry_later(now)
            return
        self._linked_at = now
        self._watching = selectors.EVENT_READ
        self._selector.register(self._link, self._watching, self._ready)
        with self.lock:
            self.trouble = None
            self.session.connected(now)

    def _retry_later(self, now: float) -> None:
        step = RETRY_S[min(self._tries, len(RETRY_S) - 1)]
        self._tries += 1
        self._retry_at = now + step * random.uniform(0.8, 1.2)

    def _ready(self) -> None:
        if self._link is not None:
            self._receive(self._link)

    def _send(self) -> None:
        link = self._link
        if link is None:
            return
        while not self._send_one(link):
            pass
        watching = selectors.EVENT_READ | (0 if link.idle else selectors.EVENT_WRITE)
        if watching != self._watching:
            self._watching = watching
            self._selector.modify(link, watching, self._ready)

    def _send_one(self, link: Link) -> bool:
        """Hand the kernel what waits, then one message; return whether nothing more can go now."""
        with ExitStack() as holding:
            with self.lock:
                holding.enter_context(self._sending)
                link.flush()
                outgoing = self.session.next_outgoing(time.monotonic()) if link.idle else None
                if outgoing is not None:
                    self._watch_own()
                # The session may close its own while these wait for the socket.
                fds = tuple(os.dup(fd) for fd in outgoing.fds) if outgoing is not None else ()
            if outgoing is not None:
                link.send(encode(outgoing.message), fds)
                link.flush()
        return outgoing is None

    def _receive(self, link: Link) -> None:
        try:
            frames = link.receive()
        except ProtocolError as error:
            self._drop(error.code, error.message)
            return
        if frames is None:
            self._drop(Code.DAEMON_LOST, "the daemon closed the connection")
            return
        for position, frame in enumerate(frames):
            try:
                self._take(frame)
            except KvxferdError as error:
                for later in frames[position + 1 :]:
                    close_all(later.fds)
                self._drop(error.code, error.message)
                return
        with self.lock:
            self.changed.notify_all()

    def _take(self, frame: Frame) -> None:
        fds = deque(frame.fds)  # those that nobody has yet
        try:
            message = DAEMON_MESSAGES.decode(frame.payload)
            self._check_descriptors(message, len(fds))
            if self.session.brings_fence(message):
                page = self._map_page(fds[0])
                os.close(fds.popleft())
                with self.lock:
                    self.session.offer_fence(page)
            # The pidfd first: the session may only believe in movers that are watched.
            while fds:
                self._watch(fds[0])
                fds.popleft()
        except BaseException:
            close_all(fds)
            raise
        with self.lock:
            self._take_notices()
            if not self._hang_up:
                self.session.feed(message, time.monotonic())
                self._watch_own()  # before anybody sends what the session has to say

    def _check_descriptors(self, message: worker.DaemonMessage, num_fds: int) -> None:
        enrolment = self.session.enrolment
        brings_mover = isinstance(message, worker.MoverChanged) or (
            isinstance(message, worker.Registered) and enrolment.is_rank
        )
        if enrolment.version >= worker.FIRST_WITH_OFFERS:
            brings_mover = isinstance(message, worker.MoverOffered)
        wanted = 1 if brings_mover and not enrolment.is_resident else 0
        wanted += self.session.brings_fence(message)
        if num_fds != wanted:
            raise ProtocolError(f"{type(message).__name__} carries {wanted} descriptors: {num_fds} came")

    def _map_page(self, fd: int) -> FencePage:
        """Map the daemon's fence page; the descriptor stays the caller's."""
        try:
            return FencePage.map(fd)
        except (EngineError, OSError) as error:
            raise ProtocolError(f"the daemon's fence page is none: {error}") from error

    def _watch(self, pidfd: int) -> None:
        """Watch a mover. Takes the pidfd, unless it raises."""
        try:
            self._movers.watch(self.session.epoch, pidfd)
        except OSError as error:
            raise ProtocolError(f"cannot watch a mover by the descriptor that came: {error}") from error

    def _watch_own(self) -> None:
        """Watch the movers that were started in this process. With the lock held."""
        for mover in self.session.enrolment.take_unwatched():
            self._movers.watch(self.session.epoch, os.dup(mover.fileno()))

    def _drop(self, code: Code, why: str) -> None:
        if self._link is None:
            return
        now = time.monotonic()
        self._selector.unregister(self._link)
        with self._sending:
            self._link.close()
            self._link = None
        if now - self._linked_at > LIVED_S:
            self._tries = 0
        self._retry_later(now)
        with self.lock:
            self._watch_own()
            self._take_notices()
            self.session.lose(now, code, why)
            if code in FINAL:
                self.session.end(code, why)
            self.changed.notify_all()
        self._movers.end(self.session.epoch)

    def _quiet(self, epoch: int) -> None:
        with self.lock:
            self._take_notices()
            self.session.quiet(epoch)

    def _finish(self, code: Code, why: str) -> None:
        with self.lock:
            self._closing = True
            self._say_last_words()
            own = self.session.enrolment.stop_movers()
        # Not with the lock: engine threads would wait too.
        are_quiet = all_quiet(own, CLOSE_S)
        with self.lock:
            self._say_last_words()
            if self.session.enrolment.is_resident and are_quiet:
                self.session.settle(time.monotonic(), code, why)
            self.session.close(code, why)
            self.changed.notify_all()
        with self._sending:
            if self._link is not None:
                self._link.close()
        self._movers.close()

    def _say_last_words(self) -> None:
        """Have the daemon know which pulls have been delivered. With the lock held."""
        self._take_notices()
        words = self.session.last_words()
        with self._sending:
            if words is not None and self._link is not None:
                self._link.send(encode(words))
                self._link.flush()


def _connected(path: Path) -> socket.socket:
    """Return a socket to whoever listens there. Raises OSError; never waits."""
    dialled = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        dialled.connect(os.fspath(path))
    except BaseException:
        dialled.close()
        raise
    return dialled
