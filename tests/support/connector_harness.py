"""A prefill and a decode engine of one rank each on a real daemon, without vLLM around them.

Requests are plain objects with the few fields that the connector reads; a step hands the scheduler's
orders to the worker as vLLM does: pickled.
"""

from __future__ import annotations

import pickle
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvxferd.client import Publisher, connect
from kvxferd.client.gpu_events import Completion
from kvxferd.ids import EngineId, Generation, GroupName, RegionId
from kvxferd.integrations.vllm.layout.facts import CacheGroup, CacheKind
from kvxferd.integrations.vllm.layout.groups import CacheGroups
from kvxferd.integrations.vllm.session.early_pulls import EarlyPullLimits
from kvxferd.integrations.vllm.session.scheduler import ConnectorScheduler
from kvxferd.integrations.vllm.session.worker import ConnectorWorker, Results
from kvxferd.layout import CacheTensor, EngineSpec, Group, RankLayout, RegionSpec, TensorRegion, UnitRange
from kvxferd.memory import SealedMemory
from tests.support.nodes.daemon import Daemon

BLOCK_TOKENS = 4
TOKEN_BYTES = 64
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
NUM_BLOCKS = 32
WAIT_S = 20.0

GROUPS = CacheGroups((CacheGroup(0, CacheKind.FULL, BLOCK_TOKENS),), num_listed=1)
NAME = GroupName(GROUPS.names[0])
LAYOUT = RankLayout(
    start_layer=0,
    end_layer=1,
    groups=(Group(name=NAME, num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS),),
    tensors=(
        CacheTensor(
            layer=0,
            component="latent",
            group=NAME,
            region=RegionId("kv"),
            offset=0,
            block_stride=BLOCK_BYTES,
            token_stride=TOKEN_BYTES,
            unit_stride=TOKEN_BYTES,
            units=(UnitRange(0, 1),),
            chunk_bytes=TOKEN_BYTES,
        ),
    ),
    regions=(RegionSpec(RegionId("kv"), NUM_BLOCKS * BLOCK_BYTES),),
)


class Status(Enum):
    """The names are vLLM's."""

    WAITING = auto()
    PREEMPTED = auto()
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_ABORTED = auto()
    FINISHED_ERROR = auto()


@dataclass
class Request:
    """What the connector reads of vLLM's request."""

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None = None
    status: Enum = Status.WAITING
    num_computed_tokens: int = 0
    prompt_token_ids: list[int] | None = None
    max_tokens: int = 16
    has_prompt_logprobs: bool = False
    _all_token_ids: list[int] = field(default_factory=list)

    def get_skip_reading_prefix_cache(self) -> bool:
        return self.has_prompt_logprobs


