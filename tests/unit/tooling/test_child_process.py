"""A tool gets a reply or an error in time, whatever its child does; afterwards the process is gone."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvxferd.errors import Code
from kvxferd.tooling.child_process import ChildError, ChildProcess
from kvxferd.tooling.owned_process import stop_all
from tests.support.child_objects import Counter
from tests.support.tool_process import await_end

Make = Callable[..., ChildProcess[Counter]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Start a child with a counter; each is stopped, and must be gone then."""
    started: list[ChildProcess[Counter]] = []

    def make(*args: Any, **kwargs: Any) -> ChildProcess[Counter]:
        log = tmp_path / f"counter{len(started)}.log"
        started.append(ChildProcess(partial(Counter, *args, **kwargs), log))
        return started[-1]

    yield make
    stop_all(started)
    stop_all(started)
    assert not [child.pid for child in started if Path(f"/proc/{child.pid}").exists()]


def test_any_other_exception_is_named_and_its_traceback_is_logged(make: Make) -> None:
    child = make()
    with pytest.raises(ChildError, match="ZeroDivisionError: division by zero") as raised:
        child.call(Counter.divide)
    assert raised.value.code is Code.INTERNAL
    assert "in divide" in raised.value.log_tail
    with pytest.raises(ChildError, match="lambda"):
        child.call(Counter.unpicklable)
    assert child.call(Counter.add, 1) == 1


def test_what_making_raises_the_first_call_raises(make: Make) -> None:
    child = make(-1)
    with pytest.raises(ChildError, match="it starts below zero") as raised:
        child.call(Counter.add, 1)
    assert raised.value.code is Code.BAD_REQUEST


def test_the_end_of_the_process_is_an_error_with_its_last_words(make: Make) -> None:
    child = make()
    with pytest.raises(ChildError, match="ended with -9: it was too much"):
        child.call(Counter.say_and_die, "it was too much")
    with pytest.raises(ChildError, match="ended with -9"):
        child.call(Counter.add, 1)


def test_no_reply_is_an_error_in_time_and_the_call_goes_on(make: Make) -> None:
    child = make()
    pending = child.start(Counter.hang)
    for _ in range(2):
        with pytest.raises(ChildError, match="has not replied for") as raised:
            pending.result(0.01)
        assert raised.value.code is Code.DEADLINE
    assert child.stop() == -signal.SIGKILL  # nobody waits for that call


def test_a_paused_process_replies_when_it_is_resumed(make: Make) -> None:
    child = make()
    child.call(Counter.add, 1)
    child.pause()
    with pytest.raises(AssertionError, match="is paused"):
        child.start(Counter.add, 1)
    child.resume()
    assert child.call(Counter.add, 1) == 2
    child.pause()
    assert child.stop() == 0


@pytest.mark.parametrize("num_steps", [4, 1 << 62], ids=["an end", "no end"])
def test_the_object_makes_progress_between_calls_and_the_process_ends(make: Make, num_steps: int) -> None:
    child = make(progressing=num_steps)
    while child.call(Counter.num_steps) < 4:
        pass
    assert num_steps > 4 or child.call(Counter.num_steps) == 4  # the last returned False
    assert child.stop() == 0


def test_nothing_is_imported_from_the_working_directory(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pickle.py").write_text("raise ImportError('the wrong one')\n")
    monkeypatch.chdir(tmp_path)
    assert make(1).call(Counter.add, 1) == 2


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from kvxferd.tooling.child_process import ChildProcess
from tests.support.child_objects import Counter

child = ChildProcess(Counter, Path(sys.argv[1]) / "child.log")
print(child.pid, flush=True)
if sys.argv[2] == "paused":
    child.call(Counter.add, 1)
    child.pause()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("state", ["just started", "paused"])
def test_a_child_goes_with_a_parent_that_is_killed(tmp_path: Path, state: str) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), state, str(Path(__file__).parents[3])]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    await_end(int(ended.stdout))
