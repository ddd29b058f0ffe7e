"""Pulls that read while the source writes: real daemons, movers and memory, of another layout and block size.

The source's memory holds poison wherever it has not been written: no byte of it may be delivered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvxferd import client
from kvxferd.client import BlockList, Delivered, Failed, Released
from kvxferd.errors import Code
from kvxferd.layout import EngineSpec, NamedTensor, from_tensors
from kvxferd.memory import SealedMemory, share
from tests.support.client_harness import one_event
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.waiting import wait_until

torch = pytest.importorskip("torch")

LAYERS, HEADS, HEAD_DIM = 2, 4, 512
TOKEN_BYTES = 2 * LAYERS * HEADS * HEAD_DIM * 2
POISON = 7.0
WAIT_S = 30.0
PREFILL = "layer kv block head token head_dim", 16, 24  # its dimensions, tokens of a block, blocks
DECODE = "block token layer kv head head_dim", 32, 12
ORDER = ("block", "token", "layer", "kv", "head", "head_dim")
NUM_TOKENS = 330
SOURCE_IDS = list(range(23, 2, -1))  # 21 blocks
SINK_IDS = [5, 0, 7, 2, 9, 11, 1, 3, 10, 4, 8]
READ_BYTES = len(SOURCE_IDS) * 16 * TOKEN_BYTES  # whole blocks of the source


class Rank:
    """A rank of this process, and its cache."""

    def __init__(self, stack: ExitStack, fleet: Fleet, name: str, shape: tuple[str, int, int]) -> None:
        dims, self.block_tokens, num_blocks = shape
        sizes = {"layer": LAYERS, "kv": 2, "block": num_blocks, "token": self.block_tokens}
        sizes |= {"head": HEADS, "head_dim": HEAD_DIM}
        wanted = [sizes[dim] for dim in dims.split()]
        memory = SealedMemory.create(torch.Size(wanted).numel() * 2)
        cache = memory.torch().view(torch.float16).view(wanted)
        cache.fill_(POISON)
        self.blocks = cache.permute([dims.split().index(dim) for dim in ORDER])
        spec = EngineSpec(name, fleet.generation(), LAYERS, num_kv_heads=HEADS)
        layout = from_tensors(spec, {"cache": NamedTensor(tensor=cache, dims=dims)})
        self.daemon = fleet.shared(name)
        connection = client.connect(self.daemon.worker_socket)
        stack.callback(connection.close)
        self.endpoint = self.daemon.endpoint
        self.handle = connection.register(spec, layout, {"cache": share(cache)})

    def write(self, ids: list[int], content: torch.Tensor, begin: int, end: int) -> None:
        """Write tokens [begin, end)."""
        for token in range(begin, end):
            block = ids[token // self.block_tokens]
            self.blocks[block, token % self.block_tokens] = content[token]

    def read(self, ids: list[int], num_tokens: int) -> torch.Tensor:
        """Return what the blocks hold, by token."""
        return self.blocks[ids].reshape(-1, LAYERS, 2, HEADS, HEAD_DIM)[:num_tokens]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def ranks(fleet: Fleet, stack: ExitStack) -> tuple[Rank, Rank]:
    """A source and a sink, each with a daemon of its own."""
    return Rank(stack, fleet, "prefill", PREFILL), Rank(stack, fleet, "decode", DECODE)


@pytest.fixture
def content() -> torch.Tensor:
    return torch.randn(NUM_TOKENS, LAYERS, 2, HEADS, HEAD_DIM).half()


def blocks(ids: list[int], first: int, last: int) -> dict[str, BlockList]:
    return {"full": BlockList(ids=ids[first:last])}


def extend(source: Rank, content: torch.Tensor, before: int, ready: int) -> None:
    """Write the tokens, then report them and the blocks that they add."""
    source.write(SOURCE_IDS, content, before, ready)
    first, last = -(-before // 16), -(-ready // 16)
    source.handle.ready("t1", None if ready == NUM_TOKENS else ready, blocks(SOURCE_IDS, first, last))


def wait_until_read(sink: Rank, num_tokens: int) -> None:
    """Wait until the one pull has read so many tokens."""
    wait_until(
        lambda: [p["tokens_read"] for p in sink.daemon.control.get("/v1/transfers")["pulls"]] == [num_tokens],
        f"{num_tokens} tokens read",
        WAIT_S,
    )


def check_shown(source: Rank, sink: Rank, ready: int, read: int) -> None:
    """Check what both daemons show between two pieces."""
    (transfer,) = source.daemon.control.get("/v1/transfers")["transfers"]
    assert (transfer["ready_tokens"], transfer["num_tokens"]) == (ready, NUM_TOKENS)
    (pull,) = sink.daemon.control.get("/v1/transfers")["pulls"]
    assert (pull["tokens_read"], pull["num_tokens"]) == (read, NUM_TOKENS)
    assert pull["bytes_read"] == read * TOKEN_BYTES


def check_recorded(sink: Rank, hidden_bytes: int) -> None:
    """Check the record and the metrics of the one pull, which come behind its delivery."""
    (record,) = sink.daemon.history(kind="pull")
    assert (record["bytes"], record["hidden_bytes"]) == (READ_BYTES, hidden_bytes)
    assert sink.daemon.counted("kvxferd_hidden_bytes_total") == hidden_bytes
    assert sink.daemon.counted("kvxferd_handover_seconds_count") == 1


def test_each_chunk_is_read_when_it_is_ready(ranks, content):
    source, sink = ranks
    ref = source.handle.publish("t1", {"full": BlockList(ids=[])}, NUM_TOKENS, ready_tokens=0)
    sink.handle.pull(ref, blocks(SINK_IDS, 0, 11), NUM_TOKENS, deadline_s=WAIT_S, progressive=True)
    before = 0
    for ready in (70, 150, 250):  # each more than a piece: 64, 128 and 224 tokens of whole blocks
        extend(source, content, before, ready)
        before = ready
        read = ready // 32 * 32
        wait_until_read(sink, read)
        assert torch.equal(sink.read(SINK_IDS, read), content[:read])
        rest = sink.read(SINK_IDS, NUM_TOKENS)[read:]
        assert torch.equal(rest, torch.full_like(rest, POISON)), "more was read than was ready"
    check_shown(source, sink, ready=250, read=224)
    extend(source, content, before, NUM_TOKENS)
    delivered = one_event(sink.handle, WAIT_S)
    assert isinstance(delivered, Delivered)
    assert delivered.bytes == READ_BYTES
    check_recorded(sink, hidden_bytes=224 * TOKEN_BYTES)
    assert torch.equal(sink.read(SINK_IDS, NUM_TOKENS), content)
    released = one_event(source.handle, WAIT_S)
    assert (released.transfer_id, released.why) == ("t1", Code.COMPLETED)


def test_what_is_preempted_is_never_delivered(ranks, content):
    source, sink = ranks
    source.write(SOURCE_IDS, content, 0, 160)
    ref = source.handle.publish("t1", blocks(SOURCE_IDS, 0, 10), NUM_TOKENS, ready_tokens=160)
    sink.handle.pull(ref, blocks(SINK_IDS, 0, 11), NUM_TOKENS, deadline_s=WAIT_S, progressive=True)
    wait_until_read(sink, 160)
    source.handle.unpublish(ref)
    assert isinstance(one_event(source.handle, WAIT_S), Released)
    source.blocks.fill_(POISON)  # another request's
    failed = one_event(sink.handle, WAIT_S)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.safe_to_reuse) == (Code.RELEASED, True)
