"""Ranks that sleep: with their daemon there, dead or stopped, and with their engine's home dead.

What was published before is kept, and pulled again and again once they are back: it is gone, and nobody may
have it delivered.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.support.cluster.engine import Engine, Read, Transfer, Worker
from tests.support.cluster.node import Node
from tests.support.nodes.processes import mappers_of

if TYPE_CHECKING:
    from tests.proofs.chaos.faults import Surgeon

SUSPEND_S = 12.0  # a read that does not end is given quiesce_s (5 s)
AGREE_S = 3.0  # what is published must have been before a rank sleeps
LEASE_S = 8.0  # longer than a daemon needs to come back
NUM_KEPT = 2
MAX_TOKENS = 200
REQUESTS = itertools.count(1 << 20)  # the traffic's numbers are lower

Heal = Callable[[], None]


def sleep(surgeon: Surgeon, engine: Engine) -> Heal | None:
    """One rank's memory is to be free while its engine sleeps."""
    worker = surgeon.rng.choice(engine.workers)
    if worker.node.num_stopped or not engine.is_registered or not surgeon.claim(engine):
        return None
    if not _agreed(surgeon, engine):
        return None
    _suspend([worker])
    _await_suspended(surgeon, [worker])
    return lambda: _resume([worker])


def sleep_without_daemon(surgeon: Surgeon, engine: Engine, *, is_dead: bool) -> Heal | None:
    """Ranks sleep while their daemon is dead, or stopped. It comes back before they do, or after."""
    node = surgeon.rng.choice(engine.nodes)
    ranks = [worker for worker in engine.workers if worker.node is node]
    return _sleep_without(surgeon, engine, node, _some(surgeon, ranks), is_dead)


def sleep_without_home(surgeon: Surgeon, engine: Engine) -> Heal | None:
    """A rank on another node than its engine's home sleeps while that is dead."""
    home = engine.nodes[0]
    members = [worker for worker in engine.workers if worker.node is not home]
    if not members or members[0].node.num_stopped:
        return None
    return _sleep_without(surgeon, engine, home, members, True)


def _some(surgeon: Surgeon, ranks: list[Worker]) -> list[Worker]:
    return ranks if surgeon.rng.random() < 0.5 else [surgeon.rng.choice(ranks)]


def _sleep_without(
    surgeon: Surgeon, engine: Engine, node: Node, ranks: list[Worker], is_dead: bool
) -> Heal | None:
    if node.num_stopped or not engine.is_registered or engine.is_paused:
        return None
    if not (surgeon.claim(engine) and surgeon.claim(node)):
        return None
    kept = _keep(surgeon, engine)
    if not _agreed(surgeon, engine):
        return None
    if is_dead:
        surgeon.end_daemon(node)
    else:
        bring_back = surgeon.stop(node.pid, node)
    _suspend(ranks)
    if is_dead:
        _await_suspended(surgeon, ranks)
        bring_back = node.start
    wakes_first = is_dead and surgeon.rng.random() < 0.5

    def heal() -> None:
        if wakes_first:
            _resume(ranks)
        bring_back()
        if not is_dead:
            _await_suspended(surgeon, ranks)
        if not wakes_first:
            _resume(ranks)
        for transfer in kept:
            _pull_again(surgeon, engine, transfer)

    return heal


# --- the steps


def _keep(surgeon: Surgeon, engine: Engine) -> list[Transfer]:
    """Publish something that nobody has read yet."""
    kept = []
    for _ in range(NUM_KEPT):
        request = next(REQUESTS)
        tokens = surgeon.rng.randint(1, MAX_TOKENS)
        if transfer := engine.publish(f"kept{request}", request, tokens, LEASE_S):
            kept.append(transfer)
    surgeon.fleet.pump_until(lambda: all(t.ref is not None for t in kept), AGREE_S)
    return kept


def _agreed(surgeon: Surgeon, engine: Engine) -> bool:
    """An engine's scheduler publishes what its ranks hold: none sleeps between the writing and the call."""
    return surgeon.fleet.pump_until(lambda: not engine.is_asking, AGREE_S) and engine.is_registered


def _suspend(ranks: list[Worker]) -> None:
    for worker in ranks:
        worker.is_registered = False
        worker.tell("suspend")


def _await_suspended(surgeon: Surgeon, ranks: list[Worker]) -> None:
    fleet = surgeon.fleet
    for worker in [worker for worker in ranks if not worker.pipe.closed]:
        name = worker.engine.name
        if not fleet.pump_until(lambda worker=worker: worker.is_suspended, SUSPEND_S):
            fleet.tally.problem("hung", f"a rank of {name} is not suspended in {SUSPEND_S} s")
        elif left := [pid for pid in mappers_of(worker.freed_inode, or_holders=False) if pid != worker.pid]:
            fleet.tally.problem("leaked", f"suspended memory of {name} is mapped by {left}")


def _resume(ranks: list[Worker]) -> None:
    for worker in ranks:
        if not worker.pipe.closed:
            worker.tell("resume")


def _pull_again(surgeon: Surgeon, engine: Engine, transfer: Transfer) -> None:
    """Until its lease is over; a router that knows of no restart does as much."""
    fleet = surgeon.fleet
    sink = next(other for other in fleet.engines if other is not engine)

    def pull() -> None:
        left_s = transfer.born + transfer.lease_s - time.monotonic()
        is_there = engine.transfers.get(transfer.name) is transfer and transfer.ref is not None
        if left_s > 0.5 and is_there and sink.is_registered and not sink.is_paused:
            fleet.tally.mischief["pulled after a sleep"] += 1
            fleet.read(engine, sink, transfer, left_s).on_end = ended
        else:
            engine.unpublish(transfer)

    def ended(read: Read) -> None:
        if "orphaned" in read.outcomes or read.is_delivered:
            engine.unpublish(transfer)
        else:
            fleet.later(0.1, pull)

    pull()
