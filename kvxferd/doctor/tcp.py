"""Reads over TCP, as between nodes without an RDMA card, and between users or PID namespaces."""

from __future__ import annotations

from collections.abc import Iterator

from kvxferd.doctor.finding import CheckContext, Finding, fail, ok
from kvxferd.doctor.nixl_read_test import read_between
from kvxferd.mover.backends import UCX


def check(node: CheckContext) -> Iterator[Finding]:
    """Read between two processes that may use TCP only. That is a setting of UCX."""
    if node.config.mover.backend != UCX:
        return
    reading = read_between(node, "tcp")
    if reading.value and reading.value["intact"] and reading.value["over_tcp"]:
        yield ok("tcp", f"{reading.value['gigabytes_per_s']:.3g} GB/s through loopback", **reading.value)
        return
    found = reading.failure or "a read that should go over TCP did not, or brought other bytes"
    todo = (
        "bring up a network interface, and the loopback, and see that UCX_NET_DEVICES names one of them; "
        "without TCP NIXL makes no connection"
    )
    yield fail("tcp", found, todo, essential=True)
