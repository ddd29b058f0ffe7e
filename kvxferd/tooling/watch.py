"""Shows a verb's output again and again: redrawn on a terminal, one block after another when piped."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from datetime import UTC, datetime

from rich.cells import cell_len

from kvxferd.errors import KvxferdError
from kvxferd.fd_wait import wait_readable
from kvxferd.tooling.output import console, plain_text

_HOME_AND_CLEAR = "\x1b[H\x1b[2J"
_OTHER_SCREEN, _FIRST_SCREEN = "\x1b[?1049h", "\x1b[?1049l"  # what was on the terminal is there afterwards
_STYLE = re.compile(r"\x1b\[[\d;]*m")


class _Frame(io.StringIO):
    """One round's output. A terminal exactly if the real standard output is one."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def watch(title: str, show: Callable[[], object], interval_s: float, as_json: bool) -> None:
    """Call `show` every `interval_s` seconds, and write what it prints, until q, Ctrl-C or a closed pipe.

    Raises KvxferdError if the first round does. Later ones only report it: a daemon that restarts is shown
    again as soon as it serves. With `as_json` each round is one line.
    """
    try:
        _Watch(title, show, interval_s, as_json).run()
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        # The interpreter flushes standard output once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Watch:
    def __init__(self, title: str, show: Callable[[], object], interval_s: float, as_json: bool) -> None:
        self._title = title
        self._show = show
        self._interval_s = interval_s
        self._as_json = as_json
        self._is_redrawn = sys.stdout.isatty() and not as_json
        self._is_first = True
        self._error = ""  # the last round's

    def run(self) -> None:
        with _full_screen() if self._is_redrawn else nullcontext():
            while True:
                started = time.monotonic()
                self._run_round()
                left_s = max(0.0, self._interval_s - (time.monotonic() - started))
                if not (self._is_redrawn and sys.stdin.isatty()):
                    time.sleep(left_s)
                elif wait_readable([sys.stdin.fileno()], left_s) and b"q" in os.read(0, 64):
                    return

    def _run_round(self) -> None:
        frame = _Frame(sys.stdout.isatty())
        error = ""
        try:
            with redirect_stdout(frame):
                if self._is_redrawn:  # what is printed in passing would be cleared at once
                    with redirect_stderr(frame):
                        self._show()
                else:
                    self._show()
        except KvxferdError as lost:
            if self._is_first:
                raise
            error = f"kvxferd: {lost.message} [{lost.code.value}]; trying again"
        self._is_first = False
        if error and self._is_redrawn:
            with redirect_stdout(frame):
                console().print(plain_text(error), soft_wrap=True)
        elif error and error != self._error:
            sys.stderr.write(f"{plain_text(error).plain}\n")
        self._error = error
        if self._is_redrawn or not error:
            self._write(frame.getvalue())

    def _write(self, text: str) -> None:
        if self._as_json:
            sys.stdout.write(json.dumps(json.loads(text)) + "\n")
        elif self._is_redrawn:
            size = os.get_terminal_size(sys.stdout.fileno())
            head = f"{self._title}, every {self._interval_s:g} s: {_now()}"
            sys.stdout.write(_HOME_AND_CLEAR + fit_height(f"{head}\n\n{text}", size.columns, size.lines))
        else:
            sys.stdout.write(f"# {self._title}: {_now()}\n{text}\n")
        sys.stdout.flush()


@contextmanager
def _full_screen() -> Iterator[None]:
    """Take the terminal's other screen, and keys as they are pressed, without an echo."""
    modes = termios.tcgetattr(0) if sys.stdin.isatty() else None
    try:
        if modes is not None:
            tty.setcbreak(0)
        sys.stdout.write(_OTHER_SCREEN)
        yield
    finally:
        sys.stdout.write(_FIRST_SCREEN)
        sys.stdout.flush()
        if modes is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, modes)


def fit_height(text: str, columns: int, lines: int) -> str:
    """Return as many lines from the beginning as a terminal shows, and how many follow."""
    shown = text.splitlines()
    heights = [max(1, -(-cell_len(_STYLE.sub("", line)) // max(1, columns))) for line in shown]
    if sum(heights) < lines:  # the cursor stands below the last one
        return text
    kept, room = 0, lines - 2
    while kept < len(shown) and heights[kept] <= room:
        room -= heights[kept]
        kept += 1
    return "\n".join([*shown[:kept], f"({len(shown) - kept} more lines; a taller terminal shows them)\n"])


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}Z"
