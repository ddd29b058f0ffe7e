"""Real daemons, real rank processes, real NIXL."""

from __future__ import annotations

import pytest

from kvxferd.mover.ucx_settings import tls_with_cuda
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.requests import publish, pull_and_check, spec_of

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
