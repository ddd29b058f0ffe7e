"""Two users whose workers share a node."""

from __future__ import annotations

from kvxferd.layout.presets import attention_layout
from tests.support.simulation import Host, Worker, World, spec_of

FIRST, SECOND = 1000, 2000


def register(world: World, host: Host, name: str, uid: int) -> Worker:
    worker = world.connect(host)
    host.node.sessions[worker.session].uid = uid
    worker.spec, worker.layout = spec_of(name), LAYOUT
    worker.memory = bytearray(LAYOUT.regions[0].size_bytes)
    world.register_again(worker)
    return worker


LAYOUT = attention_layout(
    spec=spec_of("any"), layout="HND", num_kv_heads=2, head_dim=2, block_tokens=4, num_blocks=32
)
