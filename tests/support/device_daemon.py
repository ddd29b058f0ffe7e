"""A daemon whose movers read a device's memory."""

from __future__ import annotations

from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet

BIG = {"head_dim": 64, "num_blocks": 128}  # 8 MiB a rank of one: several allocations


def daemon(
    fleet: Fleet, name: str, driver: str, placement: str = "", read: str = "", order: str = ""
) -> Daemon:
    """Return a shared one; what is empty is left to the daemon. `order`: what the fake driver reports."""
    movers = f"KVXFERD_DRIVER={driver}" + (f",KVXFERD_FAKE_WRITE_ORDER={order}" if order else "")
    settings = {"ENVIRONMENT": movers, "PLACEMENT": placement, "READ": read}
    return fleet.shared(name, **{f"KVXFERD_MOVER_{key}": value for key, value in settings.items() if value})
