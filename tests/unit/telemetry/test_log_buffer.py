"""The log's buffer: complete and in order where it is read, bounded and never waited for where it is not."""

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

from kvxferd.telemetry import log_buffer
from kvxferd.telemetry.log_buffer import LogBuffer, LogCounts, StderrStream

PIPE_BYTES = 64 << 10


class Pipe:
    """A buffer on a pipe, which a test reads when it wants to."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        self.counts = LogCounts()
        self.buffer = LogBuffer(self.counts)
        self.buffer.start(self.writing, "dropped {}".format)
        self._reader = threading.Thread(target=self._read)
        self._lines: list[str] = []

    def await_full(self) -> None:
        """Wait until a writer of 4 KiB waits for a reader."""
        deadline = time.monotonic() + 60
        while self._num_unread() <= PIPE_BYTES - 2 * log_buffer.WRITE_BYTES:
            assert time.monotonic() < deadline, f"{self._num_unread()} bytes came"
            time.sleep(0.001)

    def _num_unread(self) -> int:
        return int.from_bytes(fcntl.ioctl(self.reading, termios.FIONREAD, bytes(4)), sys.byteorder)

    def _read(self) -> None:
        with os.fdopen(os.dup(self.reading)) as file:
            self._lines = file.read().splitlines()

    def start_reading(self) -> None:
        """Read in a thread, until the end."""
        self._reader.start()

    def read_all(self) -> list[str]:
        """Close the writing end and return every line."""
        os.close(self.writing)
        self.writing = -1
        if self._reader.ident is None:
            self.start_reading()
        self._reader.join(60)
        return self._lines

    def close_reading(self) -> None:
        os.close(self.reading)
        self.reading = -1

    def close(self) -> None:
        for fd in (self.reading, self.writing):
            if fd >= 0:
                os.close(fd)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def test_lines_of_both_kinds_come_out_in_order_and_whole(pipe: Pipe) -> None:
    lines = [f"line {number} {'x' * (number % 5000)}" for number in range(2_000)]
    pipe.start_reading()
    for number, line in enumerate(lines):
        pipe.buffer.put(line, is_error=number % 7 == 0)
    pipe.buffer.close(60)
    assert pipe.read_all() == lines
    assert pipe.counts.dropped == 0
    assert pipe.buffer.lines()[0][-100:] == lines[-100:], "what was written is still shown"


def test_a_pipe_that_nobody_reads_costs_the_oldest_lines_and_never_a_wait(pipe: Pipe) -> None:
    for number in range(3 * log_buffer.MAX_LINES):
        pipe.buffer.put(f"{number:0200d}")
        if number == 1_000:
            pipe.await_full()  # else the writer may come between, and report some of the lines earlier
    for number in range(10):
        pipe.buffer.put(f"error {number}", is_error=True)
    assert pipe.counts.dropped > 0
    pipe.buffer.close(0.1)
    dropped = pipe.counts.dropped
    # Its reader comes back: what was in the pipe, the number, the last lines.
    pipe.start_reading()
    assert pipe.buffer._ended.wait(60)
    left = pipe.read_all()
    assert f"dropped {dropped}" in left
    assert [line for line in left if line.startswith("error")] == [f"error {n}" for n in range(10)]
    last = [f"{number:0200d}" for number in range(3 * log_buffer.MAX_LINES)][10 - log_buffer.LAST_LINES :]
    assert [line for line in left if line in last] == last
    assert len(left) + dropped == 3 * log_buffer.MAX_LINES + 10 + 1


def test_a_reader_that_has_gone_is_counted(pipe: Pipe) -> None:
    pipe.close_reading()
    for _ in range(100):
        pipe.buffer.put("to nobody")
    pipe.buffer.close(60)
    assert pipe.counts.dropped >= 100


def test_what_is_logged_after_the_end_is_written_at_once_or_not_at_all(pipe: Pipe) -> None:
    pipe.buffer.close(60)
    pipe.buffer.put("late")
    os.set_blocking(pipe.writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(pipe.writing, b"-" * 4095 + b"\n")
    os.set_blocking(pipe.writing, True)
    pipe.buffer.put("later")
    lines = pipe.read_all()
    assert lines[0] == "late"
    assert "later" not in lines


def test_what_prints_to_standard_error_is_passed_on_by_the_line(pipe: Pipe) -> None:
    stream = StderrStream(pipe.buffer, is_terminal=False)
    print("one", "two", file=stream)
    print("no", end="", file=stream)
    stream.write(" end\nlast")
    stream.flush_partial_line()
    pipe.buffer.close(60)
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
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=pipe.writing, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (1, b"all logged\n")


def test_lines_gather_and_an_error_or_the_end_writes_them_at_once(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_buffer, "PAUSE_S", 3600.0)
    with os.fdopen(os.dup(pipe.reading)) as lines:
        pipe.buffer.put("first")
        assert lines.readline() == "first\n"
        pipe.buffer.put("gathers")
        pipe.buffer.put("an error", is_error=True)
        assert [lines.readline() for _ in range(2)] == ["gathers\n", "an error\n"]
        pipe.buffer.put("last")
        pipe.buffer.close()
        assert lines.readline() == "last\n"


# --- the last lines of the log stay within their bounds, and errors are not pushed out by ordinary lines


@given(st.lists(st.tuples(st.sampled_from([0, 1, 100, 10_000, 100_000]), st.booleans(), st.integers(1, 300))))
def test_what_is_kept_is_bounded(added: list[tuple[int, bool, int]]) -> None:
    buffer = LogBuffer()
    for length, is_error, times in added:
        for _ in range(times):
            buffer.put("x" * length, is_error)
    lines, _ = buffer.lines()
    assert len(lines) <= log_buffer.MAX_LINES + log_buffer.MAX_ERROR_LINES
    assert sum(map(len, lines)) <= log_buffer.MAX_BYTES + log_buffer.MAX_ERROR_BYTES
    assert all(len(line) <= log_buffer.MAX_LINE_BYTES for line in lines)


def test_the_newest_lines_stay_and_errors_beside_them() -> None:
    buffer = LogBuffer()
    buffer.put("the error", is_error=True)
    for number in range(log_buffer.MAX_LINES + 10):
        buffer.put(str(number))
    first, second, *_, last = buffer.lines()[0]
    assert (first, second, last) == ("the error", "10", str(log_buffer.MAX_LINES + 9))


def test_what_follows_a_cursor_is_shown_and_all_where_the_daemon_has_restarted() -> None:
    buffer, before = LogBuffer(), LogBuffer()
    buffer.put("0")
    _, first = buffer.lines()
    for number in (1, 2):
        buffer.put(str(number), is_error=number == 1)
    found, cursor = buffer.lines(after=first)
    assert found == ["1", "2"]
    assert buffer.lines(after=cursor) == ([], cursor)
    for text in (before.lines()[1], "", "-", cursor + "x", cursor.replace("-", "")):
        assert buffer.lines(after=text) == (["0", "1", "2"], cursor)
