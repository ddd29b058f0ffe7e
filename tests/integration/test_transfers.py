"""Real daemons, real rank processes, real NIXL."""

from __future__ import annotations

import msgspec
import pytest

from kvxferd.mover.ucx_settings import tls_with_cuda
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.processes import mappers_of
from tests.support.nodes.requests import publish, pull_and_check, spec_of
from tests.support.nodes.waiting import wait_until

TRANSPORTS = [
    pytest.param({}, id="default"),  # CMA where both movers may read each other
    pytest.param({"UCX_TLS": tls_with_cuda("tcp")}, id="tcp"),
]


@pytest.mark.parametrize("environ", TRANSPORTS)
def test_other_parallelism_block_size_and_layout(fleet: Fleet, environ):
    prefill, decode = fleet.shared("prefill", **environ), fleet.shared("decode", **environ)
    sources = fleet.engine(prefill, spec_of("prefill", tp_size=2, pp_size=2))
    sinks = fleet.engine(decode, spec_of("decode", tp_size=3), block_tokens=32, layout="NHD")
    for request in range(3):
        ref = publish(sources, request)
        pull_and_check(sinks, ref, request, block_tokens=32)
        for source in sources:
            assert source.await_event("Released")["why"] == "completed"


def test_stages_on_two_nodes_are_one_engine_for_a_third(fleet: Fleet):
    home, member, decode = fleet.shared("home"), fleet.shared("member"), fleet.shared("decode")
    spec = spec_of("prefill", pp_size=2, home=home.endpoint)
    stages = [
        fleet.register(daemon, msgspec.structs.replace(spec, pp_rank=pp_rank))
        for pp_rank, daemon in enumerate((home, member))
    ]
    sinks = fleet.engine(decode, spec_of("decode", tp_size=2))
    pull_and_check(sinks, publish(stages, 1), 1)
    for stage in stages:
        assert stage.await_event("Released")["why"] == "completed"
    (engine,) = home.status()["engines"]
    assert engine["complete"]
    assert [rank["state"] for rank in engine["ranks"]] == ["ready", "remote"]


def test_a_rank_is_unmapped_when_its_worker_dies(fleet: Fleet):
    daemon = fleet.shared("node")
    (source,) = fleet.engine(daemon, spec_of("prefill"))
    inode = source.memory_inode()
    assert len(mappers_of(inode)) >= 2  # the worker and its mover
    source.kill()
    wait_until(lambda: not mappers_of(inode), "the dead worker's memory unmapped", 5.0)
    wait_until(lambda: not daemon.status()["engines"], "the engine forgotten")


def test_suspended_memory_is_unmapped_and_comes_back(fleet: Fleet):
    daemon = fleet.shared("node")
    source, sink = fleet.pair(daemon)
    sink.suspend()
    sink.await_event("Suspended")
    assert daemon.movers_of(sink.memory_inode()) == []
    sink.resume()
    pull_and_check([sink], publish([source], 1), 1)
