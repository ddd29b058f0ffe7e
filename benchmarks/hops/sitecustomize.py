"""Loaded by every process of `benchmarks/latency.py --hops`: records when messages pass marked methods."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

KEPT = 300  # marks are written in batches of this size: one write costs more than what is measured
_MARKS: list[tuple[str, float]] = []


def _before(owner: Any, method: str, name: str, wanted: str = "") -> None:
    """Record the time before each call of a method; with `wanted`, only if an argument is of that type."""
    original = getattr(owner, method)

    def noted(*args: Any, **more: Any) -> Any:
        if not wanted or any(type(a).__name__ == wanted for a in args):
            _MARKS.append((name, time.perf_counter()))
        return original(*args, **more)

    setattr(owner, method, noted)


def _after(owner: Any, method: str, name: str, wanted: str = "") -> None:
    original = getattr(owner, method)

    def noted(*args: Any, **more: Any) -> Any:
        result = original(*args, **more)
        if not wanted or any(type(a).__name__ == wanted for a in args):
            _MARKS.append((name, time.perf_counter()))
            _write()
        return result

    setattr(owner, method, noted)


def _write() -> None:
    if len(_MARKS) < KEPT:
        return
    text = "".join(f"{name} {when:.9f}\n" for name, when in _MARKS)
    _MARKS.clear()
    with open(os.path.join(os.environ["BENCH_HOPS"], str(os.getpid())), "a") as file:
        file.write(text)


def _mark_mover() -> None:
    from kvxferd.mover.process.loop import MoverLoop
    from kvxferd.mover.process.pull_engine import PullEngine

    _before(MoverLoop, "_receive", "mover woke")
    _before(PullEngine, "start", "mover has the pull")
    _before(PullEngine, "_post_slice", "mover posts data")
    _before(PullEngine, "_post_fence", "mover looks for the fence")
    _before(PullEngine, "_report", "mover knows")
    _before(MoverLoop, "_notify_worker", "mover tells the worker")
    _after(MoverLoop, "_notify_worker", "mover told the worker")


def _mark_daemon() -> None:
    from kvxferd.control.worker_socket import WorkerSocket
    from kvxferd.daemon import Daemon
    from kvxferd.mover.supervisor.handle import MoverHandle

    _before(WorkerSocket, "_readable", "daemon woke for the worker")
    _before(Daemon, "_feed", "daemon feeds its core", "WorkerMessage")
    _before(MoverHandle, "send", "daemon sends to the mover", "StartPull")
    _after(MoverHandle, "send", "daemon sent to the mover", "StartPull")
    _before(MoverHandle, "_read", "daemon woke for the mover")
    _before(WorkerSocket, "send", "daemon sends to the worker", "Delivered")
    _after(WorkerSocket, "send", "daemon sent to the worker", "Delivered")


if "BENCH_HOPS" in os.environ:
    if "kvxferd.mover.process.forkserver" in sys.orig_argv:
        _mark_mover()
    elif "serve" in sys.orig_argv:
        _mark_daemon()
