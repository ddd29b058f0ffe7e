"""Bytes between ranks whose movers are threads of their workers, and children of their daemons."""

from __future__ import annotations

import pytest

from tests.support.nodes.fleet import FACTS, Fleet
from tests.support.nodes.rank_process import ranks_of
from tests.support.nodes.requests import publish, pull_and_check, rank_shown, spec_of

TCP = {"KVXFERD_MOVER_ENVIRONMENT": "UCX_TLS=tcp"}
PLACES = [
    pytest.param("register", "register_resident", id="child to resident"),
    pytest.param("register_resident", "register", id="resident to child"),
    pytest.param("register_resident", "register_resident", id="resident to resident"),
]


@pytest.mark.parametrize("transport", ["any", "tcp"])
@pytest.mark.parametrize(("source_how", "sink_how"), PLACES)
def test_other_parallelism_block_size_and_layout(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, source_how: str, sink_how: str, transport: str
) -> None:
    if transport == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")  # in workers; and in movers, which inherit it from daemons
    prefill, decode = fleet.daemon("prefill"), fleet.daemon("decode")
    sources = fleet.engine(prefill, spec_of("prefill", tp_size=2, pp_size=2), source_how)
    sinks = fleet.engine(decode, spec_of("decode", tp_size=3), sink_how, block_tokens=32, layout="NHD")
    for request in range(2):
        pull_and_check(sinks, publish(sources, request), request, block_tokens=32)
        for source in sources:
            assert source.await_event("Released")["why"] == "completed"
    if source_how == "register_resident":
        assert rank_shown(prefill, "prefill")["library"].startswith("nixl")
        agents = [rank["agent"] for rank in prefill.status()["engines"][0]["ranks"]]
        assert len(set(agents)) == 4


def test_one_daemon_for_both_engines(fleet: Fleet) -> None:
    daemon = fleet.daemon("node")
    sources = fleet.engine(daemon, spec_of("prefill"), "register_resident")
    sinks = fleet.engine(daemon, spec_of("decode"), "register_resident")
    pull_and_check(sinks, publish(sources, 1), 1)
    pull_and_check(sources, publish(sinks, 2), 2)  # each is source and sink


def test_an_engine_with_many_files(fleet: Fleet) -> None:
    """`select.select` refuses descriptors above 1,023: the mover would never come up."""
    daemon = fleet.daemon("node")
    (source,) = fleet.engine(daemon, spec_of("prefill"))
    (own,) = ranks_of(spec_of("decode"))
    sink = fleet.rank()
    sink.open_files(1200)
    sink.register_resident(daemon.worker_socket, own, **FACTS)
    pull_and_check([sink], publish([source], 1), 1)
