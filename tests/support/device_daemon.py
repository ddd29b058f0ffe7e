"""A daemon whose movers read a device's memory."""

from __future__ import annotations

from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet

BIG = {"head_dim": 64, "num_blocks": 128}  # 8 MiB a rank of one: several allocations


def daemon(fleet: Fleet, name: str, driver: str, placement: str = "auto") -> Daemon:
    return fleet.shared(
        name, KVXFERD_MOVER_ENVIRONMENT=f"KVXFERD_DRIVER={driver}", KVXFERD_MOVER_PLACEMENT=placement
    )
