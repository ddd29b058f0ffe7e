"""Two engines of one rank each, in one process, on one daemon: what an engine does with kvxferd.

    python examples/hello.py /run/kvxferd/worker/worker.sock

The prefill engine keeps its cache as HND in blocks of 16 tokens, the decode engine as NHD in blocks
of 32. This program does not convert one to the other: the daemon plans that.
"""

import array
import secrets
import select
import sys

from kvxferd import client
from kvxferd.ids import EngineId, Generation, RegionId
from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.memory import SealedMemory

LAYERS, HEADS, HEAD_DIM, TOKENS = 4, 8, 64, 96


def register_rank(
    socket: str, name: str, layout_name: str, block_tokens: int
) -> tuple[client.RankHandle, SealedMemory]:
    """Register one rank, with its own memory."""
    spec = EngineSpec(
        engine_id=EngineId(name),
        generation=Generation(secrets.token_hex(4)),
        num_layers=LAYERS,
        num_kv_heads=HEADS,
    )
    layout = attention_layout(
        spec=spec,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        block_tokens=block_tokens,
        num_blocks=16,
        layout=layout_name,
    )
    memory = SealedMemory.create(layout.regions[0].size_bytes)
    rank = client.connect(socket).register(engine=spec, layout=layout, regions={RegionId("kv"): memory})
    return rank, memory


def wait_for(rank: client.RankHandle, kind: type[client.Event]) -> client.Event:
    """Return the rank's next event of that kind; stop at any other."""
    events = select.poll()  # not select.select, which refuses descriptors above 1,023
    events.register(rank.fileno(), select.POLLIN)
    while True:
        if not events.poll(30_000):
            sys.exit("nothing happened for 30 s")
        for event in rank.poll():
            print(event)
            if isinstance(event, kind):
                return event
            sys.exit(1)


def main() -> None:
    """Publish six blocks, pull them as three, and wait until they are released."""
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/hello.py WORKER_SOCKET")
    source, source_memory = register_rank(sys.argv[1], "hello-prefill", "HND", block_tokens=16)
    sink, sink_memory = register_rank(sys.argv[1], "hello-decode", "NHD", block_tokens=32)

    source_memory.buffer[:] = b"k" * source_memory.size_bytes  # the prefill computes
    blocks = {"full": client.BlockList(ids=array.array("i", [9, 2, 7, 0, 4, 11]))}
    ref = source.publish("req-1", blocks, num_tokens=TOKENS)
    source.ready("req-1")

    # ref.to_json() is what the router carries to the decode engine.
    blocks = {"full": client.BlockList(ids=array.array("i", [5, 1, 8]))}
    sink.pull(ref.to_json(), blocks, num_tokens=TOKENS, deadline_s=30)
    wait_for(sink, client.Delivered)
    wait_for(source, client.Released)

    got = bytes(sink_memory.buffer).count(b"k")
    print(f"{got} bytes arrived, {LAYERS * 2 * HEADS * HEAD_DIM * 2 * TOKENS} were sent")
    source.close()
    sink.close()


if __name__ == "__main__":
    main()
