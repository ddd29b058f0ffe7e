"""A daemon whose movers read a device's memory."""

from __future__ import annotations

from kvxferd.memory.driver import DRIVER_VARIABLE
from tests.support.fake_driver import FAKE, WRITE_ORDER_VARIABLE
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.repository import ROOT

BIG = {"head_dim": 64, "num_blocks": 128}  # 8 MiB a rank of one: several allocations


def daemon(
    fleet: Fleet, name: str, driver: str, placement: str = "direct", read: str = "", order: str = ""
) -> Daemon:
    """Return a shared one; what is empty is left to the daemon. `order`: what the fake driver reports.

    Without a network card NIXL reads a GPU over TCP, and "auto" stages its memory then.
    """
    movers = [f"{DRIVER_VARIABLE}={driver}"]
    if driver == FAKE:
        movers += [f"PYTHONPATH={ROOT}", *([f"{WRITE_ORDER_VARIABLE}={order}"] if order else [])]
    settings = {"ENVIRONMENT": ",".join(movers), "PLACEMENT": placement, "READ": read}
    return fleet.shared(name, **{f"KVXFERD_MOVER_{key}": value for key, value in settings.items() if value})
