"""Gathered reads between real daemons, and between two of which one does not gather."""

from __future__ import annotations

import pytest

from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.requests import publish, pull_and_check, spec_of

WAY = "KVXFERD_MOVER_READ"
TRANSPORTS = [
    pytest.param({}, id="default"),
    pytest.param({"KVXFERD_MOVER_ENVIRONMENT": "UCX_TLS=tcp"}, id="tcp"),
]


def bytes_by(daemon: Daemon, way: str) -> float:
    return daemon.counted(f'kvxferd_read_bytes_total{{way="{way}"}}')


@pytest.mark.parametrize("environ", TRANSPORTS)
def test_a_quarter_of_the_heads_is_packed_for_each_reader(fleet: Fleet, environ):
    both = {WAY: "gathered", **environ}
    prefill, decode = fleet.shared("prefill", **both), fleet.shared("decode", **both)
    sources = fleet.engine(prefill, spec_of("prefill"), layout="NHD")
    sinks = fleet.engine(decode, spec_of("decode", tp_size=4), layout="NHD")
    for request in range(12):  # a source on a busy machine may reply too late, and is read otherwise
        pull_and_check(sinks, publish(sources, request), request)
        assert sources[0].await_event("Released")["why"] == "completed"
        if request >= 3 and bytes_by(decode, "gathered") > 0:
            break
    assert bytes_by(decode, "gathered") > 0


@pytest.mark.parametrize(("there", "here"), [("direct", "gathered"), ("gathered", "auto")])
def test_a_node_that_does_not_gather_reads_and_is_read_as_ever(fleet: Fleet, there: str, here: str):
    prefill, decode = fleet.shared("prefill", **{WAY: there}), fleet.shared("decode", **{WAY: here})
    sources = fleet.engine(prefill, spec_of("prefill"), layout="NHD")
    sinks = fleet.engine(decode, spec_of("decode", tp_size=2), layout="NHD")
    pull_and_check(sinks, publish(sources, 1), 1)
    assert bytes_by(decode, "gathered") == 0
