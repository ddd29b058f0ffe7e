"""A tool's interrupt comes once, and not between a process's start and its owner's knowing of it."""

import os
import signal

import pytest

from kvxferd.tooling.interrupts import interrupted_once, uninterrupted

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def interrupted_twice(number: signal.Signals, done: list[str]) -> None:
    with interrupted_once():
        try:
            os.kill(os.getpid(), number)
            done.append("not interrupted")
        finally:
            os.kill(os.getpid(), number)
            done.append("cleaned up")


def interrupted_while_starting(number: signal.Signals, done: list[str]) -> None:
    with interrupted_once(), uninterrupted():
        os.kill(os.getpid(), number)
        done.append("started")
        done.append("owned")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_interrupts_once_and_handlers_come_back(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted_twice(number, done)
    assert done == ["cleaned up"]
    assert [signal.getsignal(each) for each in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_waits_for_the_end_of_what_may_not_be_interrupted(number: signal.Signals) -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted_while_starting(number, done)
    assert done == ["started", "owned"]
    with interrupted_once(), uninterrupted():
        done.append("the next tool is not interrupted by the last one's signal")
    assert len(done) == 3
