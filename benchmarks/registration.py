"""How long `register` takes with a warm mover, and how soon after it the memory is probed.

One rank at a time is registered with a daemon of its own and closed again; in between the mover pool refills.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from latency import start_daemon

from kvxferd import client
from kvxferd.ids import EngineId, Generation, RegionId
from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.memory import SealedMemory
from kvxferd.tooling.control_client import ControlClient
from kvxferd.tooling.daemon_process import DaemonProcess

FILL_S = 0.6  # the pool waits 0.25 s before it makes another mover
LIMIT_S = 5.0


def wait_until_probed(control: ControlClient, began: float) -> float:
    """Return how long after `began` the rank's memory was probed."""
    while time.perf_counter() < began + LIMIT_S:
        ((rank,),) = [engine["ranks"] for engine in control.get("/v1/engines")["engines"]]
        if rank["placement"]["proved"]:
            return time.perf_counter() - began
    raise TimeoutError(f"not proved after {LIMIT_S} s")


def measure(daemon: DaemonProcess, rounds: int, mebibytes: int) -> tuple[list[float], list[float]]:
    """Return the seconds of `register`, and those until the probe's result."""
    time.sleep(2.0)
    spec = EngineSpec(EngineId("e"), Generation("1"), num_layers=8, num_kv_heads=8)
    layout = attention_layout(
        spec=spec, num_kv_heads=8, head_dim=128, block_tokens=16, num_blocks=2 * mebibytes
    )
    memory = SealedMemory.create(layout.regions[0].size_bytes)
    registered, proved = [], []
    for _ in range(rounds):
        time.sleep(FILL_S)
        connection = client.connect(daemon.worker_socket)
        began = time.perf_counter()
        rank = connection.register(engine=spec, layout=layout, regions={RegionId("kv"): memory})
        registered.append(time.perf_counter() - began)
        proved.append(wait_until_probed(daemon.control, began))
        rank.close()
    return registered, proved


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--mebibytes", type=int, default=64)
    options = parser.parse_args()
    with ExitStack() as stack:
        daemon = start_daemon(stack, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        results = measure(daemon, options.rounds, options.mebibytes)
    for what, values in zip(("register returns", "proved"), results, strict=True):
        ms = [value * 1e3 for value in values]
        print(f"{what} after: {statistics.median(ms):.2f} ms median, {min(ms):.2f} to {max(ms):.2f}")


if __name__ == "__main__":
    main()
