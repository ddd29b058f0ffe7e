"""What may happen at a host next, time apart. `Host.do` takes a step."""

from __future__ import annotations

from collections.abc import Iterator

from kvxferd.client.registration import MemoryState
from tests.property.model.host import Host, Step
from tests.property.model.process import Process


def steps_of(host: Host) -> Iterator[Step]:
    """What the daemon, processes and movers may do by themselves."""
    if not host.is_up:
        if not host.orphans:
            yield ("start",)
    elif host.crashes < host.scenario.crashes[host.name == "sink"]:
        yield ("crash",)
    for mover in sorted(host.orphans):
        yield "perish", mover
    for process in host.living():
        yield from _process_steps(host, process)
    yield from _mover_steps(host)


def reads_of(host: Host) -> Iterator[tuple[Step, str, int]]:
    """The steps that read a block or a fence word of the other host, by agent and place."""
    for mover in host.movers.values():
        for job in mover.jobs.values():
            if job.read < len(job.pairs):
                _, agent, block = job.pairs[job.read]
                yield ("slice", mover.mover, job.pull), agent, block
            elif not job.doubted and not job.told:
                yield ("fence", mover.mover, job.pull), job.fence.agent, job.fence.address


def _process_steps(host: Host, process: Process) -> Iterator[Step]:
    scenario, memory_state = host.scenario, process.client.registration.memory_state
    if host.is_up and process.session is None and process.retry_at <= host.clock:
        yield "connect", process.number
    if process.up:
        yield "send", process.number
    if process.down:
        yield "read", process.number
    if scenario.close:
        yield "close", process.number
    if host.name == "source" and process is host.publisher:
        yield from _publishes(host, process)
    if process.name.startswith("sink"):
        yield from _pulls(host, process)
    elif process.layout is not None and memory_state is MemoryState.SHARED:
        if scenario.ready and "ready 1" not in process.said:
            yield "ready", process.number, 1
        # Where the engine spans both nodes its member alone: the home's rank is as in one that does not.
        is_sleeper = not scenario.spans or process.name == "source-1"
        if process.num_sleeps < scenario.sleeps and is_sleeper and process.client.registration.was_registered:
            yield "suspend", process.number
    elif process.layout is not None and memory_state is MemoryState.SUSPENDED:
        yield "resume", process.number


def _publishes(host: Host, publisher: Process) -> Iterator[Step]:
    """One transfer after another, the next when the last was released: its blocks are used again."""
    scenario = host.scenario
    ranks = [process for process in host.processes if process.layout is not None]
    are_awake = all(rank.client.registration.memory_state is MemoryState.SHARED for rank in ranks)
    for number in range(1, scenario.transfers + 1):
        if f"publish {number}" not in publisher.said:
            if (number == 1 or number - 1 in publisher.released) and are_awake:
                yield "publish", number
            return
        if number in publisher.released or f"unpublish {number}" in publisher.said:
            continue
        if scenario.grows and f"extend {number}" not in publisher.said:
            yield "extend", number
        if scenario.unpublish:
            yield "unpublish", number


def _pulls(host: Host, process: Process) -> Iterator[Step]:
    """In order, and without waiting for one another, unless a transfer is pulled once more."""
    scenario = host.scenario
    for number in range(1, scenario.pulls + 1):
        if f"pull {number}" not in process.said:
            if number == 1 or not scenario.again or number - 1 in process.ended:
                yield "pull", process.number, number
            return
        if scenario.cancel and number not in process.ended and f"cancel {number}" not in process.said:
            yield "cancel", process.number, number


def _mover_steps(host: Host) -> Iterator[Step]:
    for mover in host.movers.values():
        if mover.alive and host.deaths < host.scenario.deaths:
            yield "die", mover.mover
        if mover.reports:
            yield "hear", mover.mover
        for job in mover.jobs.values():
            if job.told:
                yield "report", mover.mover, job.pull
            elif job.doubted:
                yield "quiet", mover.mover, job.pull
            elif job.stopped:
                yield "stop", mover.mover, job.pull
            elif host.scenario.doubt and job.read:
                yield "doubt", mover.mover, job.pull
