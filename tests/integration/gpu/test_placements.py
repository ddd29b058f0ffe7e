"""The vLLM connector's placements of GPU memory, with real daemons, movers and NIXL.

On a GPU it is no failure of these tests where memory of the pool cannot be exported: the reason is printed
at the end, and the next placement has to deliver.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.support import placed_ranks
from tests.support.device_daemon import daemon
from tests.support.fake_driver import FAKE
from tests.support.nodes.fleet import Fleet


def place(fleet: Fleet, driver: str, movers: str, *cases: str) -> list[dict[str, Any]]:
    """Return what two ranks found in each case, on a daemon whose movers have the driver `movers`."""
    socket = daemon(fleet, "node", movers).worker_socket
    rank = fleet.rank(KVXFERD_DRIVER=driver)  # a new process: other tests' may have imported nixl
    found: list[dict[str, Any]] = rank.run(partial(placed_ranks.place, socket, driver, cases))
    return found


def check_resident(found: dict[str, Any], why: str) -> None:
    """Check that a thread of the worker delivered the bytes, and that the line of the log names why."""
    assert found.get("is_right"), found
    for report in found["reports"]:
        assert report.partition(": ")[2].startswith("resident. Its mover is a thread of this worker"), report
        assert why in report


def test_the_first_placement_that_works_delivers(fleet: Fleet, driver: str, verdicts: list[str]) -> None:
    exported, plain, pinned, refused = place(
        fleet,
        driver,
        driver,
        "auto:pool:nixl,rixl" if driver == FAKE else "auto:pool",  # nixl is not needed here
        "auto:default",
        "resident:pool",
        "child:default",
    )
    assert exported.get("is_right"), exported
    if driver == FAKE:
        assert [": child. Its mover is a process" in r for r in exported["reports"]] == [True] * 2
    else:
        verdicts += exported["reports"]
    check_resident(plain, "; child does not work: cannot export memory")
    check_resident(pinned, "cannot be killed")
    assert refused["code"] == "region-not-exportable"
    assert refused["message"].splitlines()[1].startswith("  child: cannot export memory")


def test_a_daemon_that_refuses_the_memory_leaves_the_thread(fleet: Fleet, driver: str) -> None:
    both, pinned, resident = place(fleet, driver, "none", "auto:pool:nixl,rixl", "child:pool", "auto:pool")
    assert both["code"] == "region-not-exportable"
    heading, first, second = both["message"].splitlines()
    assert heading == "cannot register rank (0, 0) of auto-pool-0: no placement works"
    assert "  child: the daemon refused it" in first
    assert first.endswith("run where the daemon runs: kvxferd doctor --gpu")
    assert "  resident: a mover in this process needs a transfer library" in second
    assert second.partition("pip install ")[2].startswith("'kvxferd[engine-gpu")
    assert pinned["code"] == "device-unavailable"
    assert len(pinned["message"].splitlines()) == 2
    check_resident(resident, "; child does not work: the daemon refused it: ")