@dataclass
class Blocks:
    """vLLM's allocated blocks."""

    ids: tuple[list[int], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.ids


@dataclass
class CacheBlock:
    """A block of vLLM's pool: its references alone."""

    block_id: int
    ref_cnt: int = 0


class CachePool:
    """vLLM's cache manager and block pool in one: which blocks a request has, and who keeps them."""

    def __init__(self) -> None:
        self.blocks = [CacheBlock(number) for number in range(NUM_BLOCKS)]
        self._of_request: dict[str, Sequence[CacheBlock]] = {}
        self.block_pool = self

    def give(self, request_id: str, ids: Iterable[int]) -> None:
        """Allocate these blocks to a request."""
        self.give_blocks(request_id, [self.blocks[number] for number in ids])

    def give_blocks(self, request_id: str, blocks: Sequence[CacheBlock]) -> None:
        self._of_request[request_id] = blocks

    def get_blocks(self, request_id: str) -> SimpleNamespace:
        return SimpleNamespace(blocks=(self._of_request[request_id],))

    def touch(self, blocks: Sequence[CacheBlock]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[CacheBlock]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0

    @property
    def kept(self) -> list[int]:
        """The blocks that the connector keeps."""
        return [block.block_id for block in self.blocks if block.ref_cnt]


def collected(side: ConnectorScheduler | ConnectorWorker) -> dict[str, Any]:
    """What it has counted since the last time, which is something."""
    counted = side.stats.collect()
    assert counted is not None
    return counted


class EngineUnderTest:
    """An engine of one rank: scheduler's side, worker's side, and the cache's bytes."""

    def __init__(
        self,
        daemon: Daemon,
        engine_id: str,
        *,
        groups: CacheGroups = GROUPS,
        publishes: bool = False,
        deadline_s: float = 10.0,
        lease_s: float | None = None,
        launched: Callable[[], Completion] | None = None,
        early: EarlyPullLimits | None = None,
        generation: str = "",
        recomputes_failed: bool = False,
    ) -> None:
        """`early`: requests are read while they are computed."""
        self._stack = ExitStack()
        reports_ready = bool(launched or early)
        self.memory = self._stack.enter_context(SealedMemory.create(NUM_BLOCKS * BLOCK_BYTES, "test-vllm"))
        self.bytes = np.frombuffer(self.memory.buffer, dtype=np.uint8).reshape(NUM_BLOCKS, BLOCK_BYTES)
        self._stack.callback(lambda: setattr(self, "bytes", None))
        self.engine_id, self.generation = engine_id, Generation(generation or secrets.token_hex(4))
        spec = EngineSpec(
            engine_id=EngineId(engine_id),
            generation=self.generation,
            num_layers=1,
            publish_implies_ready=not reports_ready,
        )
        self.rank = connect(daemon.worker_socket, name=engine_id).register(
            spec, LAYOUT, {RegionId("kv"): self.memory}, timeout_s=30
        )
        self.worker = ConnectorWorker(
            self.rank,
            deadline_s,
            reports_ready=reports_ready,
            recomputes_failed=recomputes_failed,
            record_launched=launched,
        )
        self._stack.callback(self.worker.close)
        self.scheduler = ConnectorScheduler(groups, lease_s=lease_s, early=early)
        self.pool = CachePool()
        if early is not None:
            self.scheduler.publishing.cache = self.pool
        self._stack.callback(self.scheduler.publishing.close)
        self.publisher: Publisher | None = None
        if publishes:
            self.publisher = connect(daemon.worker_socket, name=f"{engine_id} scheduler").attach(
                engine_id, self.generation
            )
            self.scheduler.publishing.publisher = self.publisher

    def step(self, scheduled: Collection[str] = (), preempted: Collection[str] = ()) -> Results:
        """One engine step without a forward pass."""
        orders = pickle.loads(pickle.dumps(self.scheduler.build_step_metadata(scheduled, preempted)))
        self.worker.start_step(orders)
        results = self.worker.collect_results()
        self.scheduler.pulls_ended(results.received)
        return results

    def step_until(self, reached: Callable[[Results], bool], what: str, limit_s: float = WAIT_S) -> Results:
        """Step until the results, all added up, are as wanted."""
        total = Results()
        deadline = time.monotonic() + limit_s
        while not reached(total):
            assert time.monotonic() < deadline, f"not within {limit_s} s: {what}; so far {total}"
            one = self.step()
            total.sent |= one.sent
            total.received |= one.received
            total.failed |= one.failed
            time.sleep(0.001)  # as vLLM's engine does when nothing ran
        return total

    def prefill(
        self, name: str, num_tokens: int, ids: list[int], fill: int, **asked: Any
    ) -> dict[str, Any] | None:
        """Compute a request, and return what the router gets of it. `asked` are parameters of its own."""
        params = {"do_remote_decode": True, "do_remote_prefill": False} | asked
        request = Request(name, num_tokens, params)
        self.scheduler.request_added(request)
        self.bytes[ids] = fill
        request.num_computed_tokens = request.num_prompt_tokens
        request.status = Status.FINISHED_LENGTH_CAPPED
        keeps, params = self.scheduler.request_ended(request, (ids,))
        assert keeps is (params is not None)
        return params

    def prefilled(self, *request: Any, **more: Any) -> dict[str, Any]:
        """Compute a request that is published."""
        params = self.prefill(*request, **more)
        assert params is not None
        return params

    def decode(
        self, name: str, num_tokens: int, ids: list[int], params: dict[str, Any], cached: int = 0
    ) -> Request:
        """Schedule a request into these blocks, as vLLM's scheduler does."""
        request = Request(name, num_tokens, dict(params))
        self.scheduler.request_added(request)
        external = self.scheduler.num_tokens_to_pull(request, cached)
        assert external is not None, "the limit of requests that wait for running prefills is reached"
        self.scheduler.blocks_allocated(request, Blocks((ids,)), external)
        return request

    def abort(self, request: Request, ids: list[int]) -> None:
        """The client of the request has gone."""
        request.status = Status.FINISHED_ABORTED
        assert self.scheduler.request_ended(request, (ids,)) == (False, None)

    def regions(self) -> list[TensorRegion]:
        """Its memory, as it is registered."""
        return [TensorRegion(RegionId("kv"), self.bytes.ctypes.data, self.memory.size_bytes, "cpu", ())]

    def close(self) -> None:
        self._stack.close()


@contextmanager
def engines_on(daemon: Daemon) -> Iterator[Callable[..., EngineUnderTest]]:
    """Make engines on a daemon by name, with facts as of `EngineUnderTest`; they are gone at the end."""
    with ExitStack() as stack:

        def make(engine_id: str, **facts: Any) -> EngineUnderTest:
            made = EngineUnderTest(daemon, engine_id, **facts)
            stack.callback(made.close)
            return made

        yield make
