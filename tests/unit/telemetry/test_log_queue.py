"""The log's queue: complete and in order where it is read, bounded and never waited for where it is not."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.telemetry import log_queue
from kvxferd.telemetry.log_queue import LogCounts, LogQueue, StderrStream
from kvxferd.telemetry.recent_lines import (
    MAX_CHARS,
    MAX_ERROR_CHARS,
    MAX_ERROR_LINES,
    MAX_LINE_CHARS,
    MAX_LINES,
    RecentLines,
)
from tests.support.python_process import run_python

PIPE_BYTES = 64 << 10


class Pipe:
    """A pipe that a test reads when it wants to."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        self._reader: threading.Thread | None = None
        self._lines: list[str] = []

    def close_reading(self) -> None:
        os.close(self.reading)
        self.reading = -1

    def await_full(self) -> None:
        """Wait until a writer of 4 KiB waits for a reader."""
        deadline = time.monotonic() + 60
        while self._num_unread() <= PIPE_BYTES - 2 * log_queue.WRITE_BYTES:
            assert time.monotonic() < deadline, f"{self._num_unread()} bytes came"
            time.sleep(0.001)

    def _num_unread(self) -> int:
        return int.from_bytes(fcntl.ioctl(self.reading, termios.FIONREAD, bytes(4)), sys.byteorder)

    def start_reading(self) -> None:
        """Read in a thread, until the end."""

        def read() -> None:
            with os.fdopen(os.dup(self.reading)) as file:
                self._lines = file.read().splitlines()

        self._reader = threading.Thread(target=read)
        self._reader.start()

    def read_all(self) -> list[str]:
        """Close the writing end and return every line."""
        os.close(self.writing)
        self.writing = -1
        if self._reader is None:
            self.start_reading()
        self._reader.join(60)
        return self._lines

    def close(self) -> None:
        for fd in (self.reading, self.writing):
            if fd >= 0:
                os.close(fd)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def describe(num_dropped: int) -> str:
    return f"dropped {num_dropped}"


def queue_on(pipe: Pipe) -> tuple[LogQueue, LogCounts]:
    counts = LogCounts()
    return LogQueue(pipe.writing, describe, counts), counts


def test_lines_of_both_kinds_come_out_in_order_and_whole(pipe: Pipe) -> None:
    queue, counts = queue_on(pipe)
    lines = [f"line {number} {'x' * (number % 5000)}" for number in range(2_000)]
    pipe.start_reading()
    for number, line in enumerate(lines):
        queue.put(line, is_error=number % 7 == 0)
    queue.close(60)
    assert pipe.read_all() == lines
    assert counts.dropped == 0


def test_a_pipe_that_nobody_reads_costs_the_oldest_lines_and_never_a_wait(pipe: Pipe) -> None:
    queue, counts = queue_on(pipe)
    for number in range(3 * log_queue.MAX_LINES):
        queue.put(f"{number:0200d}")
        if number == 1_000:
            pipe.await_full()  # else the writer may come between, and report some of the lines earlier
    for number in range(10):
        queue.put(f"error {number}", is_error=True)
    assert counts.dropped > 0
    assert len(queue._ordinary.lines) <= log_queue.MAX_LINES
    assert sum(len(line.text) for line in queue._ordinary.lines) <= log_queue.MAX_BYTES
    queue.close(0.1)
    dropped = counts.dropped
    # Its reader comes back: what was in the pipe, the number, the errors, the last lines.
    pipe.start_reading()
    assert queue._ended.wait(60)
    left = pipe.read_all()
    assert f"dropped {dropped}" in left
    assert [line for line in left if line.startswith("error")] == [f"error {n}" for n in range(10)]
    last = [f"{number:0200d}" for number in range(3 * log_queue.MAX_LINES)][-log_queue.LAST_LINES :]
    assert [line for line in left if line in last] == last
    assert len(left) + dropped == 3 * log_queue.MAX_LINES + 10 + 1


def test_a_flood_of_errors_is_bounded_too(pipe: Pipe) -> None:
    queue, counts = queue_on(pipe)
    for number in range(3 * log_queue.MAX_ERROR_LINES):
        queue.put(f"{number:01000d}", is_error=True)
    assert len(queue._errors.lines) <= log_queue.MAX_ERROR_LINES
    assert counts.dropped > 0
    pipe.close_reading()
    queue.close(60)


def test_a_reader_that_has_gone_is_counted(pipe: Pipe) -> None:
    queue, counts = queue_on(pipe)
    pipe.close_reading()
    for _ in range(100):
        queue.put("to nobody")
    queue.close(60)
    assert counts.dropped >= 100


