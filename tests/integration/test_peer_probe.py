"""A probe of the way between two real daemons: by CMA, and by TCP."""

from __future__ import annotations

from typing import Any

from kvxferd.mover.ucx_settings import tls_with_cuda
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.waiting import wait_until

SIZE_BYTES = 6 << 20  # two slices, the second shorter


def probe(here: Daemon, there: Daemon) -> dict[str, Any]:
    body = {"endpoint": there.endpoint, "size_bytes": SIZE_BYTES}
    found: list[dict[str, Any]] = []

    def ended() -> bool:
        """Whether it was probed; busy while the mover of a former probe exits."""
        status, value = here.control.request("POST", "/v1/peers/probe", body, wait_forever=True)
        assert status == 200 or value["error"]["code"] == "busy", value
        found.extend([value] if status == 200 else [])
        return status == 200

    wait_until(ended, "probed", 20.0)
    return found[0]


def check(here: Daemon, there: Daemon, transport: str, times: int) -> None:
    found = probe(here, there)
    for direction in (found["read"], found["read_back"]):
        assert (direction["code"], direction["wrong_bytes"]) == (None, 0), found
        assert direction["verified_bytes"] >= SIZE_BYTES
        assert direction["gigabytes_per_s"] > 0
        assert (direction["transports"], direction["reach"]) == (transport, "node")
    for daemon, role, num in ((here, "requested", times), (there, "served", 1)):
        counted = f'kvxferd_peer_probes_total{{outcome="ok",role="{role}"}} {num}.0'
        wait_until(lambda daemon=daemon, counted=counted: counted in daemon.metrics(), counted)
        assert '"probe ended"' in daemon.log.read_text()


def test_both_directions_are_read_and_verified_by_cma_and_by_tcp(fleet: Fleet):
    few = ("--mover-pool-size", "1")
    here, there, tcp = (fleet.daemon(name, *few, **env) for name, env in (
        ("here", {}), ("there", {}), ("tcp", {"UCX_TLS": tls_with_cuda("tcp")})
    ))  # fmt: skip
    check(here, there, "cma", 1)
    status, value = here.control.request("POST", "/v1/peers/probe", {"endpoint": there.endpoint})
    assert (status, value["error"]["code"]) == (409, "busy")
    check(here, tcp, "tcp", 2)
