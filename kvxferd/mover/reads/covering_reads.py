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
from kvxferd.ids import RegionId
from kvxferd.mover.chunks.chunk_pool import Chunk, ChunkPool, ChunkState, HostChunk
from kvxferd.mover.chunks.covering import Bytes, CoverSlicer, scatter_pieces
from kvxferd.mover.chunks.device_scatter import DeviceScatterer
from kvxferd.mover.chunks.scatterer import Scatterer, ScatterJob
from kvxferd.mover.reads.pull_state import ChunkRead, PostedRead, PullFailure, PullState, Unposted
from kvxferd.mover.reads.remote_agents import RemoteAgents
from kvxferd.mover.transport.base import HOST, MemoryKind, TransportError
from kvxferd.plan.read_costs import CostModel
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
        costs: CostModel,
    ) -> None:
        """`costs`: of all slices, the direct reads' too."""
        self._remote_agents = remote_agents
        self._clock = clock
        self._chunks = chunks
        self._scatterer = scatterer
        self._costs = costs
        self._regions: dict[RegionId, Bytes] = {}
        self._device: DeviceScatterer | None = None
        self._has_device_failed = False  # all that is expanded from now on is read directly
        self._draining: list[PostedRead] = []

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
        return self._device is None or self._device.can_scatter(form)

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
            assert read.handle is not None and read.into is not None
            try:
                if not self._remote_agents.poll(read.agent, read.handle):
                    continue
                is_over = True
            except TransportError as failure:
                is_over = failure.settled
            self._draining.remove(read)
            self.end_read(read.into.chunk, is_over=is_over)
            moved = True
        if draining:
            self._chunks.report_changes(self._clock())
        return moved

    def next_chunk(
        self, pull: PullState, one: Unposted, slicer: CoverSlicer, budget_bytes: int, others_wait: bool
    ) -> ChunkRead | None:
        """Return what a pull reads next, and into which chunk; where there is none, queue what was next.

        `others_wait`: another pull waits for a chunk. A pull that has waited for long, or for a chunk that
        will never come, reads the rest directly. A pull whose source is slow waits for the source: direct
        reads would come no sooner, and a source that is stopped would keep the engine's blocks in doubt.
        """
        if self._has_device_failed:
            pull.unposted.append(one)
            pull.read_directly()
            return None
        chunk = self._acquire(pull, one, others_wait)
        return (
            None if chunk is None else ChunkRead(chunk, slicer.next_fill(budget_bytes, chunk.span.size_bytes))
        )

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

    def poll_scatter(self, pull: PullState, read: PostedRead) -> bool:
        """Release a chunk that is scattered; return whether it is."""
        assert read.scatter is not None and read.into is not None
        if not read.scatter.is_over:
            return False
        self._on_scatter_over(pull, read, read.into, read.scatter)
        return True

    def help_scatter(self) -> bool:
        """Make one copy of a scatter, where nothing else is to be done; return whether there was any."""
        return self._scatterer.help()

    def let_go(self, pull: PullState) -> None:
        """Have a pull that has failed scatter nothing more. A scatter that runs stays in `pull.reads`."""
        for read in tuple(pull.reads):
            if read.scatter is not None:
                read.scatter.cancel()
            elif read.into is not None:
                pull.reads.remove(read)
                self._move(read.into.chunk, ChunkState.DRAINING)
                self._draining.append(read)

    def close(self) -> None:
        """Return once no scatter runs, or ever will."""
        self._scatterer.close()
        if self._device is not None:
            self._device.close()

    # --- how a read ends

    def end_read(self, chunk: Chunk, *, is_over: bool) -> None:
        """Release a chunk whose read has ended. `is_over`: the read can write it no more."""
        self._move(chunk, ChunkState.FREE if is_over else ChunkState.LOST)

    def start_scatter(self, pull: PullState, read: PostedRead, into: ChunkRead) -> None:
        """Copy what was read into the blocks. The pull has not failed."""
        pull.started = True  # the blocks are written from now on
        self._move(into.chunk, ChunkState.SCATTERING)
        if self._device is not None:
            read.scatter = self._device.start_fill(into.fill, into.chunk)
            return
        assert isinstance(into.chunk, HostChunk)
        read.scatter = ScatterJob(scatter_pieces(into.fill, into.chunk.bytes, self._regions))
        self._scatterer.start(read.scatter)

    def _on_scatter_over(self, pull: PullState, read: PostedRead, into: ChunkRead, job: ScatterJob) -> None:
        pull.reads.remove(read)
        self.end_read(into.chunk, is_over=not job.chunk_in_doubt)
        pull.in_doubt |= job.blocks_in_doubt
        pull.data_done_at = self._clock()
        if pull.failure is None:
            self._costs.learn_copy(into.fill.num_bytes, job.elapsed_s)
        if job.error is not None:
            self._has_device_failed = self._device is not None
            message = f"cannot copy from a chunk into the blocks: {job.error!r}"
            code = job.error.code if isinstance(job.error, KvxferdError) else Code.INTERNAL
            pull.fail(PullFailure(code, message, self._clock()))

    def _move(self, chunk: Chunk, state: ChunkState) -> None:
        self._chunks.move(chunk, state, self._clock())


def _bytes_of(region: RegionAddress) -> Bytes:
    """Return a region's memory in this process."""
    memory = (ctypes.c_uint8 * region.size_bytes).from_address(region.address)
    return cast(Bytes, np.ctypeslib.as_array(memory))