def test_a_long_line_is_cut(pipe: Pipe) -> None:
    queue, _ = queue_on(pipe)
    pipe.start_reading()
    queue.put("x" * (2 * log_queue.MAX_LINE_BYTES))
    queue.close(60)
    assert [len(line) for line in pipe.read_all()] == [log_queue.MAX_LINE_BYTES - 1]


def test_what_is_logged_after_the_end_is_written_at_once_or_not_at_all(pipe: Pipe) -> None:
    queue, _ = queue_on(pipe)
    queue.close(60)
    queue.put("late")
    os.set_blocking(pipe.writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(pipe.writing, b"-" * 4095 + b"\n")
    os.set_blocking(pipe.writing, True)
    queue.put("later")
    lines = pipe.read_all()
    assert lines[0] == "late"
    assert "later" not in lines


def test_what_prints_to_standard_error_is_passed_on_by_the_line(pipe: Pipe) -> None:
    queue, _ = queue_on(pipe)
    stream = StderrStream(queue, is_terminal=False)
    print("one", "two", file=stream)
    print("no", end="", file=stream)
    stream.write(" end\nlast")
    stream.flush_partial_line()
    queue.close(60)
    assert pipe.read_all() == ["one two", "no end", "last"]


@pytest.mark.process
def test_a_process_with_a_full_pipe_ends(pipe: Pipe) -> None:
    """With a traceback that nobody caught, more lines than the pipe holds, and nobody who reads."""
    code = (
        "import structlog\n"
        "from kvxferd.config import LogConfig\n"
        "from kvxferd.telemetry.logs import configure_queued_logs\n"
        "configure_queued_logs(LogConfig(format='json'))\n"
        "log = structlog.get_logger()\n"
        "for number in range(10_000): log.info('pull', number=number, filling='x' * 100)\n"
        "print('all logged', flush=True)\n"
        "raise RuntimeError('lost')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=pipe.writing)
    try:
        assert process.wait(60) == 1
        assert process.stdout is not None
        assert process.stdout.read() == b"all logged\n"
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


@pytest.mark.process
def test_a_traceback_that_nobody_caught_comes_out(pipe: Pipe) -> None:
    code = (
        "import structlog\n"
        "from kvxferd.config import LogConfig\n"
        "from kvxferd.telemetry.logs import configure_queued_logs\n"
        "configure_queued_logs(LogConfig(format='json'))\n"
        "structlog.get_logger().info('before')\n"
        "raise RuntimeError('lost')\n"
    )
    done = run_python("-c", code)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert '"event": "before"' in lines[0]
    assert lines[-1] == "RuntimeError: lost"


def test_lines_gather_and_an_error_or_the_end_writes_them_at_once(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_queue, "PAUSE_S", 3600.0)
    queue = LogQueue(pipe.writing)
    with os.fdopen(os.dup(pipe.reading)) as lines:
        queue.put("first")
        assert lines.readline() == "first\n"
        queue.put("gathers")
        queue.put("an error", is_error=True)
        assert [lines.readline() for _ in range(2)] == ["gathers\n", "an error\n"]
        queue.put("last")
        queue.close()
        assert lines.readline() == "last\n"


# --- the last lines of the log stay within their bounds, and errors are not pushed out by ordinary lines


@given(st.lists(st.tuples(st.sampled_from([0, 1, 100, 10_000, 100_000]), st.booleans(), st.integers(1, 300))))
def test_what_is_kept_is_bounded(added: list[tuple[int, bool, int]]) -> None:
    recent = RecentLines()
    for length, is_error, times in added:
        for _ in range(times):
            recent.add("x" * length, is_error)
    for kept, max_lines, max_chars in (
        (recent.lines(), MAX_LINES, MAX_CHARS),
        (recent.errors(), MAX_ERROR_LINES, MAX_ERROR_CHARS),
    ):
        assert len(kept) <= max_lines
        assert sum(map(len, kept)) <= max_chars
        assert all(len(line) <= MAX_LINE_CHARS for line in kept)


def test_the_newest_lines_stay_and_errors_beside_them() -> None:
    recent = RecentLines()
    recent.add("the error", is_error=True)
    for number in range(MAX_LINES + 10):
        recent.add(str(number))
    assert recent.lines()[0] == "10"
    assert recent.lines()[-1] == str(MAX_LINES + 9)
    assert recent.errors() == ["the error"]
