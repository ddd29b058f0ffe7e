"""Several checkouts in turn: what does a change cost, or save?

    python benchmarks/compare.py OLD NEW [NEWER ...] [--only pull register] [--rounds 10]

Each checkout gets two daemons and a rank of each for the whole run. They take turns, forwards and backwards,
with a batch of each case: two runs one after the other differ more than two commits do. Of each figure it
prints the least and the median of all batches, and the median of the batches' ratios to the first checkout.
Processor time is that of all threads of a daemon: other load on the machine only adds to it, so the least
says most.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxferd.tooling.content import RequestBlocks
    from kvxferd.tooling.daemon_process import DaemonProcess
    from kvxferd.tooling.engine_pair import Role
    from kvxferd.tooling.engine_process import EngineRank

Figures = dict[str, float]  # of a batch, by name with its unit; less is better

PREFILL: Role = "prefill"
DECODE: Role = "decode"
NUM_BLOCKS = 4  # of a pull, 8 KiB each
PULLS, PAUSE_S = 40, 0.002  # longer than a delay by the scheduler, shorter than the load of another tenant
BUSY_PULLS, PULLS_PER_S, MAX_IN_FLIGHT = 500, 500, 32
EXTENDED, EXTEND_PAUSE_S = 20, 0.005
PUBLISHES, REGISTRATIONS, PEER_REQUESTS = 400, 6, 500
IDLE_S, SCRAPES = 2.0, 5


class Engines:
    """Two daemons of one checkout, and an engine of one rank at each."""

    def __init__(self, stack: ExitStack) -> None:
        # In the process of one checkout these are its own.
        import msgspec

        from kvxferd.ids import Rank
        from kvxferd.layout.presets import LayerKind, ModelFacts, key_and_value
        from kvxferd.tooling.content import RequestBlocks
        from kvxferd.tooling.daemon_process import DaemonProcess
        from kvxferd.tooling.engine_pair import EnginePair, EngineShape
        from kvxferd.tooling.engine_process import EngineRank

        model = ModelFacts("small", 2, (LayerKind.FULL,), key_and_value(2, 128))
        shape = EngineShape(1, 1, 16, "HND")
        self.pair = EnginePair(model, shape, shape, 16 * NUM_BLOCKS, "compared")
        self.directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.daemons: dict[Role, DaemonProcess] = {}
        self.ranks: dict[Role, EngineRank] = {}
        self.requests: dict[Role, RequestBlocks] = {}
        self._names = iter(range(1 << 30))
        for role in (PREFILL, DECODE):
            self.daemons[role] = DaemonProcess(self.directory / role)  # it logs each pull, for machines
            stack.callback(self.daemons[role].stop)
            self.daemons[role].wait_ready()
            self.ranks[role] = EngineRank()
            stack.callback(self.ranks[role].close)
            spec, layout = self.pair.engine(role)[Rank(0, 0)]
            spec = msgspec.structs.replace(spec, publish_implies_ready=True)
            self.ranks[role].register(self.daemons[role].worker_socket, spec, layout)
            self.requests[role] = RequestBlocks(0, self.pair.block_ids(role, 0), self.pair.num_tokens)
        self.peer = Peer(stack, self)

    def publish(self) -> Any:
        """Publish one transfer; return its reference."""
        name = f"t{next(self._names)}"
        return self.ranks[PREFILL].publish(name, self.requests[PREFILL], lease_s=600.0)

    def pull(self, ref: Any) -> tuple[float, float]:
        """Pull one and wait as an engine does; return the seconds inside `pull`, and until it has ended."""
        blocks = self.ranks[DECODE].block_lists(self.requests[DECODE])
        began = time.perf_counter()
        self.ranks[DECODE].rank.pull(ref, blocks, self.pair.num_tokens, deadline_s=30)
        returned = time.perf_counter()
        self.wait_delivered()
        return returned - began, time.perf_counter() - began

    def wait_delivered(self) -> None:
        """Wait until one pull has ended, and raise if it failed."""
        event = self.ranks[DECODE].events.next_event(time.monotonic() + 60)
        assert type(event).__name__ == "Delivered", event

    def processor_us(self, role: Role) -> float:
        """Return the processor time of a daemon, in microseconds."""
        return processor_us(self.daemons[role].pid)


def processor_us(pid: int) -> float:
    """Return the processor time of all threads of a process, in microseconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e3


