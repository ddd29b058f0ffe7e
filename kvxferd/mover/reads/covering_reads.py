"""The covering reads of a mover: into chunks of its own, and from there into the engine's blocks.

The network writes the chunk, and the scatter writes the blocks. So a pull that has failed waits for a scatter
that runs, which ends after its next copy, and for no covering read, whatever became of that. The chunk waits
for the read.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import AgentName, RegionId
from kvxferd.mover.chunks.chunk_pool import Chunk, ChunkPool, ChunkState, HostChunk
from kvxferd.mover.chunks.covering import Bytes, CoverSlicer, scatter_pieces
from kvxferd.mover.chunks.device_scatter import DeviceScatterer
from kvxferd.mover.chunks.scatterer import Scatterer, ScatterJob
from kvxferd.mover.chunks.slices import SliceBudget
from kvxferd.mover.reads.pull_state import CoveringRead, PullFailure, PullState, Unposted
from kvxferd.mover.reads.region_map import split_by_memory
from kvxferd.mover.reads.remote_agents import RemoteAgents
from kvxferd.mover.transport.base import HOST, MemoryKind, TransportError
from kvxferd.plan.read_costs import CostModel, ReadShape
from kvxferd.plan.stretches import StretchForm
from kvxferd.wire.common import RegionAddress

_LOG = logging.getLogger(__name__)

CHUNK_WAIT_S = 0.05  # after which a pull without a chunk reads directly


class CoveringReads:
    """The chunks, the scatters, and the reads of pulls that have ended. One thread."""

    def __init__(
        self,
        remote_agents: RemoteAgents,
        clock: Callable[[], float],
        chunks: ChunkPool,
        scatterer: Scatterer,
        budgets: dict[AgentName, SliceBudget],
        costs: CostModel,
    ) -> None:
        """`budgets`, `costs`: of all slices, the direct reads' too."""
        self._remote_agents = remote_agents
        self._clock = clock
        self._chunks = chunks
        self._scatterer = scatterer
        self._budgets = budgets
        self._costs = costs
        self._regions: dict[RegionId, Bytes] = {}
        self._device: DeviceScatterer | None = None
        self._has_device_failed = False  # all that is expanded from now on is read directly
        self._draining: list[CoveringRead] = []

    def bind(self, regions: Sequence[RegionAddress]) -> None:
        """Scatter into these regions, which are plain host memory."""
        self._regions = {region.region: _bytes_of(region) for region in regions}

    def bind_device(self, device: DeviceScatterer) -> None:
        """Scatter into a GPU's memory, from chunks there."""
        self._device = device
        self._chunks.use_chunks(device.make_chunk)

    @property
    def is_available(self) -> bool:
        """Whether the bound memory can be scattered into."""
        return bool(self._regions) or (self._device is not None and not self._has_device_failed)

    @property
    def chunk_kind(self) -> MemoryKind:
        """The kind of memory that chunks are in."""
        return HOST.local if self._device is None else self._device.kind

    def can_scatter(self, form: StretchForm) -> bool:
        """Whether stretches of this form can be scattered with any gain."""
        return self._device is None or (not self._has_device_failed and self._device.can_scatter(form))

    @property
    def is_draining(self) -> bool:
        """Whether a read of a pull that has ended is in flight."""
        return bool(self._draining)

    def step(self) -> bool:
        """Scatter, unless a thread does; poll the reads of pulls that have ended."""
        moved = self._scatterer.step()
        if self._device is not None:
            moved |= self._device.step()
        draining = tuple(self._draining)
        for read in draining:
            assert read.handle is not None
            try:
                if not self._remote_agents.poll(read.agent, read.handle):
                    continue
            except TransportError as failure:
                self._draining.remove(read)
                self._on_failed(read, failure)
            else:
                self._draining.remove(read)
                self._move(read.chunk, ChunkState.FREE)
            moved = True
        if draining:
            self._chunks.report_changes(self._clock())
        return moved

    def post(self, pull: PullState, one: Unposted, others_wait: bool) -> bool:
        """Post the next read of a pull, and queue what is left; return False where there is no chunk.

        `others_wait`: another pull waits for a chunk. A pull that has waited for long, or for a chunk that
        will never come, reads the rest directly. A pull whose source is slow waits for the source: direct
        reads would come no sooner, and a source that is stopped would keep the engine's blocks in doubt.
        """
        assert isinstance(one.slicer, CoverSlicer)
        if self._has_device_failed:
            pull.unposted.append(one)
            pull.read_directly()
            return False
        chunk = self._acquire(pull, one, others_wait)
        if chunk is None:
            return False
        now = self._clock()
        if pull.first_post_at is None:
            pull.first_post_at = now
        budget = self._budgets.setdefault(one.agent, SliceBudget())
        fill = one.slicer.next_fill(budget.bytes, chunk.span.size_bytes)
        if not one.slicer.is_empty:
            pull.unposted.append(one)  # the other remote ranks come first
        self._post(pull, one, CoveringRead(one.agent, chunk, fill, now, not one.slicer.is_empty))
        return True

    def _acquire(self, pull: PullState, one: Unposted, others_wait: bool) -> Chunk | None:
        """Return a chunk to read into; where there is none, queue what was to be read, as `post` does."""
        now = self._clock()
        chunk = self._chunks.acquire(one.agent, now, is_wanted_elsewhere=others_wait)
        if chunk is not None:
            pull.waits_for_chunk_since = None
            return chunk
        pull.unposted.append(one)
        if self._chunks.awaits_source(one.agent, now):
            return None
        if pull.waits_for_chunk_since is None:
            pull.waits_for_chunk_since = now
        has_waited = now >= pull.waits_for_chunk_since + CHUNK_WAIT_S
        if has_waited or not self._chunks.may_acquire_soon(one.agent, now):
            pull.read_directly()
        return None

    def _post(self, pull: PullState, one: Unposted, read: CoveringRead) -> None:
        # Of one kind of memory: where a registered piece ends, a descriptor is cut, and not the image.
        whole = read.fill.runs(read.chunk.address)
        ((_, runs),) = split_by_memory(whole, None, pull.remote_maps.get(one.rank))
        try:
            read.handle = self._remote_agents.post(one.agent, runs, one.kinds)
        except TransportError as failure:
            self._on_failed(read, failure, pull)
            return
        finally:
            pull.post_s += self._clock() - read.posted_at
        pull.covering.append(read)
        if read.handle.done:
            self._on_read_done(pull, read)

    def poll(self, pull: PullState) -> bool:
        """Scatter the chunks of a pull that are read; release those that are scattered."""
        moved = False
        for read in tuple(pull.covering):
            if read.scatter is not None:
                if read.scatter.is_over:
                    self._on_scatter_over(pull, read, read.scatter)
                    moved = True
                continue
            assert read.handle is not None
            try:
                if not self._remote_agents.poll(read.agent, read.handle):
                    continue
            except TransportError as failure:
                pull.covering.remove(read)
                self._on_failed(read, failure, pull)
            else:
                self._on_read_done(pull, read)
            moved = True
        return moved

    def help_scatter(self) -> bool:
        """Make one copy of a scatter, where nothing else is to be done; return whether there was any."""
        return self._scatterer.help()

    def let_go(self, pull: PullState) -> None:
        """Have a pull that has failed scatter nothing more. A scatter that runs stays in `pull.covering`."""
        for read in tuple(pull.covering):
            if read.scatter is not None:
                read.scatter.cancel()
            else:
                pull.covering.remove(read)
                self._move(read.chunk, ChunkState.DRAINING)
                self._draining.append(read)

    def close(self) -> None:
        """Return once no scatter runs, or ever will."""
        self._scatterer.close()
        if self._device is not None:
            self._device.close()

    # --- how a read ends

    def _on_read_done(self, pull: PullState, read: CoveringRead) -> None:
        read.handle = None
        now = self._clock()
        if (budget := self._budgets.get(read.agent)) is not None:
            budget.update(now - read.posted_at, read.used_whole_budget)
        shape = ReadShape(len(read.fill.length), int(read.fill.length.sum()))
        self._costs.learn(read.agent, shape, read.posted_at, now)
        if pull.failure is not None:
            pull.covering.remove(read)
            self._move(read.chunk, ChunkState.FREE)
            return
        self._start_scatter(pull, read)

    def _start_scatter(self, pull: PullState, read: CoveringRead) -> None:
        """Copy what was read into the blocks. The pull has not failed."""
        pull.started = True  # the blocks are written from now on
        self._move(read.chunk, ChunkState.SCATTERING)
        if self._device is not None:
            read.scatter = self._device.start_fill(read.fill, read.chunk)
            return
        assert isinstance(read.chunk, HostChunk)
        read.scatter = ScatterJob(scatter_pieces(read.fill, read.chunk.bytes, self._regions))
        self._scatterer.start(read.scatter)

    def _on_scatter_over(self, pull: PullState, read: CoveringRead, job: ScatterJob) -> None:
        pull.covering.remove(read)
        self._move(read.chunk, ChunkState.LOST if job.chunk_in_doubt else ChunkState.FREE)
        pull.in_doubt |= job.blocks_in_doubt
        pull.data_done_at = self._clock()
        if pull.failure is None:
            self._costs.learn_copy(read.fill.num_bytes, job.elapsed_s)
        if job.error is not None:
            self._has_device_failed = self._device is not None
            message = f"cannot copy from a chunk into the blocks: {job.error!r}"
            code = job.error.code if isinstance(job.error, KvxferdError) else Code.INTERNAL
            pull.fail(PullFailure(code, message, self._clock()))

    def _on_failed(self, read: CoveringRead, failure: TransportError, pull: PullState | None = None) -> None:
        """End a read that failed. Only the chunk may still be written; `pull`: unless it has ended."""
        read.handle = None
        if failure.lost:
            self._budgets.pop(read.agent, None)
        self._move(read.chunk, ChunkState.FREE if failure.settled else ChunkState.LOST)
        if pull is not None:
            pull.fail(PullFailure(Code.TRANSPORT, failure.message, self._clock(), read.agent))

    def _move(self, chunk: Chunk, state: ChunkState) -> None:
        self._chunks.move(chunk, state, self._clock())


def _bytes_of(region: RegionAddress) -> Bytes:
    """Return a region's memory in this process."""
    memory = (ctypes.c_uint8 * region.size_bytes).from_address(region.address)
    return cast(Bytes, np.ctypeslib.as_array(memory))
