"""Stages of one engine that hold different groups: a publish lists those of all, each rank reads its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pytest

from kvxferd import client
from kvxferd.client import BlockList, Delivered, Publisher
from kvxferd.layout import CacheTensor, EngineSpec, Group, RankLayout, RegionSpec, UnitRange
from kvxferd.layout.tensors import GroupKind
from kvxferd.memory import SealedMemory
from tests.support.client_harness import events_of
from tests.support.nodes.fleet import Fleet

TOKENS, BLOCK_TOKENS, NUM_BLOCKS, BLOCK_BYTES = 48, 16, 8, 2048
SIZE = NUM_BLOCKS * BLOCK_BYTES
FULL = Group(name="full", num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS)
WINDOW = Group(name="window", num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS, sliding_window=20)
STATE = Group(name="state", num_blocks=NUM_BLOCKS, kind=GroupKind.STATE)
Lists = Mapping[str, tuple[int, ...]]


def tensor(layer: int, group: Group, offset: int) -> CacheTensor:
    is_state = group.kind is GroupKind.STATE
    return CacheTensor(
        layer=layer,
        component="ssm" if is_state else "k",
        group=group.name,
        region="kv",
        offset=offset,
        block_stride=BLOCK_BYTES,
        token_stride=0 if is_state else BLOCK_BYTES // BLOCK_TOKENS,
        unit_stride=BLOCK_BYTES // 2 if is_state else BLOCK_BYTES // BLOCK_TOKENS // 2,
        units=(UnitRange(0, 2),),
        chunk_bytes=BLOCK_BYTES // 2 if is_state else BLOCK_BYTES // BLOCK_TOKENS // 2,
    )


def layout(start: int, groups: tuple[Group, ...]) -> RankLayout:
    """One layer of each group, one after the other."""
    tensors = tuple(tensor(start + n, group, n * SIZE) for n, group in enumerate(groups))
    return RankLayout(start, start + len(groups), groups, tensors, (RegionSpec("kv", SIZE * len(groups)),))


@dataclass
class Worker:
    """A rank of this process, and its memory."""

    rank: client.RankHandle
    layout: RankLayout
    memory: SealedMemory

    def block(self, group: str, block_id: int) -> bytes:
        (found,) = [t for t in self.layout.tensors if t.group == group]
        start = found.offset + block_id * BLOCK_BYTES
        return bytes(self.memory.buffer[start : start + BLOCK_BYTES])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def engine(stack: ExitStack, fleet: Fleet, name: str, stages: tuple[tuple[Group, ...], ...]) -> list[Worker]:
    workers: list[Worker] = []
    for pp_rank, groups in enumerate(stages):
        start = sum(map(len, stages[:pp_rank]))
        own = layout(start, groups)
        spec = EngineSpec(
            name,
            fleet.generation(),
            2,
            pp_size=len(stages),
            pp_rank=pp_rank,
            num_kv_heads=2,
            publish_implies_ready=True,
        )
        size = own.regions[0].size_bytes
        memory = SealedMemory.create(size)
        stack.callback(memory.close)
        memory.buffer[:] = np.random.default_rng(len(workers) + len(name)).bytes(size)
        connection = client.connect(fleet.shared("node").worker_socket)
        stack.callback(connection.close)
        workers.append(Worker(connection.register(spec, own, {"kv": memory}), own, memory))
    return workers


def lists(ids: Lists) -> dict[str, BlockList]:
    """Block lists of a request: a window's leaves out its first block, a state is one."""
    found = {}
    for group, listed in ids.items():
        first = BLOCK_TOKENS if group == "window" else 0
        state_at = TOKENS if group == "state" else -1
        found[group] = BlockList(ids=np.array(listed, np.int32), first_token=first, state_at=state_at)
    return found


@pytest.mark.parametrize("publisher", ["scheduler", "rank"])
@pytest.mark.parametrize("second", [STATE, WINDOW], ids=["state", "window"])
def test_a_publish_lists_every_stages_groups(fleet: Fleet, stack: ExitStack, second: Group, publisher: str):
    sources = engine(stack, fleet, "prefill", ((FULL,), (second,)))
    sinks = engine(stack, fleet, "decode", ((FULL,), (second,)))
    (whole,) = engine(stack, fleet, "whole", ((FULL, second),))
    session: Publisher = sources[0].rank
    if publisher == "scheduler":
        connection = client.connect(fleet.shared("node").worker_socket)
        stack.callback(connection.close)
        session = connection.attach("prefill", fleet.generation())
    read = {"state": (5,), "window": (6, 2)}[second.name]
    written = {"state": (3,), "window": (1, 7)}[second.name]
    ref = session.publish("t", lists({"full": (4, 0, 5), second.name: read}), TOKENS, num_readers=2)
    into = {"full": (2, 1, 7), second.name: written}
    pulls = [
        (sinks[0], {"full": into["full"]}),
        (sinks[1], {second.name: written}),  # each rank its own
        (whole, into),
    ]
    for worker, ids in pulls:
        worker.rank.pull(ref, lists(ids), TOKENS, deadline_s=15.0)
        event = events_of(worker.rank, 1, 20.0)[0]
        assert isinstance(event, Delivered), event
        for group, listed in ids.items():
            source = sources[0] if group == "full" else sources[1]
            pairs = zip({"full": (4, 0, 5), second.name: read}[group], listed, strict=True)
            assert all(source.block(group, there) == worker.block(group, here) for there, here in pairs)
