"""A daemon without threads says why it cannot start."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import zmq

from kvxferd.control.allowed_keys_file import AllowedKeysFile
from kvxferd.control.connection_guard import ConnectionGuard
from kvxferd.errors import ConfigError
from kvxferd.telemetry.traces.tracer import Tracer


@pytest.fixture(autouse=True)
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)


def test_keys_are_not_watched(tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("# none yet")
    watched = AllowedKeysFile(str(keys))
    with pytest.raises(ConfigError, match="watch the file of keys: can't start new thread; raise the limit"):
        watched.start(lambda found: None)
    watched.stop()


def test_connections_are_not_watched():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        guard = ConnectionGuard(router, has_curve=False, request_read=lambda: None)
        with pytest.raises(ConfigError, match="watch connections to the peer socket: can't start new thread"):
            guard.start(1)


def test_traces_are_not_exported():
    tracer = Tracer(lambda spans: "", lambda: None)
    with pytest.raises(ConfigError, match="export traces: can't start new thread"):
        tracer.start()
