"""Layouts that differ, read into a GPU: chunks and scatters there, by real daemons and movers."""

from __future__ import annotations

import pytest

from kvxferd.records import WAYS
from kvxferd.wire.limits import CHUNK_BYTES
from tests.support.device_daemon import BIG, daemon
from tests.support.devices import driver_or_skip, used_bytes
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.requests import publish, pull_and_check, spec_of

NAME = "kvxferd_read_bytes_total"


def bytes_by_way(node: Daemon) -> dict[str, float]:
    return {way: node.counted(f'{NAME}{{way="{way}"}}') for way in WAYS}


@pytest.mark.parametrize(("source", "order"), [("device", ""), ("host", "flush")])
def test_bytes_come_through_chunks_in_the_gpu(fleet: Fleet, driver: str, source: str, order: str) -> None:
    """`order`: what the fake driver reports, "": its default; a GPU has its own."""
    prefill = daemon(fleet, "prefill", driver)
    decode = daemon(fleet, "decode", driver, read="covering", order=order)
    store = {"driver": driver}
    sources = fleet.engine(
        prefill, spec_of("prefill", tp_size=2), store=store if source == "device" else None, **BIG
    )
    sinks = fleet.engine(
        decode, spec_of("decode", tp_size=1), store=store, block_tokens=32, layout="NHD", **BIG
    )
    count = driver_or_skip(driver)
    uuid = count.devices()[0].uuid
    before = used_bytes(count, uuid)
    for request in range(2):
        pull_and_check(sinks, publish(sources, request), request, block_tokens=32)
    assert used_bytes(count, uuid) >= before + CHUNK_BYTES, "chunks are in the GPU"
    ways = bytes_by_way(decode)
    assert ways["covering"] > 0, ways
