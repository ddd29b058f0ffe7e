"""The client for asyncio: the same session, whose events end what is awaited.

    async with connect("/run/kvxferd/worker/worker.sock") as client:
        rank = await client.register(engine=..., layout=..., regions=...)
        ref = await rank.publish("req-1", blocks, num_tokens=1000)     # PublishRefused is raised
        why = await rank.released(ref)                                 # the blocks are the engine's again

        pull = rank.pull(ref, blocks, num_tokens=1000, deadline_s=30)
        try:
            delivered = await pull                                     # PullFailed is raised
        finally:
            await pull.safe()                                          # nothing writes the blocks any more

Cancelling a task that awaits a pull cancels the pull, and raises CancelledError at once: the blocks may
still be written then, as after a `Failed` that is not `safe_to_reuse`. They stay out of use until
`AsyncPull.safe` returns. `AsyncRank.pulls_in_doubt` has every pull whose blocks are in that state, also those
that nobody kept.

Every object belongs to the event loop that made it. No call blocks the loop.
"""

from __future__ import annotations

from kvxferd.client.aio.connection import AsyncClient, Connecting, connect
from kvxferd.client.aio.pulls import AsyncPull, PullFailed
from kvxferd.client.aio.session import AsyncPublisher, AsyncRank, PublishRefusedError

__all__ = [
    "AsyncClient",
    "AsyncPublisher",
    "AsyncPull",
    "AsyncRank",
    "Connecting",
    "PublishRefusedError",
    "PullFailed",
    "connect",
]
