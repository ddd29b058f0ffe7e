"""Torch tensors from every allocator, through daemons and movers. `-m gpu` runs what needs a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support.device_daemon import BIG, daemon
from tests.support.fake_driver import FAKE
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.requests import publish, pull_and_check, spec_of
from tests.support.tensor_allocators import ALLOCATORS

# Where a driver can export. Torch that asks for another kind of handle is served by a resident mover.
PLACEMENTS = {"default": "resident", "expandable": "direct", "pool": "direct"}


def placement_of(node: Daemon, engine: str) -> dict[str, Any]:
    (rank,) = [r for e in node.status()["engines"] if e["engine_id"] == engine for r in e["ranks"]]
    return rank["placement"]


def test_every_allocator_reads_every_other(fleet: Fleet, driver: str) -> None:
    """Where a tensor can be placed depends on its allocator; that it arrives does not."""
    node = daemon(fleet, "node", driver)
    ranks = {
        allocator: fleet.engine(
            node, spec_of(allocator), store={"tensor": allocator, "driver": driver}, **BIG
        )
        for allocator in ALLOCATORS
    }
    for request, (source, sink) in enumerate(itertools.permutations(ALLOCATORS, 2)):
        pull_and_check(ranks[sink], publish(ranks[source], request), request)
    for allocator in ALLOCATORS:
        kind = placement_of(node, allocator)["kind"]
        if driver == FAKE:
            assert kind == PLACEMENTS[allocator]
        else:
            assert kind in ("direct", "resident", "staged")
            assert kind != "direct" or allocator != "default"


@pytest.mark.parametrize("allocator", ["expandable", "pool"])
def test_a_tensor_that_must_be_staged(fleet: Fleet, driver: str, allocator: str) -> None:
    node = daemon(fleet, "node", driver, placement="staged")
    store = {"tensor": allocator, "driver": driver}
    sources = fleet.engine(node, spec_of("prefill"), store=store, **BIG)
    sinks = fleet.engine(node, spec_of("decode"), store={"driver": driver}, **BIG)
    pull_and_check(sinks, publish(sources, 1), 1)
    found = placement_of(node, "prefill")
    if driver == FAKE:
        assert found["kind"] == "staged"
        assert "mover.placement" in found["why"]


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_tensor_sleeps_and_wakes(fleet: Fleet, driver: str, allocator: str) -> None:
    node = daemon(fleet, "node", driver)
    sources = fleet.engine(node, spec_of("prefill"), store={"driver": driver}, **BIG)
    (sink,) = fleet.engine(node, spec_of("decode"), store={"tensor": allocator, "driver": driver}, **BIG)
    pull_and_check([sink], publish(sources, 1), 1)
    sink.suspend()
    sink.await_event("Suspended")
    sink.free()
    sink.allocate()
    sink.resume()
    pull_and_check([sink], publish(sources, 2), 2)
