"""Scatters in a GPU: from a chunk in its memory into the blocks there, by the driver's copies of rows.

A stretch's copies are few patterns of equal rows (`kvxferd.plan.copy_patterns`), and one launch copies a
pattern of many stretches. The engine launches in its own steps; the GPU makes the copies meanwhile.

Started copies cannot be taken back. So a scatter is over when an event behind its last copy is done, and by
nothing else: where the driver cannot report that, the blocks stay in doubt until the mover is dead.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from kvxferd.errors import DeviceError
from kvxferd.ids import RegionId
from kvxferd.memory.device_pool import DevicePool
from kvxferd.memory.driver import PAIRS_PER_LAUNCH, Driver, Rows
from kvxferd.mover.chunks.chunk_pool import Chunk
from kvxferd.mover.chunks.covering import ChunkFill, PlacedStretches
from kvxferd.mover.chunks.scatterer import ScatterJob
from kvxferd.mover.transport.base import MemoryKind, MemoryRange
from kvxferd.plan.copy_patterns import CopyPattern, form_patterns
from kvxferd.plan.run_shapes import Int64s
from kvxferd.plan.stretches import StretchForm
from kvxferd.wire.common import RegionAddress

_LOG = logging.getLogger(__name__)

# Launches in one step of the engine, which then takes 0.1 ms: a launch takes 6 us, and 1,024 addresses 30 to
# make (docs/adr/0070-gpu-scatter.md).
LAUNCHES_PER_STEP = 2
# A launch takes as long as some ten descriptors, and serves all stretches of a chunk: 16 or more where it is
# full. So copies gain where a stretch has two or more of a length.
MIN_COPIES_PER_LENGTH = 2


class RowCopies(NamedTuple):
    """One launch: `rows` between each pair of addresses, `PAIRS_PER_LAUNCH` or less."""

    to: Int64s
    source: Int64s
    rows: Rows


class DeviceChunk(Chunk):
    """A range of the GPU's memory, of a pool of the mover's own."""

    def __init__(self, pool: DevicePool, size_bytes: int, kind: MemoryKind) -> None:
        """Raises DeviceError."""
        self._pool = pool
        self._address = pool.allocate(size_bytes).address
        super().__init__(MemoryRange(self._address, size_bytes, kind.mem_type, kind.device))

    def free(self) -> None:
        self._pool.free(self._address)


class DeviceScatterJob(ScatterJob):
    """One chunk's scatter. It is over once its event is done."""

    def __init__(
        self,
        copies: Iterator[RowCopies],
        driver: Driver,
        uuid: str,
        stream: Any,
        flush: Callable[[], None] | None,
    ) -> None:
        super().__init__(iter(()))
        self._copies = copies
        self._driver = driver
        self._uuid = uuid
        self._stream = stream
        self._flush = flush
        self._began = 0.0
        self._has_started = False  # a copy may run
        self._event: Any = None

    @property
    def is_waiting(self) -> bool:
        """Whether all its copies are started."""
        return self._event is not None

    def run_piece(self) -> None:
        """Start some copies, or look whether they are done. Never waits."""
        try:
            with self._driver.on(self._uuid):
                if self._event is not None:
                    self._poll()
                elif not self._start_some():
                    self._end_starting()
        except Exception as error:
            # Nothing shows any more when the copies are done.
            _LOG.exception("end of copies not known")
            self._set_error(error)
            self.blocks_in_doubt = self.chunk_in_doubt = True
            self.is_over = True

    def _start_some(self) -> bool:
        """Start the next copies; return whether there may be more."""
        if self._is_cancelled or self.error is not None:
            return False
        try:
            if not self._began:
                self._began = time.perf_counter()
                self._make_visible()
            few = list(islice(self._copies, LAUNCHES_PER_STEP))
            if few:
                self._has_started = True  # also where one is refused: those before it run
                for to, source, rows in few:
                    self._driver.copy_rows(to.data, source.data, rows, self._stream)
        except Exception as error:
            _LOG.exception("chunk not scattered")
            self._set_error(error)
            return False
        return len(few) == LAUNCHES_PER_STEP

    def _make_visible(self) -> None:
        if self._flush is None:
            return
        try:
            self._flush()
        except DeviceError:
            self.chunk_in_doubt = True  # bytes that the network card has sent may still arrive
            raise

    def _end_starting(self) -> None:
        if self._has_started:
            self._event = self._driver.record(self._stream)
        else:
            self.is_over = True

    def _poll(self) -> None:
        if self._driver.is_done(self._event):
            self._driver.drop_event(self._event)
            self.elapsed_s = time.perf_counter() - self._began
            self.is_over = True

    def _set_error(self, error: Exception) -> None:
        if self.error is None:
            self.error = error


