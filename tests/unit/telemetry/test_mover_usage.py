"""What movers use: the processor time never falls, whichever process ends."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from kvxferd.telemetry.mover_usage import MoverUsage, ProcessUsage, read_usage


def test_a_process_has_used_something_and_none_that_is_gone() -> None:
    own = read_usage(os.getpid())
    assert own is not None
    assert own.cpu_s > 0
    assert own.memory_bytes > 1 << 20
    with open("/proc/self/schedstat") as file:
        assert own.waited_s <= int(file.read().split()[1]) / 1e9
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    assert read_usage(pid) is None


def test_a_dead_movers_time_is_that_of_the_forkservers_children() -> None:
    table = {1: ProcessUsage(1.0, 0.0, 10), 2: ProcessUsage(5.0, 0.0, 20, waited_s=2.0)}
    usage = MoverUsage(table.get)

    def used(forkserver: int | None, *pids: int) -> tuple[float, int, float]:
        usage.update(forkserver, list(pids))
        return usage.cpu_s, usage.memory_bytes, usage.waited_s

    assert used(1, 2) == (6.0, 30, 2.0)
    table[2] = ProcessUsage(5.0, 0.0, 20, waited_s=2.25)
    assert used(1, 2) == (6.0, 30, 2.25)
    del table[2]  # dead, and not waited for yet
    assert used(1) == (6.0, 10, 2.25)
    table[1] = ProcessUsage(1.0, 5.5, 10)
    assert used(1) == (6.5, 10, 2.25)
    del table[1]  # the forkserver died
    assert used(None) == (6.5, 0, 2.25)
    table |= {3: ProcessUsage(0.5, 0.0, 10), 2: ProcessUsage(0.0, 0.0, 1, waited_s=0.5)}  # its pid anew
    assert used(3, 2) == (7.0, 11, 2.75)


@given(st.lists(st.dictionaries(st.integers(1, 4), st.floats(0, 100), max_size=4), max_size=20))
def test_the_times_never_fall(moments: list[dict[int, float]]) -> None:
    now: dict[int, ProcessUsage] = {}
    usage, before = MoverUsage(now.get), (0.0, 0.0)
    for moment in moments:
        now.clear()
        now.update({pid: ProcessUsage(cpu_s, 0.0, 1, waited_s=cpu_s) for pid, cpu_s in moment.items()})
        pids = sorted(moment)
        usage.update(pids[0] if pids else None, pids[1:])
        times = usage.cpu_s, usage.waited_s
        assert all(after >= earlier for after, earlier in zip(times, before, strict=True))
        before = times