class Peer:
    """Sends requests to the prefill daemon as another daemon would."""

    def __init__(self, stack: ExitStack, engines: Engines) -> None:
        import zmq

        from kvxferd.ids import BootId, Endpoint, EngineId, Generation
        from kvxferd.wire import peer
        from kvxferd.wire.codec import PEER_MESSAGES, encode

        self._peer: Any = peer
        self._encode, self._decode = encode, PEER_MESSAGES.decode
        self._engines = engines
        self._ref = engines.publish()
        context = stack.enter_context(zmq.Context())
        self._dealer = stack.enter_context(context.socket(zmq.DEALER))
        self._dealer.linger = 0
        self._dealer.connect(self._ref.endpoint)
        self._numbers = iter(range(3, 1 << 30))
        self._exchange(
            peer.PeerHello(
                request=1,
                versions=peer.PEER_VERSIONS,
                boot=BootId("b"),
                endpoint=Endpoint("tcp://127.0.0.1:1"),
            )
        )
        engine, generation = self._ref.engine_id, self._ref.generation
        fetch = peer.ManifestRequest(request=2, engine_id=engine, generation=generation, wait_s=5.0)
        (manifest,) = self._exchange(fetch).ranks
        self._reads = ((manifest.spec.rank, manifest.binding.agent),)
        self._consumer = peer.Consumer(EngineId("other"), Generation("g"), manifest.spec.rank, 1)

    def _exchange(self, request: Any) -> Any:
        self._dealer.send(self._encode(request))
        return self._decode(self._dealer.recv())

    def renewals(self) -> Iterator[Any]:
        """Yield requests that cost the core next to nothing, so that the cost is the way to it and back."""
        for number in (next(self._numbers) for _ in range(PEER_REQUESTS)):
            yield self._peer.RenewGrants(request=number, grants=(f"g{number}",))

    def grants(self) -> Iterator[Any]:
        """Yield requests for grants, and their releases."""
        for _ in range(PEER_REQUESTS // 2):
            number = next(self._numbers)
            yield self._peer.GrantRequest(
                request=number,
                grant=f"g{number}",
                ref=self._ref,
                consumer=self._consumer,
                reads=self._reads,
                wait_s=5.0,
            )
            yield self._peer.ReleaseGrant(request=next(self._numbers), grant=f"g{number}")

    def cost_us(self, requests: Iterator[Any], window: int) -> float:
        """Send all requests, `window` at a time; return the daemon's processor time of one."""
        payloads = [self._encode(request) for request in requests]
        replies = []
        before = self._engines.processor_us(PREFILL)
        for number, payload in enumerate(payloads):
            if number >= window:
                replies.append(self._dealer.recv())
            self._dealer.send(payload)
        while len(replies) < len(payloads):
            replies.append(self._dealer.recv())
        spent = self._engines.processor_us(PREFILL) - before
        refused = [reply for reply in map(self._decode, replies) if isinstance(reply, self._peer.PeerRefused)]
        assert not refused, refused[0]
        return spent / len(payloads)


def small_pulls(engines: Engines) -> Figures:
    """Pull prepared transfers, one at a time."""
    refs = [engines.publish() for _ in range(PULLS)]
    for ref in refs:
        engines.ranks[DECODE].prepare(ref)
    time.sleep(0.3)  # no event reports that a prepare is done
    before, spans = engines.processor_us(DECODE), []
    for ref in refs:
        spans.append(engines.pull(ref))
        time.sleep(PAUSE_S)
    spent = engines.processor_us(DECODE) - before
    called, delivered = (sorted(1e6 * span for span in column) for column in zip(*spans, strict=True))
    return {
        "pull() to Delivered, p50, us": statistics.median(delivered),
        "pull() to Delivered, p90, us": delivered[PULLS * 9 // 10],
        "inside pull(), p50, us": statistics.median(called),
        "decode daemon, us of processor": spent / PULLS,
    }


def busy_pulls(engines: Engines) -> Figures:
    """Pull at a rate, as an engine under load, after a while of rest; then scrape, and look at memory."""
    blocks = engines.ranks[DECODE].block_lists(engines.requests[DECODE])
    at_rest = {role: engines.processor_us(role) for role in engines.daemons}
    time.sleep(IDLE_S)
    before = {role: engines.processor_us(role) for role in engines.daemons}
    began, num_ended = time.monotonic(), 0
    for number in range(BUSY_PULLS):
        if number - num_ended >= MAX_IN_FLIGHT:
            engines.wait_delivered()
            num_ended += 1
        time.sleep(max(0.0, began + number / PULLS_PER_S - time.monotonic()))
        ref = engines.publish()
        engines.ranks[DECODE].rank.pull(ref, blocks, engines.pair.num_tokens, deadline_s=60)
    for _ in range(num_ended, BUSY_PULLS):
        engines.wait_delivered()
    took_s = time.monotonic() - began
    time.sleep(0.2)  # for acknowledgements that are under way
    figures = {"a pull took, us": 1e6 * took_s / BUSY_PULLS}
    for role in engines.daemons:
        idle = (before[role] - at_rest[role]) / IDLE_S  # us a second
        spent = engines.processor_us(role) - before[role] - idle * took_s
        figures[f"{role} daemon, us of processor a pull"] = spent / BUSY_PULLS
        figures[f"{role} daemon at rest, us a second"] = idle
        status = Path(f"/proc/{engines.daemons[role].pid}/status").read_text().splitlines()
        private = next(int(line.split()[1]) for line in status if line.startswith("RssAnon:"))
        figures[f"{role} daemon, private KiB"] = private
    before_s = engines.processor_us(DECODE)
    for _ in range(SCRAPES):
        engines.daemons[DECODE].control.read("/metrics")
        time.sleep(0.6)  # a reply may be half a second old
    figures["a scrape, with that time, us of processor"] = (engines.processor_us(DECODE) - before_s) / SCRAPES
    return figures


def publishes(engines: Engines) -> Figures:
    """Publish and unpublish."""
    before = engines.processor_us(PREFILL)
    refs = [engines.publish() for _ in range(PUBLISHES)]
    for ref in refs:
        engines.ranks[PREFILL].unpublish(ref)
    engines.ranks[PREFILL].await_release([ref.transfer_id for ref in refs])
    return {"a publish and its release, us": (engines.processor_us(PREFILL) - before) / PUBLISHES}


# The least that a daemon does with what a rank sends: its loop wakes and reads.
RECEIVER = """
import asyncio, socket, sys, uvloop
sock, loop = socket.socket(fileno=int(sys.argv[1])), uvloop.new_event_loop()
loop.add_reader(sock, sock.recv, 4096)
print(flush=True)
loop.run_forever()
"""


def extends(engines: Engines) -> Figures:
    """Report a chunk of one block as ready, 5 ms apart, beside two processes that only send and receive."""
    from kvxferd.client import BlockList

    rank, called, spent_us, floor = engines.ranks[PREFILL].rank, [], 0.0, []
    ids, num_chunks = engines.requests[PREFILL].ids, EXTENDED * NUM_BLOCKS
    for _ in range(EXTENDED):
        name = secrets.token_hex(8)
        ref = rank.publish(name, {}, engines.pair.num_tokens, ready_tokens=0)
        time.sleep(EXTEND_PAUSE_S)
        spent_us -= engines.processor_us(PREFILL)
        for number in range(NUM_BLOCKS):
            time.sleep(EXTEND_PAUSE_S)
            tokens = engines.pair.num_tokens * (number + 1) // NUM_BLOCKS
            began = time.thread_time()
            rank.ready(name, tokens, {group: BlockList(ids=[int(of[number])]) for group, of in ids.items()})
            called.append(1e6 * (time.thread_time() - began))
        time.sleep(EXTEND_PAUSE_S)
        spent_us += engines.processor_us(PREFILL)
        rank.unpublish(ref)
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", RECEIVER, str(theirs.fileno())]
    with ours, theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        before = processor_us(other.pid)
        for _ in range(num_chunks):
            time.sleep(EXTEND_PAUSE_S)
            began = time.thread_time()
            ours.send(b"x" * 100)
            floor.append(1e6 * (time.thread_time() - began))
        time.sleep(EXTEND_PAUSE_S)
        received = (processor_us(other.pid) - before) / num_chunks
        other.kill()
    return {
        "ready() of a block, p50, us of processor": statistics.median(called),
        "prefill daemon, of such a report, us": spent_us / num_chunks,
        "a send alone, p50, us of processor": statistics.median(floor),
        "a loop that only receives it, us of processor": received,
    }


def registrations(engines: Engines) -> Figures:
    """Register a rank of 80 layers."""
    from kvxferd.ids import Rank
    from kvxferd.layout.presets import deploy
    from kvxferd.tooling.engine_process import EngineRank

    ranks = deploy("llama-3-70b", tp=8, num_blocks=4, engine_id="large")
    before = engines.processor_us(PREFILL)
    for _ in range(REGISTRATIONS):
        rank = EngineRank()
        rank.register(engines.daemons[PREFILL].worker_socket, *ranks[Rank(0, 0)])
        rank.close()
    return {"a registration and its end, us": (engines.processor_us(PREFILL) - before) / REGISTRATIONS}


def peer_requests(engines: Engines) -> Figures:
    """Have another daemon renew, and request and return grants, one at a time and many at once."""
    peer = engines.peer
    return {
        f"{what}, {window} in flight, us": peer.cost_us(requests(), window)
        for what, requests in (("renew", peer.renewals), ("grant and return", peer.grants))
        for window in (1, 64)
    }


CASES: dict[str, Callable[[Engines], Figures]] = {
    "pull": small_pulls,
    "busy": busy_pulls,
    "publish": publishes,
    "extend": extends,
    "register": registrations,
    "peer": peer_requests,
}


class Checkout:
    """A process that runs one checkout's code, and measures a batch of each case when it is told to."""

    def __init__(self, stack: ExitStack, path: Path, cases: list[str]) -> None:
        self.path = path
        self.batches: list[Figures] = []
        process = subprocess.Popen(
            [sys.executable, __file__, "--be", str(path), "--only", *cases],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(path)},
            cwd=path,
        )
        stack.callback(process.wait)
        assert process.stdin is not None
        assert process.stdout is not None
        stack.callback(process.stdin.close)
        self._stdin: IO[str] = process.stdin
        self._stdout: IO[str] = process.stdout

    def wait_ready(self) -> None:
        """Wait until it is ready. Raises RuntimeError if the process has ended."""
        if not self._stdout.readline():
            raise RuntimeError(f"{self.path} cannot be measured: see above")

    def measure(self) -> None:
        """Have it measure one batch of each case. Raises RuntimeError if the process ends."""
        self._stdin.write("go\n")
        self._stdin.flush()
        if not (line := self._stdout.readline()):
            raise RuntimeError(f"{self.path} cannot be measured: see above")
        self.batches.append(json.loads(line))


def serve_batches(checkout: Path, cases: list[str]) -> None:
    """Run as one checkout's process: measure a batch of each case for each line on standard input."""
    sys.path.insert(0, str(checkout))
    with ExitStack() as stack:
        engines = Engines(stack)
        for name in cases:  # connections are made, tables are filled
            CASES[name](engines)
        print("ready", flush=True)
        for _ in sys.stdin:
            figures = [CASES[name](engines) for name in cases]
            print(json.dumps({name: value for one in figures for name, value in one.items()}), flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--be", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be is not None:
        serve_batches(options.be, options.only)
        return
    if not options.checkouts:
        parser.error("name two checkouts or more")
    with ExitStack() as stack:
        checkouts = [Checkout(stack, path.resolve(), options.only) for path in options.checkouts]
        for checkout in checkouts:
            checkout.wait_ready()
        for number in range(options.rounds):
            for checkout in checkouts if number % 2 == 0 else reversed(checkouts):
                checkout.measure()
    first = checkouts[0]
    for name in first.batches[0]:
        print(name)
        for checkout in checkouts:
            values = [batch[name] for batch in checkout.batches]
            pairs = zip(values, (batch[name] for batch in first.batches), strict=True)
            paired = statistics.median(mine / max(theirs, 1e-9) for mine, theirs in pairs)
            least, median = min(values), statistics.median(values)
            print(f"  {checkout.path}: least {least:.0f}, median {median:.0f}, {paired:.2f} of the first")


if __name__ == "__main__":
    main()
