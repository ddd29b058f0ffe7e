"""The handover of a transfer that is read while it is written, beside a pull after its end.

    python benchmarks/progressive.py [--chunks 8] [--mib 64] [--rounds 7] [--transport cma|tcp]

Two daemons, a rank each, on this machine; different layouts. In turn: a pull of the whole, and a progressive
one while the source reports one chunk after another, with as much time between them as one takes to read.
The handover is the time from the last report (for the whole: from the call of `pull`) to Delivered. Every
round reads other content, and compares it. Prints medians in milliseconds, and their ratio.
"""

from __future__ import annotations

import argparse
import select
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from latency import start_daemon

from kvxferd import client
from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.memory import SealedMemory

BLOCK_TOKENS, LAYERS, HEADS, HEAD_DIM = 16, 8, 8, 128
BLOCK_BYTES = 2 * LAYERS * BLOCK_TOKENS * HEADS * HEAD_DIM * 2  # 512 KiB
TRANSPORTS = {"cma": {}, "tcp": {"UCX_TLS": "tcp"}}


class Engine:
    """A rank of this process, with as many blocks as a transfer has."""

    def __init__(self, stack: ExitStack, socket: str, name: str, order: str, num_blocks: int) -> None:
        spec = EngineSpec(name, "g", num_layers=LAYERS, num_kv_heads=HEADS)
        layout = attention_layout(
            spec=spec,
            num_kv_heads=HEADS,
            head_dim=HEAD_DIM,
            block_tokens=BLOCK_TOKENS,
            num_blocks=num_blocks,
            layout=order,
        )
        (region,) = layout.regions
        memory = stack.enter_context(SealedMemory.create(region.size_bytes, name))
        self.words = np.frombuffer(memory.buffer, dtype=np.uint64)
        self.words[:] = 0
        connection = stack.enter_context(client.connect(socket))
        self.rank = connection.register(engine=spec, layout=layout, regions={region.region: memory})

    def next_event(self) -> client.Event:
        """Wait on the descriptor, as an engine does."""
        while not (events := self.rank.poll()):
            select.select([self.rank.fileno()], [], [], 60)
        (event,) = events
        return event


class Pair:
    """A source and a sink, and the transfers between them."""

    def __init__(self, source: Engine, sink: Engine, num_chunks: int, blocks_of_chunk: int) -> None:
        self._source, self._sink = source, sink
        self._num_chunks, self._blocks_of_chunk = num_chunks, blocks_of_chunk
        self._num_blocks = num_chunks * blocks_of_chunk
        self._ids = np.arange(self._num_blocks, dtype=np.int32)
        self._number = 0
        self.extend_cpu_s: list[float] = []

    def _lists(self, first: int, last: int) -> dict[str, client.BlockList]:
        return {"full": client.BlockList(ids=self._ids[first:last])}

    def _begin(self) -> tuple[str, int]:
        self._number += 1
        self._source.words[:] = self._number  # of one value: the layouts differ in order alone
        return f"t{self._number}", self._num_blocks * BLOCK_TOKENS

    def _finish(self) -> float:
        """Wait for Delivered, compare every byte, and return when it came."""
        event = self._sink.next_event()
        delivered = time.perf_counter()
        assert isinstance(event, client.Delivered), event
        assert (self._sink.words == self._number).all(), "wrong bytes"
        assert isinstance(self._source.next_event(), client.Released)
        return delivered

    def pull_whole(self) -> float:
        """Return how long a pull of a transfer takes that is whole."""
        name, tokens = self._begin()
        ref = self._source.rank.publish(name, self._lists(0, self._num_blocks), tokens)
        began = time.perf_counter()
        self._sink.rank.pull(ref, self._lists(0, self._num_blocks), tokens, deadline_s=60)
        return self._finish() - began

    def pull_growing(self, pause_s: float) -> float:
        """Return the handover of a transfer whose chunks are reported `pause_s` apart."""
        name, tokens = self._begin()
        ref = self._source.rank.publish(name, self._lists(0, 0), tokens, ready_tokens=0)
        self._sink.rank.pull(ref, self._lists(0, self._num_blocks), tokens, deadline_s=60, progressive=True)
        ended: list[float] = []
        reports = threading.Thread(target=self._report, args=(name, pause_s, ended))
        reports.start()
        delivered = self._finish()
        reports.join()
        return delivered - ended[0]

    def _report(self, name: str, pause_s: float, ended: list[float]) -> None:
        for chunk in range(1, self._num_chunks + 1):
            time.sleep(pause_s)
            first, last = (chunk - 1) * self._blocks_of_chunk, chunk * self._blocks_of_chunk
            began_cpu = time.thread_time()
            is_last = chunk == self._num_chunks
            ended[:] = [time.perf_counter()]
            self._source.rank.extend(name, None if is_last else last * BLOCK_TOKENS, self._lists(first, last))
            self.extend_cpu_s.append(time.thread_time() - began_cpu)


def main() -> None:
    """Measure both, in turn."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--chunks", type=int, default=8)
    arguments.add_argument("--mib", type=int, default=64, help="of a chunk")
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--transport", choices=TRANSPORTS, default="cma")
    given = arguments.parse_args()
    blocks_of_chunk = (given.mib << 20) // BLOCK_BYTES
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = TRANSPORTS[given.transport]
        sockets = [start_daemon(stack, directory / name, environment) for name in ("p", "d")]
        blocks = given.chunks * blocks_of_chunk
        source = Engine(stack, sockets[0], "prefill", "HND", blocks)
        sink = Engine(stack, sockets[1], "decode", "NHD", blocks)
        pair = Pair(source, sink, given.chunks, blocks_of_chunk)
        pair.pull_whole()  # connects, and maps every page
        whole, growing = [], []
        for _ in range(given.rounds):
            whole.append(pair.pull_whole())
            growing.append(pair.pull_growing(statistics.median(whole) / given.chunks))
    plain, handover = statistics.median(whole), statistics.median(growing)
    print(f"{given.chunks} chunks of {given.mib} MiB over {given.transport}, {given.rounds} rounds")
    print(f"pull of the whole {1e3 * plain:9.1f} ms")
    print(f"handover          {1e3 * handover:9.1f} ms, ratio {handover / plain:.2f}")
    cpu_us = 1e6 * statistics.median(pair.extend_cpu_s)
    print(f"processor time of a call of extend {cpu_us:.0f} us")


if __name__ == "__main__":
    main()
