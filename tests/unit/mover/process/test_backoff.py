"""How long a mover waits, and what it knows of its neighbours."""

from __future__ import annotations

import os
import time

import pytest

from kvxferd.mover.process import backoff
from kvxferd.mover.process.backoff import PollBackoff
from kvxferd.mover.process.child_main import MoverCount


def after(pacer: PollBackoff, idle_s: float, is_reading: bool) -> float:
    pacer._progress_at = time.perf_counter() - idle_s
    return pacer.pause_s(is_reading)


@pytest.mark.parametrize("crowded", [False, True])
def test_it_looks_again_at_once_after_something_happened(crowded: bool) -> None:
    pacer = PollBackoff(lambda: crowded)
    pacer.reset()
    assert after(pacer, -1.0, True) == 0.0  # whatever the call itself takes
    assert after(pacer, 100e-6, False) == backoff.MIN_PAUSE_S


def test_it_spins_for_a_shorter_time_in_a_crowd() -> None:
    idle_s = (backoff.SPIN_OVERSUBSCRIBED_S + backoff.SPIN_S) / 2
    assert after(PollBackoff(lambda: True), idle_s, True) == backoff.MIN_PAUSE_S
    assert after(PollBackoff(lambda: False), -1.0, True) == 0.0


def test_pauses_grow_up_to_a_limit() -> None:
    pacer = PollBackoff(lambda: False)
    pauses = [after(pacer, idle, True) for idle in (0.0003, 0.001, 0.002, 0.1, 10.0)]
    assert pauses == sorted(pauses)
    assert pauses[0] == backoff.MIN_PAUSE_S
    assert pauses[-1] == backoff.MAX_READING_PAUSE_S
    assert after(pacer, 0.5, False) == backoff.MAX_SERVING_PAUSE_S
    assert after(pacer, 5.0, False) == backoff.MAX_IDLE_PAUSE_S


def test_a_crowd_is_counted_for_the_processes_forked_from_it() -> None:
    crowd = MoverCount(num_cores=2)
    assert not crowd.is_oversubscribed
    looks, tells = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tells)
        os.read(looks, 1)
        os._exit(0 if crowd.is_oversubscribed else 1)
    crowd.set(3)
    os.close(looks)
    os.close(tells)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    crowd.set(2)
    assert not crowd.is_oversubscribed
