"""GPU memory through real daemons, movers and NIXL: over the fake driver here, over CUDA where a GPU is."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.device_daemon import BIG, daemon
from tests.support.devices import driver_or_skip, used_bytes
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.rank_process import RankProcess
from tests.support.nodes.requests import publish, pull_and_check, spec_of
from tests.support.nodes.waiting import wait_until


def pair(fleet: Fleet, node: Daemon, driver: str) -> tuple[RankProcess, RankProcess]:
    """Two engines of one rank in a GPU."""
    (source,) = fleet.engine(node, spec_of("prefill"), store={"driver": driver}, **BIG)
    (sink,) = fleet.engine(node, spec_of("decode"), store={"driver": driver}, **BIG)
    return source, sink


@pytest.mark.parametrize(
    ("source", "sink"),
    [("device", "device"), ("device", "host"), ("host", "device")],
)
def test_every_kind_of_memory_reads_every_other(fleet: Fleet, driver: str, source: str, sink: str) -> None:
    """Other parallelism, block size and layout on the two sides, too."""
    stores = {"device": {"driver": driver}, "host": None}
    prefill, decode = daemon(fleet, "prefill", driver), daemon(fleet, "decode", driver)
    sources = fleet.engine(prefill, spec_of("prefill", tp_size=2), store=stores[source], **BIG)
    sinks = fleet.engine(
        decode, spec_of("decode", tp_size=1), store=stores[sink], block_tokens=32, layout="NHD", **BIG
    )
    for request in range(2):
        ref = publish(sources, request)
        pull_and_check(sinks, ref, request, block_tokens=32)
        for rank in sources:
            assert rank.await_event("Released")["why"] == "completed"


@pytest.mark.parametrize(
    ("source", "sink"),
    [
        ("staged", "staged"),
        ("staged", "device"),
        ("staged", "host"),
        ("device", "staged"),
        ("host", "staged"),
    ],
)
def test_what_nixl_cannot_reach_is_copied(fleet: Fleet, driver: str, source: str, sink: str) -> None:
    stores = {"device": {"driver": driver}, "staged": {"driver": driver}, "host": None}
    placements = {"device": "direct", "staged": "staged", "host": ""}
    prefill = daemon(fleet, "prefill", driver, placements[source])
    decode = daemon(fleet, "decode", driver, placements[sink])
    sources = fleet.engine(prefill, spec_of("prefill"), store=stores[source], **BIG)
    sinks = fleet.engine(decode, spec_of("decode"), store=stores[sink], layout="NHD", **BIG)
    for request in range(2):
        pull_and_check(sinks, publish(sources, request), request)


def test_more_allocations_than_a_frame_has_descriptors(fleet: Fleet, driver: str) -> None:
    """600 handles on the fake driver; on a GPU, whose handles are larger, as many as 48 MiB have."""
    node = daemon(fleet, "node", driver)
    facts = {"head_dim": 128, "num_blocks": 256}
    store = {"driver": driver, "num_pieces": 600}
    sources = fleet.engine(node, spec_of("prefill"), store=store, **facts)
    sinks = fleet.engine(node, spec_of("decode"), store=store | {"num_pieces": 7}, **facts)
    pull_and_check(sinks, publish(sources, 1), 1)


def test_two_gpus(fleet: Fleet, driver: str) -> None:
    if len(driver_or_skip(driver).devices()) < 2:
        pytest.skip("there is one GPU here")
    node = daemon(fleet, "node", driver)
    sources = fleet.engine(node, spec_of("prefill"), store={"driver": driver, "device": 1}, **BIG)
    sinks = fleet.engine(node, spec_of("decode"), store={"driver": driver, "device": 0}, **BIG)
    pull_and_check(sinks, publish(sources, 1), 1)


def test_memory_is_free_when_its_worker_is_killed(fleet: Fleet, driver: str) -> None:
    """By the driver's own count."""
    count = driver_or_skip(driver)
    uuid = count.devices()[0].uuid
    node = daemon(fleet, "node", driver)
    before = used_bytes(count, uuid)
    (source,) = fleet.engine(node, spec_of("prefill"), store={"driver": driver}, **BIG)
    held = used_bytes(count, uuid)
    assert held > before
    source.kill()
    wait_until(lambda: not node.status()["engines"], "the engine forgotten")
    wait_until(lambda: used_bytes(count, uuid) <= before, f"{held - before} bytes free again")


def test_a_killed_mover_is_replaced(fleet: Fleet, driver: str) -> None:
    node = daemon(fleet, "node", driver)
    source, sink = pair(fleet, node, driver)
    pull_and_check([sink], publish([source], 1), 1)
    agents = agents_of(node)
    for mover in node.movers():
        os.kill(mover, signal.SIGKILL)
    wait_until(lambda: len(agents_of(node)) == 2 and not agents & agents_of(node), "both movers replaced")
    pull_and_check([sink], publish([source], 2), 2)


def test_sleep_and_wake(fleet: Fleet, driver: str) -> None:
    """The engine frees its memory after Suspended and has other memory when it wakes."""
    count = driver_or_skip(driver)
    uuid = count.devices()[0].uuid
    node = daemon(fleet, "node", driver)
    before = used_bytes(count, uuid)
    source, sink = pair(fleet, node, driver)
    pull_and_check([sink], publish([source], 1), 1)
    used = used_bytes(count, uuid)
    for request in (2, 3):
        sink.suspend()
        sink.await_event("Suspended")
        sink.free()
        assert used_bytes(count, uuid) < used, "nobody else keeps it"
        sink.allocate()
        sink.resume()
        pull_and_check([sink], publish([source], request), request)
    assert used_bytes(count, uuid) > before


def agents_of(node: Daemon) -> set[str]:
    """The agents of the node's readable ranks."""
    ranks = [rank for engine in node.status()["engines"] for rank in engine["ranks"]]
    return {rank["agent"] for rank in ranks if rank["state"] == "ready"}
