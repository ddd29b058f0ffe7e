"""A node that is served over HTTP, peer sockets that end with their test, and a system without threads."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.support.http_harness import ServedNode, config_in, served
from tests.support.peer_socket_harness import ListeningPeer


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[ServedNode]:
    """A node that never changes, over HTTP."""
    async with served(config_in(tmp_path)) as found:
        yield found


@pytest.fixture
async def start_peer() -> AsyncIterator[Callable[..., ListeningPeer]]:
    """Starts peer sockets, with the arguments of `ListeningPeer`."""
    started: list[ListeningPeer] = []

    def start(*address: str, **parts: object) -> ListeningPeer:
        started.append(ListeningPeer(*address, **parts))
        return started[-1]

    yield start
    for peer in started:
        peer.stop()


@pytest.fixture
def no_thread_left(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """Meanwhile the system has no thread for anybody."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    @contextmanager
    def refusing() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            yield

    return refusing
