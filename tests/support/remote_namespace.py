"""A daemon and a sink rank, as one process of a PID namespace: `python remote_namespace.py DIRECTORY`.

Reads references from standard input, one a line; pulls each, and prints what came of it and the daemon's
status as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import select
import sys
from pathlib import Path

from kvxferd import client
from kvxferd.ids import EngineId, Generation, RegionId
from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.memory import SealedMemory
from kvxferd.telemetry.warnings.warning_watch import MAX_AGE_S
from kvxferd.tooling.daemon_process import DaemonProcess

NUM_BLOCKS, BLOCK_TOKENS = 16, 16
NUM_TOKENS = NUM_BLOCKS * BLOCK_TOKENS
EVENT_S = 20.0


def join(socket: str, name: str) -> tuple[client.RankHandle, SealedMemory]:
    """Register a rank of 2 MiB."""
    spec = EngineSpec(EngineId(name), Generation("1"), num_layers=4, num_kv_heads=8)
    layout = attention_layout(
        spec=spec, num_kv_heads=8, head_dim=64, block_tokens=BLOCK_TOKENS, num_blocks=NUM_BLOCKS
    )
    memory = SealedMemory.create(layout.regions[0].size_bytes)
    return client.connect(socket).register(
        engine=spec, layout=layout, regions={RegionId("kv"): memory}
    ), memory


def blocks() -> dict[str, client.BlockList]:
    """All of a rank's."""
    return {"full": client.BlockList(ids=list(range(NUM_BLOCKS)))}


def _pull(rank: client.RankHandle, memory: SealedMemory, ref: object) -> str:
    rank.pull(ref, blocks(), num_tokens=NUM_TOKENS, deadline_s=EVENT_S)
    while select.select([rank.fileno()], [], [], EVENT_S)[0]:
        for event in rank.poll():
            if isinstance(event, client.Failed):
                return f"failed: {event.message}"
            if isinstance(event, client.Delivered):
                return memory.buffer[:8].hex()
    return "nothing happened"


async def main() -> None:
    daemon = DaemonProcess(Path(sys.argv[1]))
    try:
        await asyncio.to_thread(daemon.wait_ready)
        rank, memory = await asyncio.to_thread(join, daemon.worker_socket, "decode")
        while line := await asyncio.to_thread(sys.stdin.readline):
            came = await asyncio.to_thread(_pull, rank, memory, json.loads(line))
            await asyncio.sleep(MAX_AGE_S)  # a list of warnings this old may be from before the pull
            print(json.dumps({"came": came, **daemon.control.get("/v1/status")}), flush=True)
        rank.close()
    finally:
        await asyncio.to_thread(daemon.stop)


if __name__ == "__main__":
    asyncio.run(main())
