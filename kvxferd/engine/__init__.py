"""The one import of an engine's author: it registers an engine's tensors, publishes their blocks, and pulls.

    from kvxferd import engine as kv

    rank = kv.register(socket, kv.EngineSpec(...), {"cache": kv.NamedTensor(tensor=cache, dims="...")})
    ref = rank.publish("req-1", {"full": kv.BlockList(ids=ids)}, num_tokens=1000)

`register` shares the tensors' memory, describes it, connects, and registers, with the first placement that
works. `kvxferd.client` has the contract of the engine's side; docs/how-to/write-an-engine.md has a whole
engine.
"""

from kvxferd.client import (
    BlockList,
    Client,
    Delivered,
    Disconnected,
    Event,
    Failed,
    Publisher,
    PublishRefused,
    PullTicket,
    Quiesced,
    RankHandle,
    Released,
    Suspended,
    TransferRef,
    connect,
)
from kvxferd.engine.registration import register, resume
from kvxferd.engine.strided import StridedMemory, strided
from kvxferd.layout import EngineSpec, Group, NamedTensor

__all__ = [
    "BlockList",
    "Client",
    "Delivered",
    "Disconnected",
    "EngineSpec",
    "Event",
    "Failed",
    "Group",
    "NamedTensor",
    "PublishRefused",
    "Publisher",
    "PullTicket",
    "Quiesced",
    "RankHandle",
    "Released",
    "StridedMemory",
    "Suspended",
    "TransferRef",
    "connect",
    "register",
    "resume",
    "strided",
]
