"""Bytes between ranks whose movers are children of their daemons, or threads of their workers. Real NIXL."""

from __future__ import annotations

import pytest

from kvxferd.mover.ucx_settings import tls_with_cuda
from tests.support.nodes.fleet import Fleet, How
from tests.support.nodes.requests import publish, pull_and_check, rank_shown, spec_of

TCP = {"UCX_TLS": tls_with_cuda("tcp")}
CHILD, RESIDENT = "register", "register_resident"


@pytest.mark.parametrize(
    ("source_how", "sink_how", "environ"),
    [
        pytest.param(CHILD, CHILD, {}, id="default"),  # CMA where both movers may read each other
        pytest.param(CHILD, CHILD, TCP, id="tcp"),
        pytest.param(RESIDENT, RESIDENT, {}, id="resident to resident"),
        pytest.param(RESIDENT, CHILD, TCP, id="resident to child, tcp"),
    ],
)
def test_other_parallelism_block_size_and_layout(
    fleet: Fleet, source_how: How, sink_how: How, environ: dict[str, str]
) -> None:
    """`environ`: of workers, and of daemons, from which movers inherit it."""
    prefill, decode = fleet.shared("prefill", **environ), fleet.shared("decode", **environ)
    sources = fleet.engine(prefill, spec_of("prefill", tp_size=2, pp_size=2), source_how, environ)
    sinks = fleet.engine(
        decode, spec_of("decode", tp_size=3), sink_how, environ, block_tokens=32, layout="NHD"
    )
    for request in range(2):
        pull_and_check(sinks, publish(sources, request), request, block_tokens=32)
        for source in sources:
            assert source.await_event("Released")["why"] == "completed"
    assert rank_shown(prefill, "prefill")["library"].startswith("nixl")
    agents = [rank["agent"] for rank in prefill.status()["engines"][0]["ranks"]]
    assert len(set(agents)) == 4


def test_a_resident_mover_of_an_engine_with_many_files(fleet: Fleet) -> None:
    """`select.select` refuses descriptors above 1,023: the mover would never come up."""
    daemon = fleet.shared("node")
    (source,) = fleet.engine(daemon, spec_of("prefill"))
    sink = fleet.rank()
    sink.open_files(1200)
    fleet.register(daemon, spec_of("decode"), RESIDENT, sink)
    pull_and_check([sink], publish([source], 1), 1)
