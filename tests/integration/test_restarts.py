"""Daemons that die and return.

Where a rank sleeps meanwhile, what was published of its old memory is never delivered.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvxferd import client
from kvxferd.client import BlockList, Publisher, PublishRefused, Released
from kvxferd.errors import Code
from kvxferd.tooling.child_process import ChildError
from tests.support.client_harness import events_of
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.processes import lives, mappers_of
from tests.support.nodes.rank_process import RankProcess
from tests.support.nodes.requests import TOKENS, ids_for, pull_and_check, spec_of
from tests.support.nodes.tcp_proxy import Mode, Proxy
from tests.support.nodes.waiting import wait_until
from tests.support.ports import free_port

LEASE_S = 120.0  # longer than any restart: nothing here ends by its lease
SILENT_S = 3.0


def daemon_that_returns(fleet: Fleet, name: str) -> Daemon:
    """A daemon whose references are good after its restart: its port stays."""
    return fleet.daemon(name, "--peer-bind", f"tcp://127.0.0.1:{free_port()}")


def publish_by(scheduler: Publisher, sources: list[RankProcess], request: int) -> dict[str, Any]:
    ids = ids_for(request, 16)
    for source in sources:
        source.write(request, ids, TOKENS)
    blocks = {"full": BlockList(ids=np.array(ids, np.int32))}
    return scheduler.publish(f"req-{request}", blocks, TOKENS, lease_s=LEASE_S).to_dict()


def sleep_and_forget(source: RankProcess) -> None:
    """The engine takes the rank's memory back, and something else lies there when it wakes."""
    source.suspend()
    source.await_event("Suspended")
    source.scribble()


