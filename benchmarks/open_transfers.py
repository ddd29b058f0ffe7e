"""What observers cost a daemon with thousands of open transfers.

    python benchmarks/open_transfers.py [--transfers 5000] [--parallel 100]

One daemon, two engines of one rank, and so many transfers that nobody reads. Each path is requested alone,
then `--parallel` times at once; beside that stands the longest wait of `/healthz`, which another connection
requests all the while. Root's requests, and those of the daemon's own user, are never answered from the
cache that all others share.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import latency
import numpy as np

from kvxferd import client

PATHS = ("/metrics", "/v1/status", "/v1/transfers", "/v1/history", "/v1/samples", "/readyz")
ROUNDS = 10
NUM_BLOCKS = 4


def get(control: Path, path: str) -> tuple[float, int]:
    """Request a path; return the seconds it took, and the bytes of the response."""
    began = time.monotonic()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(60)
        connection.connect(str(control))
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: kvxferd\r\n\r\n".encode())
        size = sum(map(len, iter(lambda: connection.recv(1 << 16), b"")))
    return time.monotonic() - began, size


def get_or_refused(control: Path, path: str) -> float | None:
    """Request a path; return the seconds, or None where the connection was one too many."""
    try:
        return get(control, path)[0]
    except ConnectionError:
        return None


class LoopWatch:
    """Requests `/healthz` all the while, and keeps the longest wait."""

    def __init__(self, control: Path) -> None:
        self._control = control
        self._is_over = threading.Event()
        self.waits: list[float] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> LoopWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            if (took_s := get_or_refused(self._control, "/healthz")) is not None:
                self.waits.append(took_s)


def publish(stack: ExitStack, worker: str, num_transfers: int) -> None:
    """Publish so many transfers by two engines, whose leases outlast the benchmark."""
    blocks = {"full": client.BlockList(ids=np.arange(NUM_BLOCKS, dtype=np.int32).data)}
    for name in ("one", "other"):
        rank = latency.register_rank(stack, worker, name, NUM_BLOCKS)
        for number in range(num_transfers // 2):
            rank.publish(f"{name}-{number:032x}", blocks, NUM_BLOCKS * 16, lease_s=600)
            if number % 64 == 0:
                time.sleep(0.02)  # the daemon reads a session's requests in turns
                rank.poll()


def main() -> None:
    """Publish, request, and print a row for each path."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--transfers", type=int, default=5000)
    parser.add_argument("--parallel", type=int, default=100)
    wanted = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        worker = latency.start_daemon(stack, directory / "node").worker_socket
        control = directory / "node" / "control.sock"
        publish(stack, worker, wanted.transfers)
        time.sleep(2.0)
        with LoopWatch(control) as quiet:
            time.sleep(2.0)
        print(f"{wanted.transfers} open transfers; /healthz alone: longest {max(quiet.waits) * 1e3:.1f} ms")
        for path in PATHS:
            with LoopWatch(control) as alone:
                times = [get(control, path) for _ in range(ROUNDS)]
            with LoopWatch(control) as crowded, ThreadPoolExecutor(wanted.parallel) as pool:
                many = list(pool.map(lambda p: get_or_refused(control, p), [path] * wanted.parallel))
            served = [took for took in many if took is not None]
            crowd = f"{len(served)} of {wanted.parallel} at once: {max(served) * 1e3:.0f} ms"
            print(
                f"{path:14} {statistics.median(t for t, _ in times) * 1e3:7.1f} ms, {times[-1][1]:8} bytes; "
                f"/healthz waits {max(alone.waits) * 1e3:.1f} ms at most; {crowd}, "
                f"/healthz {max(crowded.waits) * 1e3:.1f} ms"
            )


if __name__ == "__main__":
    main()
