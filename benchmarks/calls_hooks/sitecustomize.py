"""Counts the Python calls and bytecodes of a pull's way, in any process with this folder on its PYTHONPATH.

CALLS_DIRECTORY names a folder. Each process appends to a file there, one line for each time that it went from
the first to the last function of a span of `SPANS`: the span, calls, bytecodes; and the calls, each indented
by its depth with its bytecodes behind it. Counts do not depend on what else the machine does.
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from typing import Any

# From the call of the first function to the return of the last, in one thread.
SPANS = (
    ("engine: pull() until its request is sent", "RankHandle.pull", "Connection.flush"),
    ("daemon: the request until its mover has it", "WorkerSocket._readable", "MoverProcesses.send"),
    ("mover: the request until its worker has Delivered", "MoverLoop._receive", "MoverLoop._notify_worker"),
    ("engine: the event", "Connection.drain_events", "Connection.drain_events"),
)
FIRST = {first: number for number, (_, first, _) in enumerate(SPANS)}


class _Counter:
    """What one thread has counted of the span that it is in."""

    def __init__(self) -> None:
        self._span = -1
        self._stack: list[list[Any]] = []
        self._calls: list[list[Any]] = []  # depth, function, bytecodes

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        """Begin to count a call, which is all that `sys.settrace` reports here."""
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        name = frame.f_code.co_qualname
        if name in FIRST and (self._span < 0 or name == "MoverLoop._receive"):  # the last frame counts
            self._span, self._stack, self._calls = FIRST[name], [], []
        if self._span >= 0:
            call = [len(self._stack), f"{frame.f_code.co_filename}:{name}", 0]
            self._stack.append(call)
            self._calls.append(call)
        return self._inside

    def _inside(self, frame: FrameType, event: str, arg: object) -> Any:
        if self._span >= 0 and self._stack:
            if event == "opcode":
                self._stack[-1][2] += 1
            elif event == "return":
                self._leave(frame.f_code.co_qualname)
        return self._inside

    def _leave(self, name: str) -> None:
        what, first, last = SPANS[self._span]
        if name == last:
            bytecodes = sum(call[2] for call in self._calls)
            with open(os.path.join(os.environ["CALLS_DIRECTORY"], str(os.getpid())), "a") as file:
                file.write(f"# {what}: {len(self._calls)} calls, {bytecodes} bytecodes\n")
                file.writelines(f"{'  ' * depth}{where} {num}\n" for depth, where, num in self._calls)
        if name == last or (name == first and first == "WorkerSocket._readable"):  # it was no pull's
            self._span = -1
        elif len(self._stack) > 1:
            self._stack.pop()


if "CALLS_DIRECTORY" in os.environ:
    _of_thread = threading.local()

    def _trace(frame: FrameType, event: str, arg: object) -> Any:
        if not hasattr(_of_thread, "counter"):
            _of_thread.counter = _Counter()
        return _of_thread.counter.trace(frame, event, arg)

    threading.settrace(_trace)
    sys.settrace(_trace)
