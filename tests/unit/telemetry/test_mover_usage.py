"""What movers use: the processor time never falls, whichever process ends."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from kvxferd.telemetry.mover_usage import (
    MoverUsage,
    MoverWaits,
    ProcessUsage,
    read_usage,
    read_waited_s,
)


def test_a_process_has_used_something_and_none_that_is_gone() -> None:
    own = read_usage(os.getpid())
    assert own is not None
    assert own.cpu_s > 0
    assert own.memory_bytes > 1 << 20
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    assert read_usage(pid) is None


def test_a_dead_movers_time_is_that_of_the_forkservers_children() -> None:
    table = {1: ProcessUsage(1.0, 0.0, 10), 2: ProcessUsage(5.0, 0.0, 20)}
    usage = MoverUsage(table.get)
    assert usage.update(1, [2]) == (6.0, 30)
    del table[2]  # dead, and not waited for yet
    assert usage.update(1, [])[0] == 6.0
    table[1] = ProcessUsage(1.0, 5.5, 10)
    assert usage.update(1, []) == (6.5, 10)
    del table[1]  # the forkserver died
    assert usage.update(None, []) == (6.5, 0)
    table[3] = ProcessUsage(0.5, 0.0, 10)
    assert usage.update(3, []) == (7.0, 10)


@given(st.lists(st.dictionaries(st.integers(1, 4), st.floats(0, 100), max_size=4), max_size=20))
def test_the_time_never_falls(moments: list[dict[int, float]]) -> None:
    now: dict[int, ProcessUsage] = {}
    usage, before = MoverUsage(now.get), 0.0
    for moment in moments:
        now.clear()
        now.update({pid: ProcessUsage(cpu_s, 0.0, 1) for pid, cpu_s in moment.items()})
        pids = sorted(moment)
        cpu_s, _ = usage.update(pids[0] if pids else None, pids[1:])
        assert cpu_s >= before
        before = cpu_s


def test_waits_of_movers_are_summed_and_those_of_dead_ones_stay() -> None:
    table: dict[int, float | None] = {1: 2.0, 2: 0.5, 3: None}
    waits = MoverWaits(table.get)
    assert waits.update([1, 2, 3]) == 2.5
    table |= {1: 2.25, 3: 1.0}
    assert waits.update([1, 3]) == 3.75
    table[1] = 0.25  # another process with that pid
    assert waits.update([1]) == 3.75
    table[1] = 0.5
    assert waits.update([1]) == 4.0
    assert waits.update([]) == 4.0


def test_a_wait_is_that_of_the_kernel() -> None:
    own = read_waited_s(os.getpid())
    with open("/proc/self/schedstat") as file:
        assert own is None or own <= int(file.read().split()[1]) / 1e9
    assert read_waited_s(0) is None
