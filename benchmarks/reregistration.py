"""How long after a daemon was killed and started again its engines are back, without help.

This process holds two engines of one rank each; the daemon is killed and started again several times.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from latency import register_rank, start_daemon

from kvxferd.errors import KvxferdError
from kvxferd.tooling.control_client import ControlClient


def wait_for_engines(control: ControlClient, num_engines: int, limit_s: float = 30.0) -> tuple[float, float]:
    """Return when the daemon first responded, and when `num_engines` engines were complete."""
    replied = None
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        with suppress(KvxferdError):
            engines = control.get("/v1/status")["node"]["engines"]
            replied = replied or time.monotonic()
            if sum(engine["complete"] for engine in engines) == num_engines:
                return replied, time.monotonic()
        time.sleep(0.005)
    raise TimeoutError(f"{num_engines} engines are not back after {limit_s} s")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        daemon = start_daemon(stack, directory)
        for name in ("prefill", "decode"):
            register_rank(stack, daemon.worker_socket, name, num_blocks=64)
        from_start, from_reply = [], []
        for _ in range(options.rounds):
            daemon.kill()
            daemon.start()
            began = time.monotonic()
            replied, back = wait_for_engines(daemon.control, 2)
            from_start.append(back - began)
            from_reply.append(back - replied)
    for what, values in (("its start", from_start), ("its first answer", from_reply)):
        spread = f"{min(values):.2f} to {max(values):.2f}"
        print(f"both engines registered again after {what}: {statistics.median(values):.2f} s ({spread})")


if __name__ == "__main__":
    main()
