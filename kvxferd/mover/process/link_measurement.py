"""Measures what reads from an agent cost, once it is connected and nothing else is to be read.

Two reads of as many descriptors: one of a word each, whose time is the descriptors', and one of a page each,
whose longer time is the bytes'. All read the first page that the source has to read, again and again: a read
of any other page might be the first, and make the source's memory grow. What lands is never looked at.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvxferd.ids import AgentName, RegionId
from kvxferd.mover.process.covering import PIECE_BYTES, ChunkFill, PlacedStretches, scatter
from kvxferd.mover.process.remote_agents import RemoteAgents
from kvxferd.mover.transport.base import ReadHandle, Span, Transport, TransportError
from kvxferd.plan import Runs
from kvxferd.plan.covering import Stretches
from kvxferd.plan.read_costs import CostModel, ReadShape
from kvxferd.plan.stretches import Copies, StretchForm
from kvxferd.wire.limits import FENCE_WORD_BYTES

_LOG = logging.getLogger(__name__)

PAGE_BYTES = 4096
# 0.6 ms over CMA and 3 over TCP for words: two orders above a round trip, and no longer than a slice.
NUM_DESCRIPTORS = 256
NUM_ROUNDS = 2  # the shorter counts: the first one pays for what the library sets up
MEASUREMENT_TIMEOUT_S = 2.0  # as long as a warm-up read is polled for
# Of private memory, twice, for as long as it takes: 2 ms, half of it for the pages.
COPY_BYTES = 2 << 20
COPY_ITEM_BYTES = 256  # one head of one token: 128 numbers of two bytes


class _MeasuringRead(NamedTuple):
    handle: ReadHandle
    agent: AgentName
    posted_at: float
    deadline: float


class _Pending(NamedTuple):
    """What is left to read from an agent: its page's address, and the times of the reads so far."""

    agent: AgentName
    address: int
    times: tuple[float, ...]


