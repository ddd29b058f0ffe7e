"""Pages of several caches, compressed states and rings between two daemons: every byte, none beside them."""

from __future__ import annotations

import itertools
from contextlib import ExitStack

import msgspec
import pytest
import torch

from kvxferd.client import Delivered, RankHandle
from kvxferd.engine.registration import register_regions
from kvxferd.ids import EngineId, Generation, Rank
from kvxferd.memory import SealedMemory
from tests.support.client_harness import one_event
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.vllm_families import random_pair
from tests.support.vllm_pages import POISON, PagedEngine, PagedRank

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WAIT_S = 60.0
_numbers = itertools.count()


class SealedRank(PagedRank):
    """A rank in memory that others can map."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self.sealed = SealedMemory.create(num_bytes, "test-pages")
        return self.sealed.torch()


class RegisteredEngine:
    """An engine whose ranks are registered with a daemon."""

    def __init__(self, stack: ExitStack, daemon: Daemon, engine: PagedEngine) -> None:
        self.engine = engine
        self.ranks: dict[Rank, RankHandle] = {}
        name = f"packed-{next(_numbers)}"
        for rank, held in engine.ranks.items():
            spec = msgspec.structs.replace(
                engine.spec(rank),
                engine_id=EngineId(name),
                generation=Generation(name),
                publish_implies_ready=True,
            )
            assert isinstance(held, SealedRank)
            stack.callback(held.sealed.close)
            handle = register_regions(daemon.worker_socket, spec, held.derived.layout, held.derived.storages)
            stack.callback(handle.close)
            self.ranks[rank] = handle


@pytest.fixture
def nodes(fleet: Fleet) -> tuple[Daemon, Daemon]:
    return fleet.shared("prefill"), fleet.shared("decode")


def pull(sink: RegisteredEngine, source: RegisteredEngine, num_tokens: int) -> list[str]:
    """Write, publish and pull a request; return what is wrong in the sink's memory."""
    theirs, mine = source.engine.block_lists(num_tokens, 5), sink.engine.block_lists(num_tokens, 7)
    published = source.engine.select(theirs, num_tokens)
    for held in source.engine.ranks.values():
        memory = held.memory.numpy()
        for _, start, content in held.written(theirs, num_tokens):
            memory[start : start + len(content)] = content
    ref = source.ranks[Rank(0, 0)].publish("request", published, num_tokens)
    wrong = []
    for rank, handle in sink.ranks.items():
        into = sink.engine.select(mine, num_tokens)
        handle.pull(ref, into, num_tokens, deadline_s=WAIT_S)
        event = one_event(handle, WAIT_S)
        assert isinstance(event, Delivered), event
        wrong += sink.engine.ranks[rank].wrong(mine, num_tokens)
    return wrong


def test_random_caches_move_between_two_daemons(
    nodes: tuple[Daemon, Daemon], pytestconfig: pytest.Config
) -> None:
    for seed in range(pytestconfig.getoption("--random-pairs") // 10):
        family, sink_how, source_how, num_tokens = random_pair(seed)
        sink, source = (PagedEngine(family, how, SealedRank) for how in (sink_how, source_how))
        with ExitStack() as stack:
            engines = (RegisteredEngine(stack, nodes[1], sink), RegisteredEngine(stack, nodes[0], source))
            assert pull(*engines, num_tokens) == [], f"seed {seed}"
        assert all((held.memory != POISON).any() for held in source.ranks.values())
