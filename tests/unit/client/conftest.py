"""A stage for each test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvxferd.memory import SealedMemory
from tests.support.client_harness import SIZE, Stage
from tests.support.nodes.waiting import wait_until
from tests.support.open_fds import num_open_fds
from tests.support.scripted_daemon import ScriptedDaemon


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A daemon that listens; afterwards no descriptor, thread or process is left."""
    threads, fds = threading.active_count(), num_open_fds(collect=False)
    with ExitStack() as stack:
        daemon = ScriptedDaemon(tmp_path / "worker.sock")
        stack.callback(daemon.stop)
        memory = SealedMemory.create(SIZE)
        stack.callback(memory.close)
        pool = ThreadPoolExecutor(8)
        stack.callback(pool.shutdown)
        yield Stage(daemon, stack, pool, memory)
    wait_until(lambda: threading.active_count() <= threads, "threads ended")
    assert num_open_fds(collect=False) <= fds  # fewer: the collector closed what an earlier test had dropped
