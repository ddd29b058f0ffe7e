"""Notes when the steps of a pull begin and end, in any process that has this folder on its PYTHONPATH.

TIMELINE_DIRECTORY names a folder; each process writes a file there. Nothing of the product is changed: its
functions are wrapped as their modules are imported, which costs a step about a microsecond.
"""

from __future__ import annotations

import functools
import importlib.abc
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# The steps, in the order of a pull: module, function, what it is.
STEPS = (
    ("kvxferd.client.rank", "RankHandle.pull", "engine: pull()"),
    ("kvxferd.client.connection", "Connection.flush", "engine: encode and send the request"),
    ("kvxferd.control.worker_socket", "WorkerSocket._readable", "daemon: handle the worker's frames"),
    ("kvxferd.core.worker_requests", "WorkerRequests.pull", "daemon: check the request, start the pull"),
    ("kvxferd.mover.supervisor.processes", "MoverProcesses.send", "daemon: send to the mover"),
    ("kvxferd.mover.process.loop", "MoverLoop._handle", "mover: handle the daemon's frame"),
    ("kvxferd.mover.reads.pull_engine", "PullEngine._start_expansion", "mover: plan the runs"),
    ("kvxferd.mover.reads.pull_engine", "PullEngine._post_slice", "mover: post data"),
    ("kvxferd.mover.reads.pull_engine", "PullEngine._on_read_done", "mover: a read is done"),
    ("kvxferd.mover.reads.pull_engine", "PullEngine._post_fence", "mover: post the fence read"),
    ("kvxferd.mover.process.loop", "MoverLoop._notify_worker", "mover: send Delivered to the worker"),
    ("kvxferd.mover.process.loop", "MoverLoop._send", "mover: send to the daemon"),
    ("kvxferd.client.connection", "Connection.drain_events", "engine: take the event"),
    ("kvxferd.mover.supervisor.handle", "MoverHandle._decode_frame", "daemon: handle the mover's frame"),
    ("kvxferd.control.peer_socket", "PeerSocket.send", "daemon: send to the source's daemon"),
    ("kvxferd.control.peer_socket", "PeerSocket.reply", "source's daemon: reply"),
)
RECORD = struct.Struct("<HHIQ")  # the step's number, 0 begin or 1 end, process, nanoseconds
NUM_RECORDS = 1 << 18


class _Log:
    """This process's file."""

    def __init__(self) -> None:
        self._pid = -1
        self._memory: mmap.mmap | None = None
        self._at = 0

    def note(self, step: int, is_end: int) -> None:
        now, pid = time.monotonic_ns(), os.getpid()
        if pid != self._pid:  # a fork
            path = os.path.join(os.environ["TIMELINE_DIRECTORY"], str(pid))
            fd = os.open(path, os.O_RDWR | os.O_CREAT)
            os.ftruncate(fd, RECORD.size * NUM_RECORDS)
            self._memory, self._pid, self._at = mmap.mmap(fd, 0), pid, 0
            os.close(fd)
        if self._memory is not None and self._at < len(self._memory):
            RECORD.pack_into(self._memory, self._at, step, is_end, pid, now)
            self._at += RECORD.size


_LOG = _Log()


def _wrapped(call: Callable[..., Any], step: int) -> Callable[..., Any]:
    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        _LOG.note(step, 0)
        try:
            return call(*args, **kwargs)
        finally:
            _LOG.note(step, 1)

    return noted


def wrap(module: ModuleType) -> None:
    """Wrap the steps of one module."""
    for number, (name, function, _) in enumerate(STEPS):
        if name == module.__name__:
            owner, _, method = function.partition(".")
            kind = getattr(module, owner)
            setattr(kind, method, _wrapped(getattr(kind, method), number))


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    execute(module)
    wrap(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps what is imported from now on."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if all(name != module for module, _, _ in STEPS):
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                loader = spec.loader
                assert loader is not None
                loader.exec_module = functools.partial(_execute, loader.exec_module)  # type: ignore[method-assign]
                return spec
        return None


if "TIMELINE_DIRECTORY" in os.environ:
    sys.meta_path.insert(0, _Finder())
