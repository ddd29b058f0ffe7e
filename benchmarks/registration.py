"""How long a registration takes with a warm mover, and how soon engines are back after a daemon's death.

    python benchmarks/registration.py [--rounds 9]

First one rank at a time is registered and closed again; in between the mover pool refills. Then two engines
of one rank are registered, and their daemon is killed and started again several times, without help.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvxferd.errors import KvxferdError
from kvxferd.ids import Rank
from kvxferd.layout.presets import deploy
from kvxferd.tooling.daemon_process import DaemonProcess
from kvxferd.tooling.engine_process import EngineRank

FILL_S = 0.6  # the pool waits 0.25 s before it makes another mover
LIMIT_S = 30.0
NUM_BLOCKS = 16  # 36 MiB


def register(daemon: DaemonProcess, name: str) -> tuple[EngineRank, float]:
    """Register an engine of one rank; return it, and the seconds with the connection."""
    rank = EngineRank()
    spec, layout = deploy("qwen3-8b", num_blocks=NUM_BLOCKS, engine_id=name)[Rank(0, 0)]
    return rank, rank.register(daemon.worker_socket, spec, layout)


def engines_when(daemon: DaemonProcess, condition: Callable[[list[Any]], bool]) -> tuple[float, float]:
    """Return when the daemon first responded, and when its engines fulfilled a condition."""
    replied, until = 0.0, time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        with suppress(KvxferdError):
            engines = daemon.control.get("/v1/engines")["engines"]
            replied = replied or time.monotonic()
            if condition(engines):
                return replied, time.monotonic()
        time.sleep(0.001)
    raise TimeoutError(f"the engines are not as they should be after {LIMIT_S} s")


def show(what: str, seconds: list[float]) -> None:
    """Print a median and its range."""
    ms = [1e3 * value for value in seconds]
    print(f"{what}: {statistics.median(ms):.2f} ms median, {min(ms):.2f} to {max(ms):.2f}")


def measure(daemon: DaemonProcess, rounds: int) -> None:
    """Measure and print."""
    registered, proved = [], []
    for number in range(rounds):
        time.sleep(FILL_S)
        began = time.monotonic()
        rank, seconds = register(daemon, f"e{number}")
        registered.append(seconds)
        _, at = engines_when(daemon, lambda engines: engines[0]["ranks"][0]["placement"]["proved"])
        proved.append(at - began)
        rank.close()
    show("register returns after", registered)
    show("its memory is probed after", proved)
    ranks = [register(daemon, name)[0] for name in ("prefill", "decode")]
    from_start, from_reply = [], []
    for _ in range(rounds):
        daemon.kill()
        daemon.start()
        began = time.monotonic()
        replied, back = engines_when(daemon, lambda engines: sum(one["complete"] for one in engines) == 2)
        from_start.append(back - began)
        from_reply.append(back - replied)
    show("both engines registered again after the daemon's start", from_start)
    show("after its first reply", from_reply)
    for rank in ranks:
        rank.close()


def main() -> None:
    """Start a daemon, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        daemon = DaemonProcess(Path(directory) / "node", ("--log-level", "warning"))
        try:
            daemon.wait_ready()
            time.sleep(2.0)
            measure(daemon, options.rounds)
        finally:
            daemon.stop()


if __name__ == "__main__":
    main()
