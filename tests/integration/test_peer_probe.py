"""A probe of the way between two real daemons: by CMA, and by TCP."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.daemon_fleet import DaemonUnderTest, Fleet, wait_until

SIZE_BYTES = 6 << 20  # two slices, the second shorter


def probe(here: DaemonUnderTest, there: DaemonUnderTest) -> dict[str, Any]:
    body = {"endpoint": there.endpoint, "size_bytes": SIZE_BYTES}
    return here.control.post("/v1/peers/probe", body, wait_forever=True)


@pytest.mark.parametrize(("transport", "environ"), [("cma", {}), ("tcp", {"UCX_TLS": "tcp"})])
def test_both_directions_are_read_and_verified(fleet: Fleet, transport: str, environ: dict[str, str]):
    here, there = fleet.daemon("here", **environ), fleet.daemon("there", **environ)
    found = probe(here, there)
    for direction in (found["read"], found["read_back"]):
        assert (direction["code"], direction["wrong_bytes"]) == (None, 0), found
        assert direction["verified_bytes"] >= SIZE_BYTES
        assert direction["gigabytes_per_s"] > 0
        assert (direction["transports"], direction["reach"]) == (transport, "node")
    for daemon, role in ((here, "requested"), (there, "served")):
        counted = f'kvxferd_peer_probes_total{{outcome="ok",role="{role}"}} 1.0'
        wait_until(lambda daemon=daemon, counted=counted: counted in daemon.metrics(), counted)
        assert '"probe ended"' in daemon.log.read_text()
    again, value = here.control.request("POST", "/v1/peers/probe", {"endpoint": there.endpoint})
    assert (again, value["error"]["code"]) == (409, "busy")