def wake(source: RankProcess, limit_s: float = 30.0) -> Any:
    """Resume; a member's home may not be back at once."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return source.resume()
        except ChildError as error:
            if error.code != "home-unreachable" or time.monotonic() > deadline:
                raise


def check_void(scheduler: Publisher, sink: RankProcess, ref: dict[str, Any]) -> None:
    name, fields = sink.end_of(sink.pull(ref, ids_for(7, 16), TOKENS, deadline_s=10.0))
    assert name == "Failed", (fields, sink.num_wrong(1, ids_for(7, 16), TOKENS), "wrong items were delivered")
    ended = events_of(scheduler, 1, 20.0)[0]
    assert isinstance(ended, PublishRefused | Released), ended
    assert (ended.code if isinstance(ended, PublishRefused) else ended.why) is Code.RANK_LOST


def test_movers_and_memory_go_with_a_killed_daemon_and_its_lock_tells_when(fleet: Fleet):
    daemon = fleet.daemon("node")
    (source,) = fleet.engine(daemon, spec_of("prefill"))
    inode, movers = source.memory_inode(), daemon.movers()
    shared_memory = Path(f"/dev/shm/kvxferd-movers-{daemon.parent()}")
    assert movers
    assert shared_memory.exists()
    with (daemon.directory / "private" / "movers.lock").open() as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        daemon.kill()
        signal.alarm(20)
        fcntl.flock(lock, fcntl.LOCK_EX)  # granted when the last mover and their parent are gone
        signal.alarm(0)
    assert not any(map(lives, movers))
    assert mappers_of(inode) == [source.pid]
    assert not shared_memory.exists()


def test_a_rank_that_slept_while_its_daemon_was_away_voids_what_its_scheduler_published(fleet: Fleet):
    prefill, decode = daemon_that_returns(fleet, "prefill"), fleet.shared("decode")
    sources = fleet.engine(prefill, spec_of("prefill", publish_implies_ready=True))
    (sink,) = fleet.engine(decode, spec_of("decode"))
    with client.connect(prefill.worker_socket) as connection:
        scheduler = connection.attach("prefill", fleet.generation())
        ref = publish_by(scheduler, sources, 1)
        wait_until(lambda: prefill.status()["transfers"], "the publish noticed")
        prefill.kill()
        sleep_and_forget(sources[-1])
        prefill.start()
        wake(sources[-1])
        wait_until(lambda: prefill.is_ready and scheduler.is_connected, "the scheduler is back", 20.0)
        wait_until(lambda: prefill.status()["engines"][0]["complete"], "every rank is back", 20.0)
        check_void(scheduler, sink, ref)
        pull_and_check([sink], publish_by(scheduler, sources, 2), 2)  # of the new memory


def test_a_member_that_slept_while_its_home_was_away_voids_what_was_published(fleet: Fleet):
    home, member = daemon_that_returns(fleet, "home"), fleet.shared("member")
    decode = fleet.shared("decode")
    spec = spec_of("prefill", pp_size=2, home=home.endpoint, publish_implies_ready=True)
    stages = [
        fleet.register(daemon, msgspec.structs.replace(spec, pp_rank=pp_rank))
        for pp_rank, daemon in enumerate((home, member))
    ]
    (sink,) = fleet.engine(decode, spec_of("decode"))
    with client.connect(home.worker_socket) as connection:
        scheduler = connection.attach("prefill", fleet.generation())
        pull_and_check([sink], publish_by(scheduler, stages, 3), 3)
        assert events_of(scheduler, 1, 20.0)[0] == Released("req-3", Code.COMPLETED)
        ref = publish_by(scheduler, stages, 1)
        wait_until(lambda: home.status()["transfers"], "the publish noticed")
        home.kill()
        sleep_and_forget(stages[1])
        home.start()
        wait_until(lambda: home.is_ready and scheduler.is_connected, "the scheduler is back", 20.0)
        wake(stages[1])
        wait_until(lambda: home.status()["engines"][0]["complete"], "every rank is back", 30.0)
        check_void(scheduler, sink, ref)
        pull_and_check([sink], publish_by(scheduler, stages, 2), 2)


# How a source's daemon is lost: what is done, and what brings it back, so that the test can end it.
Loss = Callable[[Daemon, Proxy], None]
LOSSES: dict[str, tuple[Loss, Loss]] = {
    "killed": (lambda daemon, link: daemon.kill(), lambda daemon, link: None),
    "stopped": (
        lambda daemon, link: os.kill(daemon.pid, signal.SIGSTOP),
        lambda daemon, link: os.kill(daemon.pid, signal.SIGCONT),
    ),
    "cut off": (lambda daemon, link: link.set(Mode.STALLED), lambda daemon, link: link.set(Mode.OPEN)),
}


@pytest.mark.parametrize("how", LOSSES)
def test_pulls_that_wait_at_a_daemon_that_is_lost_fail_with_that_cause(fleet: Fleet, how: str) -> None:
    """For a rank that is not ready, here or with its home there, and for the rest of a prompt."""
    lose, bring_back = LOSSES[how]
    port = free_port()
    link = Proxy(("127.0.0.1", port))
    flags = ["--peer-bind", f"tcp://127.0.0.1:{port}"]
    if how == "cut off":
        flags += ["--peer-advertise", link.endpoint]
    prefill = fleet.daemon("prefill", *flags)
    patience = ("--peer-silent-after-s", f"{SILENT_S}", "--peer-request-timeout-s", "0.25")
    decode = fleet.daemon("decode", *patience)
    first, second = fleet.engine(prefill, spec_of("prefill", tp_size=2))
    spread = spec_of("spread", pp_size=2, home=prefill.endpoint)
    stage = fleet.register(prefill, spread)
    fleet.register(decode, msgspec.structs.replace(spread, pp_rank=1))
    (sink,) = fleet.engine(decode, spec_of("decode"))
    whole, growing = (first.publish(f"req-{number}", range(10), 160) for number in range(2))
    second.ready("req-1", 64)
    tickets = [
        sink.pull(ref, range(10 * number, 10 * number + 10), 160, 300.0, progressive=ref is growing)
        for number, ref in enumerate((whole, growing, stage.publish("req-2", range(10), 160)))
    ]
    wait_until(
        lambda: sorted(pull["phase"] for pull in decode.status()["pulls"]) == ["grant", "grant", "held"],
        lambda: f"they wait: {decode.status()['pulls']}",
    )
    lose(prefill, link)
    lost_at = time.monotonic()
    try:
        ends = sink.end_of_all(tickets)
        assert time.monotonic() - lost_at <= SILENT_S + 2.0
    finally:
        bring_back(prefill, link)
        link.stop()
    for name, fields in ends.values():
        assert (name, fields["code"], fields["safe_to_reuse"]) == ("Failed", "peer-unreachable", True)
        assert ("connection" if how == "killed" else "no reply") in fields["message"]
