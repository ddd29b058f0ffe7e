"""A tool's interrupt comes once."""

import os
import signal

import pytest

from kvxferd.tooling.interrupts import interrupted_once

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def interrupted_twice(number: signal.Signals, done: list[str]) -> None:
    with interrupted_once():
        try:
            os.kill(os.getpid(), number)
            done.append("not interrupted")
        finally:
            os.kill(os.getpid(), number)
            done.append("cleaned up")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_interrupts_once_and_handlers_come_back(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted_twice(number, done)
    assert done == ["cleaned up"]
    assert [signal.getsignal(each) for each in SIGNALS] == before
