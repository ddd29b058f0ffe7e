"""A rank of 2 MiB that is a whole engine, and its one request, which takes every block.

`python lone_rank.py DIRECTORY` is a daemon with such a rank in one process, of a PID namespace say. It reads
references from standard input, one a line; pulls each, and prints a line of JSON: how the check of its bytes
went, and the daemon's status.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from kvxferd.ids import EngineId, Generation
from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.telemetry.warnings import MAX_AGE_S
from kvxferd.tooling.content import RequestBlocks
from kvxferd.tooling.daemon_process import DaemonProcess
from kvxferd.tooling.engine_process import EngineRank

NUM_BLOCKS, BLOCK_TOKENS = 16, 16
REQUEST = RequestBlocks(1, {"full": np.arange(NUM_BLOCKS, dtype=np.int32)}, NUM_BLOCKS * BLOCK_TOKENS)


def lone_rank(socket: str, name: str) -> EngineRank:
    """Register one."""
    spec = EngineSpec(EngineId(name), Generation("1"), num_layers=4, num_kv_heads=8)
    layout = attention_layout(
        spec=spec, num_kv_heads=8, head_dim=64, block_tokens=BLOCK_TOKENS, num_blocks=NUM_BLOCKS
    )
    rank = EngineRank()
    rank.register(socket, spec, layout)
    return rank


def publish(rank: EngineRank) -> str:
    """Write the request and publish it; return the reference as JSON."""
    rank.write(REQUEST)
    ref = rank.publish("r1", REQUEST)
    rank.ready("r1")
    return ref.to_json()


def main() -> None:
    daemon = DaemonProcess(Path(sys.argv[1]))
    try:
        daemon.wait_ready()
        rank = lone_rank(daemon.worker_socket, "decode")
        for ref in sys.stdin:
            rank.pull(ref.strip(), REQUEST)
            time.sleep(MAX_AGE_S)  # a list of warnings this old may be from before the pull
            checked = rank.check(REQUEST)._asdict()
            print(json.dumps({"checked": checked, **daemon.control.get("/v1/status")}), flush=True)
        rank.close()
    finally:
        daemon.stop()


if __name__ == "__main__":
    main()