class LinkMeasurement:
    """The measurements that wait, one of which is under way. One thread."""

    def __init__(
        self,
        transport: Transport,
        remotes: RemoteAgents,
        costs: CostModel,
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._remotes = remotes
        self._costs = costs
        self._clock = clock
        self._pending: deque[_Pending] = deque()
        self._reads: list[_MeasuringRead] = []  # the last one is that of the first pending measurement
        self._target: int | None = None  # where everything lands
        self._is_copy_measured = False

    @property
    def is_busy(self) -> bool:
        """Whether there is something to post, or a read in flight that is worth polling for."""
        return bool(self._pending)

    @property
    def is_reading(self) -> bool:
        """Whether a read is in flight that is worth polling for."""
        return bool(self._pending) and self._is_under_way

    @property
    def _is_under_way(self) -> bool:
        return bool(self._reads) and self._reads[-1].agent == self._pending[0].agent

    def queue(self, agent: AgentName, address: int) -> None:
        """Measure reads of an agent's memory at an address, when there is time."""
        if not any(one.agent == agent for one in self._pending):
            self._pending.append(_Pending(agent, address, ()))

    def forget(self, agent: AgentName) -> None:
        """Forget an agent that was dropped."""
        self._pending = deque(one for one in self._pending if one.agent != agent)

    def step(self, is_idle: bool) -> bool:
        """Poll what is in flight, and post the next read where the engine is idle; return whether any did."""
        moved = self._poll()
        if self._pending and self._is_under_way:
            if self._clock() >= self._reads[-1].deadline:
                self._pending.popleft()
        elif self._pending and is_idle:
            self._post_next()
            moved = True
        return moved

    def _poll(self) -> bool:
        moved = False
        for read in tuple(self._reads):
            try:
                if not read.handle.done and not self._transport.poll(read.handle):
                    continue
            except TransportError as error:
                self._reads.remove(read)
                self._on_failed(read.agent, error)
            else:
                self._reads.remove(read)
                self._transport.release(read.handle)
                self._remotes.read_ended(read.agent)
                self._on_done(read, self._clock() - read.posted_at)
            moved = True
        return moved

    def _post_next(self) -> None:
        if not self._is_copy_measured:
            self._is_copy_measured = True
            self._costs.start_copy(measure_copy())
            return
        agent, address, times = self._pending[0]
        if self._costs.has_learnt(agent) or self._remotes.ensure_loaded(agent):
            self._pending.popleft()  # slices are the better measurement
            return
        size = FENCE_WORD_BYTES if len(times) < NUM_ROUNDS else page_rest(address)
        began = self._clock()
        try:
            target = self._target_address()
        except (OSError, TransportError) as error:
            _LOG.info("agent not measured: agent=%s reason=%s", agent, error)
            self._pending.popleft()
            return
        columns = (np.full(NUM_DESCRIPTORS, number, dtype=np.uint64) for number in (target, address, size))
        self._remotes.read_started(agent)
        try:
            handle = self._transport.post(agent, Runs(*columns))
        except TransportError as error:
            self._on_failed(agent, error)
            return
        self._reads.append(_MeasuringRead(handle, agent, began, began + MEASUREMENT_TIMEOUT_S))
        if handle.done:
            self._poll()

    def _on_done(self, read: _MeasuringRead, elapsed_s: float) -> None:
        if not self._pending or self._pending[0].agent != read.agent:
            return  # dropped meanwhile, or too late
        one = self._pending.popleft()
        times = (*one.times, elapsed_s)
        if len(times) < 2 * NUM_ROUNDS:
            self._pending.appendleft(one._replace(times=times))
            return
        words, pages = min(times[:NUM_ROUNDS]), min(times[NUM_ROUNDS:])
        link = self._costs.start_link(
            read.agent,
            ReadShape(NUM_DESCRIPTORS, NUM_DESCRIPTORS * FENCE_WORD_BYTES),
            words,
            ReadShape(NUM_DESCRIPTORS, NUM_DESCRIPTORS * page_rest(one.address)),
            pages,
        )
        _LOG.info(
            "agent measured: agent=%s descriptor_us=%.2f gigabytes_per_s=%.2f",
            read.agent,
            1e6 * link.descriptor_s,
            link.bytes_per_s / 1e9,
        )

    def _on_failed(self, agent: AgentName, error: TransportError) -> None:
        _LOG.info("agent not measured: agent=%s reason=%s", agent, error.message)
        self.forget(agent)
        self._remotes.read_ended(agent, error.lost)

    def _target_address(self) -> int:
        """Return where reads land: memory that is kept, because one of them may land at any time."""
        if self._target is None:
            memory = mmap.mmap(-1, PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            self._transport.register(Span(address, PAGE_BYTES))
            self._memory = memory
            self._target = address
        return self._target


def page_rest(address: int) -> int:
    """Return how many bytes of a page lie from the address on."""
    return PAGE_BYTES - address % PAGE_BYTES


def measure_copy() -> float:
    """Return how many bytes a second a scatter from heads first to tokens first writes."""
    memory = [mmap.mmap(-1, COPY_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(2)]
    source, target = (np.frombuffer(one, dtype=np.uint8) for one in memory)
    source.fill(1)
    target.fill(1)  # the pages are there from now on, as those of blocks are
    num_heads, num_tokens = 4, 16
    token = np.arange(num_tokens, dtype=np.int64)
    copies = Copies(COPY_ITEM_BYTES, token * COPY_ITEM_BYTES, token * num_heads * COPY_ITEM_BYTES, None)
    form = StretchForm(num_tokens * COPY_ITEM_BYTES, 1, (copies,))
    number = np.arange(COPY_BYTES // form.size_bytes, dtype=np.int64)
    origin = number // num_heads * (num_heads * form.size_bytes) + number % num_heads * COPY_ITEM_BYTES
    region = RegionId("")
    placed = PlacedStretches(Stretches(form, region, number * form.size_bytes, origin[:, None]), 0)
    nothing = number[:0]
    pieces = scatter(ChunkFill(nothing, nothing, nothing, (placed,), COPY_BYTES), source, {region: target})
    times = [time.perf_counter()]
    times.extend(time.perf_counter() for _ in pieces)
    return PIECE_BYTES / float(np.median(np.diff(times)))  # a piece that was interrupted does not count
