"""What an engine imports to move KV cache through the daemon on its node.

A prefill worker exports its memory and publishes the blocks that it has computed::

    client = connect("/run/kvxferd/worker/worker.sock")
    memory = SealedMemory.create(size_bytes)           # kvxferd.memory; the engine computes in memory.torch()
    rank = client.register(engine=EngineSpec(...), layout=RankLayout(...), regions={"kv": memory})
    ref = rank.publish("req-1", {"full": BlockList(ids=block_ids)}, num_tokens=1000)
    rank.ready("req-1")                                # every rank, when its last layer is written
    send_to_router(ref.to_dict())

A decode worker pulls them into its own blocks, and receives the outcome in its event loop::

    blocks = {"full": BlockList(first_token=512, ids=block_ids)}
    ticket = rank.pull(ref, blocks, num_tokens=1000, deadline_s=30)
    selector.register(rank.fileno(), EVENT_READ)
    ...
    for event in rank.poll():
        match event:
            case Delivered(ticket): run(request_of[ticket])
            case Failed(ticket, safe_to_reuse=True): recompute(request_of[ticket])
            case Failed(ticket): quarantine(event.blocks); recompute(request_of[ticket])
            case Quiesced(): free(event.blocks)
            case Released(transfer_id): unpin(transfer_id)

`connect`, `register`, `attach` and `resume` block, at most for their `timeout_s`; nothing else does.
All calls are thread-safe. One connection is one rank: the rank is gone when the connection closes.

The client reconnects by itself to a daemon that died or restarted: it registers again and publishes
again every transfer that is not released. Pulls that were running end in Failed. Pulls that are called
meanwhile wait for the next daemon, until their deadline.

Times are seconds, sizes are bytes, block ids are int32.

The engine's side of the contract:

* Published blocks stay referenced and unchanged until `Released` (or `PublishRefused`): through
  preemption, prefix-cache reset and weight updates.
* Only the pull writes the blocks given to `pull` until its terminal event: no kernel that was launched
  earlier, zeroing included. After a Failed that is not `safe_to_reuse` this holds until `Quiesced`.
* All workers of an engine use one generation, chosen by its first rank and new at each start.
* A transfer id is used once in a generation. Another publish of it is refused (`transfer-exists`).
* Memory is freed only after `Suspended`, or by the end of the process.
* A process that forks does so before `connect`: a child that inherits the socket keeps the
  registration alive.

It needs msgspec and the standard library alone. `kvxferd.client.aio` has its events for asyncio.
"""

from kvxferd.client.client import Client, connect
from kvxferd.client.events import Delivered, Disconnected, Event, Failed, PullTicket, Quiesced
from kvxferd.client.rank import Publisher, RankHandle
from kvxferd.client.refs import make_ref
from kvxferd.layout import BlockList
from kvxferd.wire.common import TransferRef
from kvxferd.wire.worker import PublishRefused, Released, Suspended

__all__ = [
    "BlockList",
    "Client",
    "Delivered",
    "Disconnected",
    "Event",
    "Failed",
    "PublishRefused",
    "Publisher",
    "PullTicket",
    "Quiesced",
    "RankHandle",
    "Released",
    "Suspended",
    "TransferRef",
    "connect",
    "make_ref",
]
