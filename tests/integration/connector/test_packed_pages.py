"""Pages of several caches, compressed states and rings between two daemons: every byte, none beside them."""

from __future__ import annotations

import itertools
import select
import time
from contextlib import ExitStack

import msgspec
import pytest

from kvxferd.client import Delivered, RankHandle
from kvxferd.ids import EngineId, Generation, Rank
from kvxferd.integrations.vllm.memory.memory_sharing import SharedCaches, register_rank, share_rank
from kvxferd.integrations.vllm.options import Options
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.vllm_families import random_pair
from tests.support.vllm_pages import POISON, PagedEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WAIT_S = 60.0
_numbers = itertools.count()


class RegisteredEngine:
    """An engine whose ranks are registered with a daemon, each with a copy of its memory beside it."""

    def __init__(self, stack: ExitStack, daemon: Daemon, engine: PagedEngine) -> None:
        self.engine = engine
        self.ranks: dict[Rank, RankHandle] = {}
        self.shared: dict[Rank, SharedCaches] = {}
        options = Options(socket=str(daemon.worker_socket), adopt_cpu_memory=False)
        name = f"packed-{next(_numbers)}"
        for rank, held in engine.ranks.items():
            sharing = share_rank(held.derived, options, None)
            spec = msgspec.structs.replace(
                engine.spec(rank.tp_rank),
                engine_id=EngineId(name),
                generation=Generation(name),
                publish_implies_ready=True,
            )
            handle = register_rank(sharing, held.derived, options, spec, time.monotonic() + WAIT_S)
            stack.callback(sharing.shared.close)
            stack.callback(handle.close)
            self.ranks[rank], self.shared[rank] = handle, sharing.shared


@pytest.fixture
def nodes(fleet: Fleet) -> tuple[Daemon, Daemon]:
    return fleet.shared("prefill"), fleet.shared("decode")


def pull(sink: RegisteredEngine, source: RegisteredEngine, num_tokens: int) -> list[str]:
    """Write, publish and pull a request; return what is wrong in the sink's memory."""
    theirs, mine = source.engine.block_lists(num_tokens, 5), sink.engine.block_lists(num_tokens, 7)
    published = source.engine.select(theirs, num_tokens)
    for rank, held in source.engine.ranks.items():
        memory = held.memory.numpy()
        for _, start, content in held.written(theirs, num_tokens):
            memory[start : start + len(content)] = content
        buffers = source.shared[rank].bounce_buffers
        assert buffers is not None
        buffers.copy_out(published)
    ref = source.ranks[Rank(0, 0)].publish("request", published, num_tokens)
    wrong = []
    for rank, handle in sink.ranks.items():
        into = sink.engine.select(mine, num_tokens)
        handle.pull(ref, into, num_tokens, deadline_s=WAIT_S)
        (event,) = _events(handle)
        assert isinstance(event, Delivered), event
        buffers = sink.shared[rank].bounce_buffers
        assert buffers is not None
        buffers.copy_in(into)
        wrong += sink.engine.ranks[rank].wrong(mine, num_tokens)
    return wrong


def _events(handle: RankHandle) -> list[object]:
    deadline = time.monotonic() + WAIT_S
    while not (events := list(handle.poll())) and time.monotonic() < deadline:
        select.select([handle.fileno()], [], [], 1.0)
    return events


def test_random_caches_move_between_two_daemons(
    nodes: tuple[Daemon, Daemon], pytestconfig: pytest.Config
) -> None:
    for seed in range(pytestconfig.getoption("--random-pairs") // 10):
        family, sink_how, source_how, num_tokens = random_pair(seed)
        sink, source = PagedEngine(family, sink_how), PagedEngine(family, source_how)
        with ExitStack() as stack:
            engines = (RegisteredEngine(stack, nodes[1], sink), RegisteredEngine(stack, nodes[0], source))
            assert pull(*engines, num_tokens) == [], f"seed {seed}"
        assert all((held.memory != POISON).any() for held in source.ranks.values())
