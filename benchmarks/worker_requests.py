"""What a worker's requests cost its daemon, in CPU time; several checkouts in turn.

    python benchmarks/worker_requests.py OLD NEW

It works as `peer_requests.py`, whose measure it uses: a publish and its release, a small pull between two
ranks of one daemon, and a registration of a rank of 80 layers.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from peer_requests import Cost, compare, processor_us

PUBLISHES, PULLS, REGISTRATIONS = 400, 60, 6


class Worker:
    """Two ranks of one checkout's daemon."""

    def __init__(self, stack: ExitStack) -> None:
        import latency  # this one's, over the checkout's kvxferd

        from kvxferd import client
        from kvxferd.layout import EngineSpec
        from kvxferd.layout.presets import attention_layout
        from kvxferd.memory import SealedMemory

        self._client = client
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "daemon"
        daemon = latency.start_daemon(stack, directory)
        self._socket, self._pid = daemon.worker_socket, daemon.pid
        self._source = latency.register_rank(stack, self._socket, "prefill", 4)
        self._measured = latency.PullTimer(
            self._source, latency.register_rank(stack, self._socket, "decode", 4), 4
        )
        self._number = 0
        self._spec = EngineSpec("large", "g", num_layers=80, num_kv_heads=2)
        self._layout = attention_layout(
            spec=self._spec, num_kv_heads=2, head_dim=128, block_tokens=16, num_blocks=4, layout="HND"
        )
        self._regions = {
            region.region: stack.enter_context(SealedMemory.create(region.size_bytes, "large"))
            for region in self._layout.regions
        }

    def _cost(self, count: int, act: Callable[[], None]) -> Cost:
        before, began = processor_us(self._pid), time.perf_counter()
        act()
        took_s = time.perf_counter() - began
        after = processor_us(self._pid)
        return Cost((after[0] - before[0]) / count, (after[1] - before[1]) / count, count / took_s)

    def _publish(self) -> None:
        blocks = self._measured.blocks()
        refs = []
        for _ in range(PUBLISHES):
            self._number += 1
            refs.append(self._source.publish(f"p{self._number}", blocks, 64))
        for ref in refs:
            self._source.unpublish(ref)
        released = 0
        while released < PUBLISHES:
            events = self._source.poll()
            released += sum(isinstance(event, self._client.Released) for event in events)
            if not events:
                time.sleep(0.001)

    def _register(self) -> None:
        for _ in range(REGISTRATIONS):
            with self._client.connect(self._socket) as connected:
                connected.register(engine=self._spec, layout=self._layout, regions=self._regions)

    def _pull(self, refs: list[Any]) -> None:
        for ref in refs:
            self._measured.pull(ref)

    def batches(self) -> dict[str, Cost]:
        """Measure one batch of each kind."""
        refs = self._measured.prepare(PULLS)
        pulls = self._cost(PULLS, lambda: self._pull(refs))
        self._source.poll()
        return {
            "publish and release": self._cost(PUBLISHES, self._publish),
            "small pull, prepared": pulls,
            "registration": self._cost(REGISTRATIONS, self._register),
        }


if __name__ == "__main__":
    compare(__doc__, Path(__file__), Worker)
