"""What the daemon tells its core where no descriptor is left for what was decided."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any

from kvxferd.config import Config, LoadedConfig
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
    def bind_fds(self, session: SessionId) -> tuple[int, ...]:
        return (0, 1)

    def fence_page_fd(self, session: SessionId) -> int:
        return 0

    def detach_mover(self, session: SessionId) -> None:
        raise none_left()


class Handle:
    """A mover to which nothing can be sent."""

    num_kills = 0

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        raise none_left()

    def kill(self) -> None:
        self.num_kills += 1


def do(effect: fx.Effect) -> tuple[list[Any], Handle]:
    """Have a daemon without descriptors do it; return what the core is fed then, and the mover."""
    daemon, core, handle = Daemon(LoadedConfig(Config())), Core(effect), Handle()
    daemon._node = core  # type: ignore[assignment]
    daemon._worker_socket = Workers()  # type: ignore[assignment]
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


async def test_a_resident_mover_that_cannot_be_taken_is_unavailable() -> None:
    ((told,), _) = do(fx.RequestMover(SESSION, resident=True))
    assert isinstance(told, ev.MoverUnavailable)
    assert (told.session, told.refusal.code) == (SESSION, Code.BUSY)
    assert "Too many open files" in told.refusal.message
    assert told.refusal.retry_after_s > 0
