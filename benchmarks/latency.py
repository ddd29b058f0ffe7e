"""How long a small prepared pull takes, and how long the engine's thread is in `pull`.

Two daemons, one rank each, all on this machine. `--fill N` gives each pull N block ids.
"""

from __future__ import annotations

import argparse
import os
import select
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from kvxferd import client
from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.memory import SealedMemory
from kvxferd.tooling.daemon_process import DaemonProcess


def start_daemon(stack: ExitStack, directory: Path) -> DaemonProcess:
    """Return a daemon that is ready."""
    daemon = DaemonProcess(directory, ("--log-level", "warning"))
    stack.callback(daemon.stop)
    daemon.wait_ready()
    return daemon


def register_rank(stack: ExitStack, socket: str, name: str, num_blocks: int) -> client.RankHandle:
    """Register a rank with blocks of 8 KiB for each layer and component."""
    spec = EngineSpec(name, "g", num_layers=1, num_kv_heads=2)
    layout = attention_layout(
        spec=spec, num_kv_heads=2, head_dim=128, block_tokens=16, num_blocks=num_blocks, layout="HND"
    )
    memory = stack.enter_context(SealedMemory.create(layout.regions[0].size_bytes, name))
    connected = stack.enter_context(client.connect(socket))
    return connected.register(engine=spec, layout=layout, regions={layout.regions[0].region: memory})


class PullTimer:
    """Pulls made one at a time, each prepared and published beforehand."""

    def __init__(self, source: client.RankHandle, sink: client.RankHandle, num_blocks: int) -> None:
        self._source, self._sink = source, sink
        self._ids = np.arange(num_blocks, dtype=np.int32)
        self._num_tokens = num_blocks * 16
        self._number = 0
        self.spans: list[tuple[float, float, float]] = []  # pull called, returned, delivered

    def blocks(self) -> dict[str, client.BlockList]:
        """Return the block list that is published and pulled."""
        return {"full": client.BlockList(ids=self._ids.data)}

    def prepare(self, count: int) -> list[client.TransferRef]:
        """Publish `count` transfers and prepare them."""
        refs = []
        for _ in range(count):
            self._number += 1
            ref = self._source.publish(f"t{self._number}", self.blocks(), self._num_tokens)
            self._sink.prepare(ref)
            refs.append(ref)
        time.sleep(0.3)  # no event reports that a prepare is done
        return refs

    def pull(self, ref: client.TransferRef) -> None:
        """Pull one and wait on the descriptor, as an engine does."""
        began = time.perf_counter()
        self._sink.pull(ref, self.blocks(), self._num_tokens, deadline_s=30)
        returned = time.perf_counter()
        while not (events := self._sink.poll()):
            select.select([self._sink.fileno()], [], [], 30)
        delivered = time.perf_counter()
        assert isinstance(events[0], client.Delivered), events
        self.spans.append((began, returned, delivered))


@contextmanager
def daemon_pair(fill: int) -> Iterator[tuple[client.RankHandle, PullTimer]]:
    """Give two daemons with a rank each, after some pulls: the source rank, and the timer of its sink."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        source = register_rank(stack, start_daemon(stack, directory / "p").worker_socket, "prefill", fill)
        sink = register_rank(stack, start_daemon(stack, directory / "d").worker_socket, "decode", fill)
        measured = PullTimer(source, sink, fill)
        for ref in measured.prepare(20):
            measured.pull(ref)
        measured.spans.clear()
        yield source, measured


def forward_packets(source: socket.socket, target: socket.socket) -> None:
    """Forward packets until the sender closes, as a process that does nothing else."""
    arrivals = select.poll()
    arrivals.register(source.fileno(), select.POLLIN)
    while arrivals.poll() and (packet := source.recv(1 << 16)):
        target.send(packet)


def measure_forwarding(count: int, pause_s: float, num_relays: int) -> list[float]:
    """Return how long packets take through `num_relays` processes that only forward them, and back."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(num_relays + 1)]
    children = []
    for number in range(num_relays):
        if not (child := os.fork()):
            for one, other in pairs:  # otherwise no process would see the end of the stream
                for end in (one, other):
                    if end not in (pairs[number][1], pairs[number + 1][0]):
                        end.close()
            forward_packets(pairs[number][1], pairs[number + 1][0])
            os._exit(0)
        children.append(child)
    out, back = pairs[0][0], pairs[-1][1]
    for one, other in pairs:
        for end in (one, other):
            if end not in (out, back):
                end.close()
    times = []
    for _ in range(count):
        began = time.perf_counter()
        out.send(bytes(300))
        select.select([back], [], [])
        back.recv(1 << 16)
        times.append(time.perf_counter() - began)
        time.sleep(pause_s)
    out.close()
    back.close()
    for child in children:
        os.waitpid(child, 0)
    return times


def print_times(name: str, values: list[float]) -> None:
    """Print the median and the tail, in microseconds."""
    ordered = sorted(1e6 * value for value in values)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    print(f"{name:44} p50 {statistics.median(ordered):8.1f}  p99 {p99:8.1f}  least {ordered[0]:8.1f} us")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pulls", type=int, default=500)
    parser.add_argument("--fill", type=int, default=4, help="block ids of each pull")
    parser.add_argument("--pause", type=float, default=0.002, help="seconds between two pulls")
    options = parser.parse_args()
    for pause_s in (0.0, options.pause):
        took = measure_forwarding(options.pulls, pause_s, num_relays=2)
        print_times(f"two processes that only pass it on, {1e3 * pause_s:g} ms apart", took)
    with daemon_pair(options.fill) as (source, measured):
        left = options.pulls
        while left:
            batch = min(left, 50)
            for ref in measured.prepare(batch):
                measured.pull(ref)
                time.sleep(options.pause)
            left -= batch
        source.poll()
        print_times("inside pull()", [returned - began for began, returned, _ in measured.spans])
        print_times("pull() to Delivered", [delivered - began for began, _, delivered in measured.spans])


if __name__ == "__main__":
    main()
