"""The client for asyncio with a real daemon, real movers and tensors: from a publish to a release."""

from __future__ import annotations

import asyncio

import pytest

from kvxferd.client import BlockList
from kvxferd.client.aio import AsyncRank, PublishRefusedError, PullFailed, connect
from kvxferd.errors import Code
from kvxferd.layout import EngineSpec, NamedTensor, from_tensors
from kvxferd.memory import SealedMemory, share
from tests.support.nodes.fleet import Fleet

torch = pytest.importorskip("torch")

LAYERS, BLOCKS, TOKENS, HEADS, HEAD_DIM = 2, 8, 16, 4, 32
DIMS = {"hnd": "layer kv block head token head_dim", "nhd": "block token layer kv head head_dim"}
SIZES = {"layer": LAYERS, "kv": 2, "block": BLOCKS, "token": TOKENS, "head": HEADS, "head_dim": HEAD_DIM}
ORDER = ("block", "layer", "kv", "token", "head", "head_dim")


def make_cache(dims: str) -> torch.Tensor:
    shape = [SIZES[dim] for dim in dims.split()]
    count = torch.Size(shape).numel()
    return SealedMemory.create(count * 2).torch().view(torch.float16).view(shape)


def blocks_of(cache: torch.Tensor, dims: str) -> torch.Tensor:
    return cache.permute([dims.split().index(dim) for dim in ORDER])


async def test_two_engines_on_one_loop(fleet: Fleet) -> None:
    daemon = fleet.shared("node")
    caches = {name: make_cache(dims) for name, dims in DIMS.items()}

    async def register(client: object, name: str) -> AsyncRank:
        spec = EngineSpec(name, fleet.generation(), LAYERS, num_kv_heads=HEADS)
        layout = from_tensors(spec, {"cache": NamedTensor(tensor=caches[name], dims=DIMS[name])})
        return await client.register(spec, layout, {"cache": share(caches[name])})

    def of(*ids: int) -> dict[str, BlockList]:
        return {"full": BlockList(ids=list(ids))}

    async with connect(daemon.worker_socket) as first, connect(daemon.worker_socket) as second:
        source, sink = await asyncio.gather(register(first, "hnd"), register(second, "nhd"))
        content = torch.randn(3, LAYERS, 2, TOKENS, HEADS, HEAD_DIM).half()
        blocks_of(caches["hnd"], DIMS["hnd"])[[5, 0, 2]] = content
        ref = await source.publish("req-1", of(5, 0, 2), num_tokens=40)
        (known,) = [t for t in daemon.status()["transfers"] if t["transfer_id"] == "req-1"]
        assert known
        with pytest.raises(PublishRefusedError) as refused:
            await source.publish("req-2", of(5, 5, 2), num_tokens=40)
        assert refused.value.code is Code.BLOCKS_INVALID
        with pytest.raises(PullFailed) as failed:
            await sink.pull({**ref.to_dict(), "nonce": "0" * 32}, of(1, 7, 3), num_tokens=40, deadline_s=30)
        assert failed.value.failed.safe_to_reuse
        delivered = await sink.pull(ref, of(1, 7, 3), num_tokens=40, deadline_s=30)
        assert delivered.bytes >= 40 * LAYERS * 2 * HEADS * HEAD_DIM * 2
        assert await source.released(ref) is Code.COMPLETED
        got = blocks_of(caches["nhd"], DIMS["nhd"])[[1, 7, 3]]
        assert torch.equal(got[:2], content[:2])
        assert torch.equal(got[2, :, :, :8], content[2, :, :, :8])
        assert not sink.pulls_in_doubt
        # A transfer is published before it is whole, and pulled meanwhile.
        grows = await source.publish("req-3", of(6), num_tokens=32, ready_tokens=16)
        pull = sink.pull(grows, of(4, 6), num_tokens=32, deadline_s=30, progressive=True)
        source.extend("req-3", None, of(7))
        await pull
        assert await source.released(grows) is Code.COMPLETED
        # A reference may come before its publish, and is waited for: time to cancel.
        pull = sink.pull({**ref.to_dict(), "transfer_id": "later"}, of(4), num_tokens=16, deadline_s=30)
        is_safe = asyncio.ensure_future(pull.safe())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(pull, 0.001)
        await asyncio.wait_for(is_safe, 30)
        assert not sink.pulls_in_doubt
