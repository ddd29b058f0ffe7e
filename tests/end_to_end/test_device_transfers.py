"""GPU memory through real daemons, movers and NIXL: over the fake driver here, over CUDA where a GPU is."""

from __future__ import annotations

import pytest
from devices import DRIVERS, driver_or_skip
from fleet import Fleet
from test_transfers import publish, pull_and_check, spec_of

BIG = {"head_dim": 64, "num_blocks": 128}  # 8 MiB a rank of one: several allocations


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    driver_or_skip(request.param)
    return request.param


def daemon(fleet: Fleet, name: str, driver: str):
    return fleet.daemon(name, KVXFERD_MOVER_ENVIRONMENT=f"KVXFERD_DRIVER={driver}")


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
