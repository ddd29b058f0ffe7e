"""What a pull costs two daemons that also watch themselves; several checkouts in turn.

    python benchmarks/observability.py OLD NEW

Each checkout gets two daemons and a rank each for the whole run, with a log of each pull. They take turns,
forwards and backwards, with a batch of pulls at a given rate. It prints the daemons' processor time without
pulls and for each pull beyond that, the share of a core that both are at 500 pulls a second, what a scrape of
/metrics takes, and how much memory of their own they have at the end. Least of all batches: other load on the
machine only adds. The median of the differences batch by batch is beside it.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from checkout_process import CheckoutProcess

NODES = ("source", "sink")
PULLS_PER_S = 500
NUM_BLOCKS = 4
MAX_IN_FLIGHT = 32
SCRAPES = 5
IDLE_S = 2.0


def processor_s(pid: int) -> float:
    """Return the processor time of all threads of a process, in seconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def private_bytes(pid: int) -> int:
    """Return the memory that is the process's own: neither files nor shared."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def scrape(control: Path) -> int:
    """Scrape a daemon; return how many bytes it replied."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(control))
        connection.sendall(b"GET /metrics HTTP/1.0\r\nHost: kvxferd\r\n\r\n")
        return sum(map(len, iter(lambda: connection.recv(1 << 16), b"")))


class Pair:
    """Two daemons of one checkout, and a rank of each."""

    def __init__(self, stack: ExitStack) -> None:
        import latency  # this one's, over the checkout's kvxferd
        import numpy as np

        from kvxferd import client
        from kvxferd.tooling.daemon_process import DaemonProcess

        self._client = client
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._controls, self._pids, ranks = {}, {}, {}
        for name in NODES:
            daemon = DaemonProcess(directory / name)  # it logs each pull, for machines
            stack.callback(daemon.stop)
            daemon.wait_ready()
            self._pids[name], worker = daemon.pid, daemon.worker_socket
            self._controls[name] = directory / name / "control.sock"
            ranks[name] = latency.register_rank(stack, worker, name, NUM_BLOCKS)
        self._source, self._sink = ranks["source"], ranks["sink"]
        self._blocks = {"full": client.BlockList(ids=np.arange(NUM_BLOCKS, dtype=np.int32).data)}
        self._number = 0

    def pull(self, count: int, rate: float) -> float:
        """Pull `count` transfers at that rate; return the seconds that it took."""
        began, open_pulls, num_ended = time.monotonic(), 0, 0
        num_begun = 0
        while num_ended < count:
            if num_begun < count and open_pulls < MAX_IN_FLIGHT:
                due_s = began + num_begun / rate - time.monotonic()
                if due_s <= 0:
                    self._begin()
                    num_begun, open_pulls = num_begun + 1, open_pulls + 1
                    continue
            else:
                due_s = 30.0
            select.select([self._sink.fileno()], [], [], max(0.0, due_s))
            for event in self._sink.poll():
                assert isinstance(event, self._client.Delivered), event
                num_ended, open_pulls = num_ended + 1, open_pulls - 1
            self._source.poll()
        return time.monotonic() - began

    def _begin(self) -> None:
        self._number += 1
        num_tokens = NUM_BLOCKS * 16
        ref = self._source.publish(f"cmpl-{self._number:032x}", self._blocks, num_tokens)
        self._sink.pull(ref, self._blocks, num_tokens, deadline_s=60)

    def batch(self, count: int, rate: float) -> dict[str, Any]:
        """Measure one batch."""
        idle = {name: processor_s(pid) for name, pid in self._pids.items()}
        time.sleep(IDLE_S)
        before = {name: processor_s(pid) for name, pid in self._pids.items()}
        idle_share = {name: (before[name] - idle[name]) / IDLE_S for name in NODES}
        took_s = self.pull(count, rate)
        time.sleep(0.2)  # for acknowledgements that are under way
        pulled = {name: processor_s(pid) for name, pid in self._pids.items()}
        for _ in range(SCRAPES):
            num_bytes = scrape(self._controls["sink"])
            time.sleep(0.6)  # a reply may be half a second old
        scraped_s = processor_s(self._pids["sink"])
        return {
            "idle": {name: 100 * idle_share[name] for name in NODES},
            "us": {
                name: 1e6 * (pulled[name] - before[name] - idle_share[name] * took_s) / count
                for name in NODES
            },
            "rate": count / took_s,
            "scrape_ms": 1e3 * (scraped_s - pulled["sink"]) / SCRAPES,
            "scrape_bytes": num_bytes,
            "private": {name: private_bytes(pid) for name, pid in self._pids.items()},
        }


def serve_batches(checkout: Path, count: int, rate: float) -> None:
    """Run as one checkout's process: set up, then measure a batch for each line on standard input."""
    sys.path.insert(0, str(checkout))
    with ExitStack() as stack:
        pair = Pair(stack)
        pair.pull(2000, 1e9)  # fills what remembers the last pulls
        print("ready", flush=True)
        for _ in sys.stdin:
            print(json.dumps(pair.batch(count, rate)), flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pulls", type=int, default=1000, help="pulls of a batch")
    parser.add_argument("--rate", type=float, default=PULLS_PER_S, help="pulls a second")
    parser.add_argument("--be", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be is not None:
        serve_batches(options.be, options.pulls, options.rate)
        return
    if not options.checkouts:
        parser.error("name two checkouts or more")
    more = ["--pulls", str(options.pulls), "--rate", str(options.rate)]
    with ExitStack() as stack:
        checkouts = [
            CheckoutProcess(stack, Path(__file__), path.resolve(), more) for path in options.checkouts
        ]
        for checkout in checkouts:
            checkout.read_line()
        batches: dict[Path, list[Any]] = {checkout.path: [] for checkout in checkouts}
        for number in range(options.rounds):
            for checkout in checkouts if number % 2 == 0 else reversed(checkouts):
                batches[checkout.path].append(checkout.measure_batch())
    first = batches[checkouts[0].path]
    for path, measured in batches.items():
        print(f"{path}: {statistics.median(one['rate'] for one in measured):.0f} pulls a second reached")
        for name in NODES:
            print(f"  {name}")
            for what, unit, scale in (
                ("us", "us a pull", PULLS_PER_S / 1e4),
                ("idle", "% of a core idle", 1.0),
            ):
                mine, theirs = ([one[what][name] for one in each] for each in (measured, first))
                paired = statistics.median(m - t for m, t in zip(mine, theirs, strict=True))
                least = min(mine) - min(theirs)
                print(
                    f"    least {min(mine):.2f}, median {statistics.median(mine):.2f} {unit}; "
                    f"{scale * least:+.2f} % of a core by the least, {scale * paired:+.2f} % paired"
                )
            private, before = (each[-1]["private"][name] / 1e6 for each in (measured, first))
            print(f"    private {private:.1f} MB, {private - before:+.1f} MB")
        scrape_ms = statistics.median(one["scrape_ms"] for one in measured)
        print(f"  a scrape, with the half second: {scrape_ms:.1f} ms, {measured[-1]['scrape_bytes']} bytes")


if __name__ == "__main__":
    main()
