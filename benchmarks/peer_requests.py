"""What a peer's request costs the daemon that replies, in CPU time; several checkouts in turn.

    python benchmarks/peer_requests.py OLD NEW

Each checkout gets a daemon and a rank for the whole run. They take turns, forwards and backwards, a batch of
each kind of request. Compare the least of all batches: other load on the machine only adds to it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from checkout_process import CheckoutProcess

REQUESTS_PER_BATCH = 1000
WINDOWS = (1, 64)  # requests in flight


class Cost(NamedTuple):
    """One batch: microseconds of the loop's thread and of all threads per request, and replies per second."""

    loop_us: float
    all_us: float
    rate: float


def processor_us(pid: int) -> tuple[float, float]:
    """Return the CPU time of the process's first thread, and that of all its threads."""
    took = {
        task.name: int((task / "schedstat").read_text().split()[0])
        for task in Path(f"/proc/{pid}/task").iterdir()
    }
    return took[str(pid)] / 1000, sum(took.values()) / 1000


class Peer:
    """Sends requests to one checkout's daemon, with that checkout's messages."""

    def __init__(self, stack: ExitStack) -> None:
        import latency  # this one's, over the checkout's kvxferd
        import zmq

        from kvxferd.ids import BootId, Endpoint, EngineId, Generation
        from kvxferd.wire import peer
        from kvxferd.wire.codec import PEER_MESSAGES, encode

        self._peer: Any = peer  # the messages as this checkout calls them
        self._encode, self._decode = encode, PEER_MESSAGES.decode
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "daemon"
        daemon = latency.start_daemon(stack, directory)
        rank = latency.register_rank(stack, daemon.worker_socket, "prefill", 4)
        blocks = latency.PullTimer(rank, rank, 4).blocks()
        self._ref = rank.publish("t1", blocks, 64, lease_s=600.0)  # for the whole measurement
        self._pid = daemon.pid
        context = stack.enter_context(zmq.Context())
        self._dealer = stack.enter_context(context.socket(zmq.DEALER))
        self._dealer.linger = 0
        self._dealer.connect(self._ref.endpoint)
        self._number = 2
        hello = peer.PeerHello(
            request=1, versions=peer.PEER_VERSIONS, boot=BootId("b"), endpoint=Endpoint("tcp://127.0.0.1:1")
        )
        self.request(hello)
        engine, generation = self._ref.engine_id, self._ref.generation
        fetch = peer.ManifestRequest(request=2, engine_id=engine, generation=generation, wait_s=5.0)
        manifest = self.request(fetch).ranks[0]
        self._reads = ((manifest.spec.rank, manifest.binding.agent),)
        self._consumer = peer.Consumer(EngineId("decode"), Generation("g"), manifest.spec.rank, 1)

    def request(self, request: Any) -> Any:
        """Send one request; return its reply."""
        self._dealer.send(self._encode(request))
        return self._decode(self._dealer.recv())

    def renewals(self) -> list[Any]:
        """Return requests that cost the core next to nothing, so that the cost is the way to it and back."""
        self._number += REQUESTS_PER_BATCH
        numbers = range(self._number - REQUESTS_PER_BATCH, self._number)
        return [self._peer.RenewGrants(request=number, grants=(f"g{number}",)) for number in numbers]

    def grants(self) -> list[Any]:
        """Return requests for grants, and their releases."""
        requests: list[Any] = []
        for _ in range(REQUESTS_PER_BATCH // 2):
            self._number += 2
            number = self._number
            requests.append(
                self._peer.GrantRequest(
                    request=number,
                    grant=f"g{number}",
                    ref=self._ref,
                    consumer=self._consumer,
                    reads=self._reads,
                    wait_s=5.0,
                )
            )
            requests.append(self._peer.ReleaseGrant(request=number + 1, grant=f"g{number}"))
        return requests

    def cost(self, requests: Sequence[Any], window: int) -> Cost:
        """Send all requests, `window` at a time."""
        payloads = [self._encode(request) for request in requests]
        replies = []
        before, began = processor_us(self._pid), time.perf_counter()
        for number, payload in enumerate(payloads):
            if number >= window:
                replies.append(self._dealer.recv())
            self._dealer.send(payload)
        while len(replies) < len(payloads):
            replies.append(self._dealer.recv())
        took_s = time.perf_counter() - began
        after = processor_us(self._pid)
        refused = [reply for reply in map(self._decode, replies) if isinstance(reply, self._peer.PeerRefused)]
        assert not refused, refused[0]
        count = len(payloads)
        return Cost((after[0] - before[0]) / count, (after[1] - before[1]) / count, count / took_s)

    def batches(self) -> dict[str, Cost]:
        """Measure one batch of each kind."""
        kinds = {"renew": self.renewals, "grant and return": self.grants}
        return {
            f"{kind}, {window} in flight": self.cost(requests(), window)
            for kind, requests in kinds.items()
            for window in WINDOWS
        }


class BatchMeasure(Protocol):
    """A measurement of one checkout."""

    def batches(self) -> dict[str, Cost]:
        """Return the cost of one batch of each kind."""
        ...


def run_batches(checkout: Path, made: Callable[[ExitStack], BatchMeasure]) -> None:
    """Run as one checkout's process: set up, then measure a batch of each kind per line on standard input."""
    sys.path.insert(0, str(checkout))
    with ExitStack() as stack:
        measure = made(stack)
        measure.batches()
        print("ready", flush=True)
        for _ in sys.stdin:
            print(json.dumps(measure.batches()), flush=True)


class Checkout(CheckoutProcess):
    """A process that measures one checkout."""

    def __init__(self, stack: ExitStack, script: Path, path: Path) -> None:
        super().__init__(stack, script, path)
        self.measured: list[dict[str, Cost]] = []

    def measure(self) -> None:
        """Have it measure a batch of each kind."""
        self.measured.append({kind: Cost(*cost) for kind, cost in self.measure_batch().items()})


def show(kind: str, checkouts: Sequence[Checkout]) -> None:
    """Print what one kind of request costs in each checkout, and relative to the first."""
    print(kind)
    first = [costs[kind] for costs in checkouts[0].measured]
    for checkout in checkouts:
        costs = [measured[kind] for measured in checkout.measured]
        loop = min(cost.loop_us for cost in costs)
        everything = min(cost.all_us for cost in costs)
        by_first = everything / min(cost.all_us for cost in first)
        paired = statistics.median(a.all_us / b.all_us for a, b in zip(costs, first, strict=True))
        rate = max(cost.rate for cost in costs)
        print(f"  {checkout.path}: least {loop:.1f} us of the loop, {everything:.1f} of all threads")
        print(f"    {by_first:.2f} of the first, paired {paired:.2f}; at most {rate:.0f} a second")


def compare(text: str | None, script: Path, made: Callable[[ExitStack], BatchMeasure]) -> None:
    """Measure the named checkouts, and print."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--be", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be is not None:
        run_batches(options.be, made)
        return
    if not options.checkouts:
        parser.error("name a checkout or more")
    with ExitStack() as stack:
        checkouts = [Checkout(stack, script, path.resolve()) for path in options.checkouts]
        for checkout in checkouts:
            checkout.read_line()
        for number in range(options.rounds):
            for checkout in checkouts if number % 2 == 0 else reversed(checkouts):
                checkout.measure()
    for kind in checkouts[0].measured[0]:
        show(kind, checkouts)


if __name__ == "__main__":
    compare(__doc__, Path(__file__), Peer)
