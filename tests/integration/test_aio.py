"""Events awaited with asyncio, a real daemon, real movers and tensors: from a publish to a release."""

from __future__ import annotations

import asyncio

import pytest

from kvxferd.client import BlockList, Client, RankHandle, connect
from kvxferd.client.aio import Awaiter, PublishRefusedError, PullFailed, in_thread
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

    async def register(name: str) -> RankHandle:
        spec = EngineSpec(name, fleet.generation(), LAYERS, num_kv_heads=HEADS)
        layout = from_tensors(spec, {"cache": NamedTensor(tensor=caches[name], dims=DIMS[name])})
        client = await in_thread(lambda: connect(daemon.worker_socket), Client.close)
        regions = {"cache": share(caches[name])}
        return await in_thread(lambda: client.register(spec, layout, regions), RankHandle.close)

    def of(*ids: int) -> dict[str, BlockList]:
        return {"full": BlockList(ids=list(ids))}

    source, sink = await asyncio.gather(register("hnd"), register("nhd"))
    async with Awaiter(source) as published, Awaiter(sink) as pulled:
        content = torch.randn(3, LAYERS, 2, TOKENS, HEADS, HEAD_DIM).half()
        blocks_of(caches["hnd"], DIMS["hnd"])[[5, 0, 2]] = content
        ref = source.publish("req-1", of(5, 0, 2), num_tokens=40)
        source.publish("req-2", of(5, 5, 2), num_tokens=40)
        with pytest.raises(PublishRefusedError) as refused:
            await published.released("req-2")
        assert refused.value.code is Code.BLOCKS_INVALID
        wrong = {**ref.to_dict(), "nonce": "0" * 32}
        with pytest.raises(PullFailed) as failed:
            await pulled.pull(sink.pull(wrong, of(1, 7, 3), num_tokens=40, deadline_s=30))
        assert failed.value.failed.safe_to_reuse
        delivered = await pulled.pull(sink.pull(ref, of(1, 7, 3), num_tokens=40, deadline_s=30))
        assert delivered.bytes >= 40 * LAYERS * 2 * HEADS * HEAD_DIM * 2
        assert (await published.released("req-1")).why is Code.COMPLETED
        got = blocks_of(caches["nhd"], DIMS["nhd"])[[1, 7, 3]]
        assert torch.equal(got[:2], content[:2])
        assert torch.equal(got[2, :, :, :8], content[2, :, :, :8])
        assert not pulled.pulls_in_doubt
        # A transfer is published before it is whole, and pulled meanwhile.
        grows = source.publish("req-3", of(6), num_tokens=32, ready_tokens=16)
        ticket = sink.pull(grows, of(4, 6), num_tokens=32, deadline_s=30, progressive=True)
        source.ready("req-3", None, of(7))
        await pulled.pull(ticket)
        assert (await published.released("req-3")).why is Code.COMPLETED
        # A reference may come before its publish, and is waited for: time to cancel.
        later = {**ref.to_dict(), "transfer_id": "later"}
        pull = pulled.pull(sink.pull(later, of(4), num_tokens=16, deadline_s=30))
        is_safe = asyncio.ensure_future(pull.safe())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(pull, 0.001)
        await asyncio.wait_for(is_safe, 30)
        assert not pulled.pulls_in_doubt
