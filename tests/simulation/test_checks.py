"""Each check notices what it is for: something is changed under it, and it says so."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from kvxferd import client
from kvxferd.client import pulls
from kvxferd.core.allowlist import PeerAllowlist
from kvxferd.core.node import Node
from kvxferd.core.peers.requests import PeerRequests
from kvxferd.core.ranks.polling import PollRequests
from kvxferd.core.sink.stalled_sources import SourceBreaker
from kvxferd.errors import Code, EngineError
from kvxferd.frame_socket import FrameSocket
from kvxferd.mover.chunks.chunk_pool import ChunkPool
from kvxferd.mover.chunks.slices import Slicer
from tests.simulation import audit, blunders, fabric, history, runs, worker
from tests.simulation.blunders import NUM_FALSE_MESSAGES
from tests.simulation.checks import Check
from tests.simulation.episode import Plan, Size
from tests.simulation.fabric import SimTransport
from tests.simulation.false_messages import FalseMessage
from tests.simulation.kernel import can_fork
from tests.simulation.libzmq import SimSocket
from tests.simulation.network import Network
from tests.simulation.node import SimDaemon
from tests.simulation.reasons import Reasons
from tests.simulation.safety import Words
from tests.simulation.store import Store
from tests.simulation.transfers import Kernels, Transfer
from tests.simulation.worker import Worker
from tests.simulation.wrong_workers import PUBLISH

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(not can_fork(), reason="this system does not allow unshare(CLONE_FILES)"),
]

MAX_SEEDS, MAX_PULLS = 40, 150
KIND_OF = {
    Check.ID_ONCE: "republish",
    Check.DRAINED: "drain",
    Check.OWN_TIMER: "lose-message",
    Check.SILENT: "kill-daemon",
    Check.ADMITTED: "turn-away",
}  # of all faults, where those that are drawn seldom meet the check
FENCE_BYTES = 16
RIGHT = FalseMessage("GrantReply", "has_more", False, Code.INTERNAL)

_real_handle = Worker._handle
_real_send, _real_pull, _real_holder_of = Network.send, Worker.pull, Words.holder_of
_real_next_slice, _real_send_frame = Slicer.next_slice, FrameSocket.send
_real_publish, _real_queue = client.Publisher.publish, SimSocket._queue
_real_least_reads = worker.least_reads
_real_check_bytes, _real_memmove = Worker._check_bytes, ctypes.memmove


class CtypesThatSpoil:
    """What the simulated library copies with: the last byte of data is wrong."""

    @staticmethod
    def memmove(to: int, of: int, size: int) -> None:
        _real_memmove(to, of, size)
        if size != FENCE_BYTES:
            ctypes.memset(to + size - 1, 0x55, 1)


def _nothing(*_: object, **__: object) -> None:
    """Do nothing."""


def _twice(kind: type) -> Callable[[Worker, Any], None]:
    def handle(worker: Worker, event: Any) -> None:
        _real_handle(worker, event)
        if isinstance(event, kind):
            _real_handle(worker, event)

    return handle


def _without(kind: type, is_lost: Callable[[Worker, Any], bool]) -> Callable[[Worker, Any], None]:
    def handle(worker: Worker, event: Any) -> None:
        if not (isinstance(event, kind) and is_lost(worker, event)):
            _real_handle(worker, event)

    return handle


def _calls_doubt_safe(worker: Worker, event: Any) -> None:
    if isinstance(event, client.Failed):
        event, event.ticket.delivered = replace(event, safe_to_reuse=True), False
    _real_handle(worker, event)


def _keep_words(words: Words, name: Any) -> Any:
    for agent, address, word in words.granted.get(name, ()):
        mover = words.fabric.agents.get(agent)
        if mover is not None and mover.holds(address, len(word)):
            ctypes.memmove(address, word, len(word))
    return _real_holder_of(words, name)


def _lose(name: bytes) -> Callable[..., None]:
    def send(network: Network, wire: Any, to: Any, payload: bytes) -> None:
        if name not in payload:
            _real_send(network, wire, to, payload)

    return send


def _raise(error: Exception) -> Callable[..., None]:
    def act(*_: object) -> None:
        raise error

    return act


async def _never(_: SimDaemon) -> None:
    await asyncio.Event().wait()


def _queue_twice(socket: SimSocket, route: bytes | None, *arguments: Any) -> None:
    for _ in range(2 if route is None else 1):
        _real_queue(socket, route, *arguments)


def _pull_not_at_rest(worker: Worker, *arguments: Any) -> None:
    if not worker.world.fabric.is_hurried:
        _real_pull(worker, *arguments)


def _publish_whatever(publisher: client.Publisher, *arguments: Any, **named: Any) -> Any:
    try:
        return _real_publish(publisher, *arguments, **named)
    except EngineError as error:
        if error.code is not Code.TRANSFER_EXISTS:
            raise
        return None


def _with_a_run_more(*arguments: Any) -> tuple[int, int, int]:
    num_bytes, num_runs, num_sources = _real_least_reads(*arguments)
    return num_bytes, num_runs + 1, num_sources


def _send_twice(stream: FrameSocket, payload: bytes, fds: tuple[int, ...] = ()) -> None:
    _real_send_frame(stream, payload, fds)
    if b"\xa7Polling" in payload:
        _real_send_frame(stream, payload)


def _all_at_once(slicer: Slicer, budget_bytes: int) -> Any:
    slicer._next = len(slicer._runs.length)
    return slicer._runs


def _keep_pipe(worker: Worker, *arguments: Any) -> None:
    os.pipe()
    _real_check_bytes(worker, *arguments)


def _is_member(worker: Worker, event: client.Released) -> bool:
    transfer = worker.transfers.get(event.transfer_id)
    return transfer is not None and worker is not transfer.publisher


PLANTS: list[tuple[Check, str, object, str, object]] = [
    (Check.RIGHT_BYTES, "a byte is wrong", fabric, "ctypes", CtypesThatSpoil),
    (Check.ALL_BYTES, "another sum", worker, "least_reads", lambda *_: (0, 0, 0)),
    (Check.ALL_BYTES, "a run more", worker, "least_reads", _with_a_run_more),
    (Check.UNTOUCHED, "no blocks are lent", Store, "lend", _nothing),
    (Check.BEFORE_KERNELS, "kernels end early", Kernels, "query", lambda self: True),
    (Check.NOT_WHOLE, "all is written", Store, "is_written", lambda self, lists: True),
    (Check.PROGRESS, "nothing is written", Store, "is_written", lambda self, lists: False),
    (Check.FREED, "all have all memory", SimTransport, "has_any", lambda self, ranges: True),
    (Check.ONE_END, "two ends", Worker, "_handle", _twice(client.Delivered)),
    (Check.DEADLINE, "an end is lost", Worker, "_handle", _without(client.Failed, lambda *_: True)),
    (Check.OWN_TIMER, "a client is hasty", pulls, "DEADLINE_GRACE_S", 0.0),
    (Check.DOUBT, "a lost word", Worker, "_handle", _without(client.Quiesced, lambda *_: True)),
    (Check.SAFE, "no doubt", Worker, "_handle", _calls_doubt_safe),
    (Check.WORD_FIRST, "words stay", Words, "holder_of", _keep_words),
    (Check.REASON, "failures of unknown cause", Reasons, "process_struck", _nothing),
    (Check.RELEASED_ONCE, "two releases", Worker, "_handle", _twice(client.Released)),
    (Check.RELEASE_REASON, "nobody has it", Transfer, "num_done", lambda self: -9),
    (Check.RELEASE_HEARD, "ranks hear nothing", Worker, "_handle", _without(client.Released, _is_member)),
    (Check.COMPLETED, "no acknowledgement arrives", Network, "send", _lose(b"Acknowledge")),
    (
        Check.LEASE, "no lease ends", Worker, "_handle",
        _without(client.Released, lambda worker, event: event.why == Code.LEASE_EXPIRED),
    ),
    (
        Check.WITHDRAWN, "a lost word", Worker, "_handle",
        _without(client.Released, lambda worker, event: event.why == Code.UNPUBLISHED),
    ),
    (Check.ID_ONCE, "a refusal is lost", client.Publisher, "publish", _publish_whatever),
    (Check.PUBLISHED, "no refusal is honest", worker, "OF_LIARS_PUBLISH", frozenset(Code)),
    (Check.REFUSED, "another code", blunders, "OF_PULLS", {"nothing": (Code.INTERNAL, lambda call: call)}),
    (Check.REFUSED, "a right message", blunders, "FALSE_MESSAGES", [RIGHT] * NUM_FALSE_MESSAGES),
    (Check.REFUSED, "a right publish", blunders, "OF_RANKS", [((Code.INTERNAL,), [PUBLISH])] * 9),
    (Check.LIMIT, "a lower limit", worker, "LOW_LIMIT", 0),
    (Check.SUSPENDS, "a lost word", Worker, "_handle", _without(client.Suspended, lambda *_: True)),
    (
        Check.SUSPENDED_AFTER, "pulls have no end", Worker, "_handle",
        _without(client.Failed, lambda worker, event: worker.is_suspending),
    ),
    (Check.DRAINED, "something is left for ever", SimDaemon, "_wait_drained", _never),
    (Check.REGISTERED, "nobody registers", Worker, "_register", lambda self: False),
    (
        Check.CANCELLED, "a lost word", Worker, "_handle",
        _without(client.Failed, lambda worker, event: event.code == Code.CANCELLED),
    ),
    (Check.ADMITTED, "all keys are admitted", PeerAllowlist, "allows_key", lambda self, key: True),
    (Check.WORKS_AGAIN, "no pull at rest", Worker, "pull", _pull_not_at_rest),
    (Check.QUIET, "requests are sent twice", SimSocket, "_queue", _queue_twice),
    (Check.LIBRARY, "no memory is registered", SimTransport, "holds", lambda self, address, size: False),
    (Check.LIBRARY, "one post is all", Slicer, "next_slice", _all_at_once),
    (Check.QUIET, "a post a descriptor", Slicer, "next_slice", lambda self, size: _real_next_slice(self, 1)),
    (Check.QUIET, "frames are sent twice", FrameSocket, "send", _send_twice),
    (Check.LIMIT, "a mover takes any memory", ChunkPool, "_num_more", lambda self, now: 1),
    (Check.REASON, "no stall counts", SourceBreaker, "record_stall", _nothing),
    (Check.NO_BUG, "a daemon raises", SimDaemon, "_after_events", _raise(ValueError("planted"))),
    (Check.TURN, "a low bound", audit, "MAX_TURN_MESSAGES", 1),
    (Check.INTEGRITY, "tables disagree", Node, "check_integrity", _raise(AssertionError("planted"))),
    (Check.SILENT, "requests have no end", PeerRequests, "_schedule_give_up", _nothing),
    (Check.READY, "nobody reports", client.RankHandle, "ready", _nothing),
    (Check.IDLE, "movers poll for ever", PollRequests, "_stop_polling", _nothing),
    (Check.RECORDED, "a phase without a name", history, "PHASES", ()),
    (Check.REST, "a descriptor is kept", Worker, "_check_bytes", _keep_pipe),
    (Check.REST, "a daemon keeps engines", audit, "GONE", ("engines",)),
    (Check.REST, "a pull is not counted", history.Heard, "num_delivered", -1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("check", "what", "place", "name", "value"), PLANTS, ids=[f"{row[0].name}: {row[1]}" for row in PLANTS]
)
def test_check_notices(
    monkeypatch: pytest.MonkeyPatch, check: Check, what: str, place: object, name: str, value: object
) -> None:
    monkeypatch.setattr(place, name, value)
    found = []
    for seed in range(MAX_SEEDS):
        plan = Plan.draw(seed, Size(faults=20, hardships=0))
        if check in KIND_OF:
            faults = tuple(structs.replace(fault, kind=KIND_OF[check]) for fault in plan.faults)
            plan = structs.replace(plan, faults=faults, max_pulls=MAX_PULLS)
        found.append(runs.run(plan).check)
        if found[-1] == check.name:
            return
    pytest.fail(f"{what}: not noticed, but {sorted(set(found))}")


def test_every_check_is_here() -> None:
    # The kernel itself raises HUNG.
    assert {row[0] for row in PLANTS} == set(Check) - {Check.HUNG}
