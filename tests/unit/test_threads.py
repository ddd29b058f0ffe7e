"""A daemon without threads says why it cannot start; a thread that never returns holds up no exit."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import zmq

from kvxferd.control.allowed_keys_file import AllowedKeysFile
from kvxferd.control.connection_guard import ConnectionGuard
from kvxferd.errors import ConfigError
from kvxferd.telemetry.traces.tracer import Tracer
from kvxferd.threads import on_thread


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)


without_threads = pytest.mark.usefixtures("no_thread")


@without_threads
def test_keys_are_not_watched(tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("# none yet")
    watched = AllowedKeysFile(str(keys))
    with pytest.raises(ConfigError, match="watch the file of keys: can't start new thread; raise the limit"):
        watched.start(lambda found: None)
    watched.stop()


@without_threads
def test_connections_are_not_watched():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        guard = ConnectionGuard(router, has_curve=False, request_read=lambda: None)
        with pytest.raises(ConfigError, match="watch connections to the peer socket: can't start new thread"):
            guard.start(1)


@without_threads
def test_traces_are_not_exported():
    tracer = Tracer(lambda spans: "", lambda: None)
    with pytest.raises(ConfigError, match="export traces: can't start new thread"):
        tracer.start()


def test_work_that_never_ends_holds_up_no_exit():
    release, ended = threading.Event(), threading.Event()

    def stuck() -> None:
        release.wait(60)
        ended.set()

    async def leave() -> object:
        on_thread(stuck, "stuck")
        return await asyncio.gather(
            on_thread(lambda: 7, "right"), on_thread(lambda: 1 // 0, "wrong"), return_exceptions=True
        )

    right, wrong = asyncio.run(leave())
    assert right == 7
    assert isinstance(wrong, ZeroDivisionError)
    assert not ended.is_set()
    release.set()
    assert ended.wait(60)
