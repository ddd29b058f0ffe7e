"""A rank's memory is proved by a read that is checked, and TCP told from what is faster."""

from __future__ import annotations

from collections.abc import Callable

from kvxferd.wire.mover import ProbeResult, TransportsSeen
from tests.support.mover_harness import Node, Worker, bind


async def test_memory_is_proved_and_tcp_is_told_from_what_is_faster(
    pair: tuple[Node, Node], transport: str, make_worker: Callable[..., Worker]
) -> None:
    node = pair[1]
    mover, _ = await bind(node, make_worker("E", blocks=256))  # 4 MiB
    placement = (await node.received(mover, ProbeResult)).placement
    assert (placement.kind, placement.why) == ("direct", "")
    assert placement.gigabytes_per_s > 0.01
    seen = await node.received(mover, TransportsSeen)
    assert (seen.reach, "cma/memory" in seen.transports) == ("itself", transport == "cma")
