"""What the daemon tells its core where no descriptor is left for what was decided."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from kvxferd.config import Config, LoadedConfig, MoverConfig
from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.daemon import Daemon
from kvxferd.errors import Code
from kvxferd.ids import MoverId, SessionId
from kvxferd.wire.common import Message
from kvxferd.wire.mover import Bind, FenceRefused

SESSION, MOVER = SessionId(3), MoverId(5)


def none_left() -> OSError:
    return OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class Core:
    """Decides one thing at the first event; keeps what it is fed."""

    pulls = ()

    def __init__(self, effect: fx.Effect) -> None:
        self.fed: list[ev.Event] = []
        self.effects = [effect]

    def feed(self, event: ev.Event, now: float) -> list[fx.Effect]:
        self.fed.append(event)
        effects, self.effects = self.effects, []
        return effects

    def next_deadline(self) -> float | None:
        return None


class Workers:
    """The worker socket. `brought`: a session's resident mover; None: no descriptor is left to take it."""

    def __init__(self, brought: tuple[socket.socket, tuple[int, int]] | None = None) -> None:
        self._brought = brought

    def bind_fds(self, session: SessionId) -> tuple[int, ...]:
        return (0, 1)

    def fence_page_fd(self, session: SessionId) -> int:
        return 0

    def detach_mover(self, session: SessionId) -> tuple[socket.socket, tuple[int, int]]:
        assert session == SESSION
        if self._brought is None:
            raise none_left()
        return self._brought


class Handle:
    """A mover to which nothing can be sent."""

    num_kills = 0
    is_unforked = False

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        raise none_left()

    def kill(self) -> None:
        self.num_kills += 1


def do(effect: fx.Effect, workers: Workers | None = None, backend: str = "UCX") -> tuple[list[Any], Handle]:
    """Have a daemon without descriptors do it; return what the core is fed then, and the mover."""
    daemon, core, handle = (
        Daemon(LoadedConfig(Config(mover=MoverConfig(backend=backend)))),
        Core(effect),
        Handle(),
    )
    daemon._node = core  # type: ignore[assignment]
    daemon._worker_socket = workers or Workers()  # type: ignore[assignment]
    daemon._ownership_file = None  # type: ignore[assignment]
    daemon._make_movers(())
    daemon._movers._handles[MOVER] = handle  # type: ignore[assignment]
    daemon._on_event(ev.Tick())
    return core.fed[1:], handle


async def test_a_mover_that_cannot_be_bound_is_killed() -> None:
    fed, handle = do(fx.BindMover(MOVER, SESSION, Bind(regions=())))
    assert (fed, handle.num_kills) == ([], 1)


async def test_a_fence_page_that_cannot_be_shared_is_refused() -> None:
    ((said,), handle) = do(fx.ShareFencePage(MOVER, SESSION))
    assert (said.mover, said.message.session, said.message.code) == (MOVER, SESSION, Code.BUSY)
    assert isinstance(said.message, FenceRefused)
    assert "Too many open files" in said.message.message
    assert handle.num_kills == 0


async def test_a_resident_mover_that_cannot_be_taken_is_refused() -> None:
    ((told,), _) = do(fx.AcceptResidentMover(MOVER, SESSION))
    assert isinstance(told, ev.MoverNotStarted)
    assert (told.mover, told.refusal.code) == (MOVER, Code.BUSY)
    assert "Too many open files" in told.refusal.message
    assert told.refusal.retry_after_s > 0


@pytest.mark.parametrize("has_pidfd", [True, False])
async def test_a_resident_mover_is_refused_beside_another_backend(has_pidfd: bool) -> None:
    ours, theirs = socket.socketpair()
    exit_fd = os.dup(0) if has_pidfd else -1
    workers = Workers((ours, (os.getpid(), exit_fd)))
    ((told,), _) = do(fx.AcceptResidentMover(MOVER, SESSION), workers, "LIBFABRIC")
    assert isinstance(told, ev.MoverNotStarted)
    assert (told.mover, told.refusal.code) == (MOVER, Code.NIXL_UNAVAILABLE)
    assert "mover.backend here is LIBFABRIC" in told.refusal.message
    assert theirs.recv(1) == b"", "the daemon's end is closed, so the worker's thread ends"
    if has_pidfd:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(exit_fd)
    theirs.close()
