"""A rank sleeps while a daemon is away: what was published of its old memory is never delivered."""

from __future__ import annotations

import select
import socket
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from kvxferd import client
from kvxferd.client import BlockList, Publisher, PublishRefused, Released
from kvxferd.errors import Code
from kvxferd.tooling.child_process import ChildError
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.rank_process import RankProcess
from tests.support.nodes.requests import TOKENS, ids_for, pull_and_check, spec_of
from tests.support.nodes.waiting import wait_until

LEASE_S = 120.0  # longer than any restart: nothing here ends by its lease


def daemon_that_returns(fleet: Fleet, name: str) -> Daemon:
    """A daemon whose references are good after its restart: its port stays."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return fleet.daemon(name, "--peer-bind", f"tcp://127.0.0.1:{port}")


def publish(scheduler: Publisher, sources: list[RankProcess], request: int) -> dict[str, Any]:
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


def end_of_publish(scheduler: Publisher) -> client.Event:
    deadline = time.monotonic() + 20.0
    while not (events := scheduler.poll()):
        assert time.monotonic() < deadline, "the scheduler was told nothing"
        select.select([scheduler.fileno()], [], [], deadline - time.monotonic())
    return events[0]


def check_void(scheduler: Publisher, sink: RankProcess, ref: dict[str, Any]) -> None:
    name, fields = sink.end_of(sink.pull(ref, ids_for(7, 16), TOKENS, deadline_s=10.0))
    assert name == "Failed", (fields, sink.num_wrong(1, ids_for(7, 16), TOKENS), "wrong items were delivered")
    ended = end_of_publish(scheduler)
    assert isinstance(ended, PublishRefused | Released), ended
    assert (ended.code if isinstance(ended, PublishRefused) else ended.why) is Code.RANK_LOST


@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_that_slept_while_its_daemon_was_away_voids_what_its_scheduler_published(
    fleet: Fleet, tp: int
):
    prefill, decode = daemon_that_returns(fleet, "prefill"), fleet.shared("decode")
    sources = fleet.engine(prefill, spec_of("prefill", tp_size=tp, publish_implies_ready=True))
    (sink,) = fleet.engine(decode, spec_of("decode"))
    with client.connect(prefill.worker_socket) as connection:
        scheduler = connection.attach("prefill", fleet.generation())
        ref = publish(scheduler, sources, 1)
        wait_until(lambda: prefill.status()["transfers"], "the publish noticed")
        prefill.kill()
        sleep_and_forget(sources[-1])
        prefill.start()
        wake(sources[-1])
        wait_until(lambda: prefill.is_ready and scheduler.is_connected, "the scheduler is back", 20.0)
        wait_until(lambda: prefill.status()["engines"][0]["complete"], "every rank is back", 20.0)
        check_void(scheduler, sink, ref)
        pull_and_check([sink], publish(scheduler, sources, 2), 2)  # of the new memory


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
        pull_and_check([sink], publish(scheduler, stages, 3), 3)
        assert end_of_publish(scheduler) == Released("req-3", Code.COMPLETED)
        ref = publish(scheduler, stages, 1)
        wait_until(lambda: home.status()["transfers"], "the publish noticed")
        home.kill()
        sleep_and_forget(stages[1])
        home.start()
        wait_until(lambda: home.is_ready and scheduler.is_connected, "the scheduler is back", 20.0)
        wake(stages[1])
        wait_until(lambda: home.status()["engines"][0]["complete"], "every rank is back", 30.0)
        check_void(scheduler, sink, ref)
        pull_and_check([sink], publish(scheduler, stages, 2), 2)