class DeviceScatterer:
    """Scatters into the regions of one GPU."""

    def __init__(
        self,
        driver: Driver,
        uuid: str,
        regions: Sequence[RegionAddress],
        flush: Callable[[], None] | None,
    ) -> None:
        """`flush` makes what a network card has written visible to the GPU's own work; None: not needed.

        Raises DeviceError.
        """
        self._driver = driver
        self._uuid = uuid
        self._flush = flush
        self._pool = DevicePool(uuid, driver)
        self._regions = {region.region: region for region in regions}
        self._patterns: WeakKeyDictionary[StretchForm, list[CopyPattern]] = WeakKeyDictionary()
        self._jobs: deque[DeviceScatterJob] = deque()
        with driver.on(uuid):
            self._stream = driver.open_stream()
        self.kind = MemoryKind(regions[0].mem_type, regions[0].device)

    def can_scatter(self, form: StretchForm) -> bool:
        """Whether the form's copies are few launches: one for each length."""
        return form.num_copies >= MIN_COPIES_PER_LENGTH * len(form.copies)

    def _patterns_of(self, form: StretchForm) -> list[CopyPattern]:
        if form not in self._patterns:
            self._patterns[form] = form_patterns(form)
        return self._patterns[form]

    def make_chunk(self, size_bytes: int) -> DeviceChunk:
        """Allocate a chunk on the GPU. Raises DeviceError."""
        return DeviceChunk(self._pool, size_bytes, self.kind)

    def start_fill(self, fill: ChunkFill, chunk: Chunk) -> DeviceScatterJob:
        """Queue the scatter of a chunk whose read is done."""
        copies = self._copies(fill, chunk.span)
        job = DeviceScatterJob(copies, self._driver, self._uuid, self._stream, self._flush)
        self._jobs.append(job)
        return job

    def _copies(self, fill: ChunkFill, chunk: MemoryRange) -> Iterator[RowCopies]:
        for placed in fill.placed:
            yield from row_copies(placed, self._patterns_of(placed.stretches.form), chunk, self._regions)

    def step(self) -> bool:
        """Start copies of one scatter, and look which are done; return whether there was any progress."""
        moved = has_started = False
        for job in tuple(self._jobs):
            if job.is_waiting or not has_started:
                has_started |= not job.is_waiting
                job.run_piece()
                moved |= has_started or job.is_over
            if job.is_over:
                self._jobs.remove(job)
        return moved

    def close(self) -> None:
        """Return once no copy runs, or ever will, and free the chunks. The transport is closed."""
        self._jobs.clear()
        try:
            # Without a limit, as the thread that scatters host memory is joined.
            with self._driver.on(self._uuid):
                self._driver.synchronize(self._stream)
                self._driver.close_stream(self._stream)
            self._pool.close()
        except DeviceError as error:
            _LOG.error("copies not ended: reason=%s", error.message)


def row_copies(
    placed: PlacedStretches,
    patterns: Sequence[CopyPattern],
    chunk: MemoryRange,
    regions: Mapping[RegionId, RegionAddress],
) -> Iterator[RowCopies]:
    """Yield the copies of stretches in a chunk. Raises IndexError rather than leave chunk or region."""
    stretches = placed.stretches
    region = regions[stretches.local_region]
    images = placed.offsets + chunk.address
    for one in (part for pattern in patterns for part in pattern.split(PAIRS_PER_LAUNCH)):
        at_once = PAIRS_PER_LAUNCH // len(one.image)
        for start in range(0, len(images), at_once):
            few = slice(start, start + at_once)
            source = images[few, None] + one.image
            to = stretches.local[few][:, one.block] + (one.local + region.address)
            if not (
                _is_inside(source, one.image_pitch, one, chunk.address, chunk.size_bytes)
                and _is_inside(to, one.local_pitch, one, region.address, region.size_bytes)
            ):
                raise IndexError(f"a copy of rows leaves the chunk, or region {region.region}")
            rows = Rows(one.width, one.rows, one.local_pitch, one.image_pitch)
            yield RowCopies(to.ravel(), source.ravel(), rows)


def _is_inside(first_rows: Int64s, pitch: int, pattern: CopyPattern, address: int, size_bytes: int) -> bool:
    """Whether rows that begin at these addresses lie in a range of memory."""
    before, after = sorted((0, (pattern.rows - 1) * pitch))
    end = int(first_rows.max()) + after + pattern.width
    return address <= int(first_rows.min()) + before and end <= address + size_bytes
