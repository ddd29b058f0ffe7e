"""Engines' ranks in one process, placed as the vLLM connector places them, for a rank process to `run`.

A case is SETTING:MEMORY[:MISSING,MISSING...]. MEMORY is an allocator of `tensor_allocators`; imports of
MISSING fail while the ranks are placed. In each case one rank publishes, and another pulls and compares.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from kvxferd.client import BlockList, Delivered, RankHandle
from kvxferd.engine.registration import OF_CHILD, register_regions
from kvxferd.errors import KvxferdError
from kvxferd.ids import RegionId
from kvxferd.import_blocking import block_import
from kvxferd.integrations.vllm.memory.placement_advice import failure_of
from kvxferd.layout import EngineSpec, TensorRegion
from kvxferd.memory import MemoryPlacement
from tests.support.client_harness import one_event
from tests.support.connector_harness import BLOCK_BYTES, BLOCK_TOKENS, LAYOUT, NAME, NUM_BLOCKS
from tests.support.nodes.agent import Agent
from tests.support.tensor_allocators import TensorStore

WAIT_S = 60.0
SIZE = NUM_BLOCKS * BLOCK_BYTES


def place(socket: str, driver: str, cases: Sequence[str], agent: Agent) -> list[dict[str, Any]]:
    """Return what both ranks of each case reported, and whether the bytes came; or why none was placed."""
    agent.can_serve_again = False
    return [_place(socket, driver, *case.split(":")) for case in cases]


def _place(socket: str, driver: str, setting: str, memory: str, missing: str = "") -> dict[str, Any]:
    placements = {"auto": None, "child": OF_CHILD, "resident": (MemoryPlacement.RESIDENT,)}[setting]
    stores = [TensorStore(SIZE, memory, driver) for _ in range(2)]
    ranks: list[RankHandle] = []
    reports: list[str] = []
    log = logging.getLogger(f"placed.{setting}.{memory}.{missing}")
    log.setLevel(logging.INFO)
    log.addFilter(lambda record: reports.append(record.getMessage()))  # type: ignore[arg-type,func-returns-value]
    with ExitStack() as stack:
        try:
            with without(missing):
                for number, store in enumerate(stores):
                    storage = store.tensor.untyped_storage()
                    spec = EngineSpec(f"{setting}-{memory}-{number}", "g", 1, publish_implies_ready=True)
                    rank = register_regions(
                        socket,
                        spec,
                        LAYOUT,
                        [TensorRegion(RegionId("kv"), storage.data_ptr(), SIZE, "cuda", (storage,))],
                        placements=placements,
                        timeout_s=WAIT_S,
                        explain=lambda error: str(failure_of(error)),
                        log=log,
                    )
                    ranks.append(rank)
                    stack.callback(rank.close)
        except KvxferdError as error:
            return {"code": error.code, "message": error.message}
        is_right = move(*ranks, *stores)
    return {"reports": reports, "is_right": is_right}


@contextmanager
def without(names: str) -> Iterator[None]:
    """Make imports of these fail, if they have not been imported yet."""
    with ExitStack() as stack:
        for name in filter(None, names.split(",")):
            assert name not in sys.modules, f"{name} is imported already: put the case first"
            stack.enter_context(block_import(name))
        yield


def move(source: RankHandle, sink: RankHandle, origin: TensorStore, target: TensorStore) -> bool:
    """Pull all of a cache; return whether it was delivered as it is."""
    origin.bytes[:] = np.random.default_rng(7).integers(0, 255, SIZE)
    origin.save()
    blocks = {str(NAME): BlockList(ids=list(range(NUM_BLOCKS)))}
    ref = source.publish("r-1", blocks, NUM_BLOCKS * BLOCK_TOKENS)
    sink.pull(ref, blocks, NUM_BLOCKS * BLOCK_TOKENS, deadline_s=WAIT_S)
    event = one_event(sink, WAIT_S)
    target.load()
    return isinstance(event, Delivered) and bool((target.bytes == origin.bytes).all())
