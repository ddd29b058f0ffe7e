"""NIXL without a daemon: raw, at its best, and as the in-engine connector sets it up.

An agent runs in a plain process, with the memory of a rank. The waiting process polls by hand.
"""

from __future__ import annotations

import os
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvxferd.bench.cases import BlockIds, Case, block_lists, layout_of, runs_of
from kvxferd.bench.rank import ProcessMemory, Sample
from kvxferd.errors import EngineError
from kvxferd.layout import GroupKind, RankLayout
from kvxferd.memory import Mapping, map_memfd
from kvxferd.mover.shm import make_shm_directory
from kvxferd.mover.transport.nixl import import_library
from kvxferd.tooling.engine_pair import EnginePair

ENGINE_NUM_THREADS = 4


class AttachedMemory(NamedTuple):
    """What a reader needs of the source's memory."""

    metadata: bytes
    address: int


class PostedRead(NamedTuple):
    """A request in flight."""

    handle: Any
    slot: int
    began: float
    built: float
    posted: float
    is_done: bool


class SlotReader(ABC):
    """Reads the slots of a case from another agent's memory."""

    def __init__(self, nixl: Any) -> None:
        self._nixl = nixl
        self._case: Case | None = None
        self._sizes: list[tuple[int, int]] = []  # by slot: bytes, and descriptors before NIXL merges any

    def move(self, case: Case, count: int, window: int) -> list[Sample]:
        """Move `count` requests, the n-th in slot n modulo the number of slots; return a sample of each.

        At most `window` are in flight.
        """
        if case != self._case:
            self._case, self._sizes = case, self.prepare(case)
        samples: dict[int, Sample] = {}
        under_way: deque[tuple[int, PostedRead]] = deque()
        following = 0
        while len(samples) < count:
            while following < count and len(under_way) < window:
                under_way.append((following, self.post(following % case.slots)))
                following += 1
            number, posted = under_way.popleft()
            if not posted.is_done and not self.is_done(posted.handle):
                under_way.append((number, posted))
                continue
            ended = posted.posted if posted.is_done else time.perf_counter()
            self.release(posted.handle)
            size = self._sizes[posted.slot]
            samples[number] = Sample(posted.began, posted.built, posted.posted, ended, *size)
        return [samples[number] for number in range(count)]

    @abstractmethod
    def prepare(self, case: Case) -> list[tuple[int, int]]:
        """Compute everything that need not be timed; return each slot's bytes and descriptors."""

    @abstractmethod
    def post(self, slot: int) -> PostedRead:
        """Start reading a slot."""

    def is_done(self, handle: Any) -> bool:
        """Poll the library, which progresses the request; return whether it is done."""
        return bool(self._nixl.check_xfer_state(handle) == "DONE")

    def release(self, handle: Any) -> None:
        """Release a request's handle."""
        self._nixl.release_xfer_handle(handle)

    @abstractmethod
    def close(self) -> None:
        """Release what was prepared."""


class RawReader(SlotReader):
    """The runs that kvxferd's planner found, sorted and merged, in one post."""

    def __init__(self, nixl: Any, remote: str, bases: tuple[int, int]) -> None:
        super().__init__(nixl)
        self._remote, self._bases = remote, bases
        self._descriptors: list[list[npt.NDArray[np.uint64]]] = []

    def close(self) -> None:
        """Do nothing: every request was released."""

    def prepare(self, case: Case) -> list[tuple[int, int]]:
        """Compute every slot's descriptors: (address, length, device)."""
        slots = [runs_of(case, slot) for slot in range(case.slots)]
        self._descriptors = [
            [
                np.stack((at + np.uint64(base), runs.length, np.zeros_like(runs.length)), axis=1)
                for at, base in zip((runs.local, runs.remote), self._bases, strict=True)
            ]
            for runs in slots
        ]
        return [(int(runs.length.sum()), len(runs.length)) for runs in slots]

    def post(self, slot: int) -> PostedRead:
        """Pass the arrays to the library, and post."""
        nixl, (local, remote) = self._nixl, self._descriptors[slot]
        began = time.perf_counter()
        handle = nixl.initialize_xfer(
            "READ", nixl.get_xfer_descs(local, "DRAM"), nixl.get_xfer_descs(remote, "DRAM"), self._remote
        )
        built = time.perf_counter()
        is_done = nixl.transfer(handle) == "DONE"
        return PostedRead(handle, slot, began, built, time.perf_counter(), is_done)


class EngineReader(SlotReader):
    """Reads as the connector does: every block of every tensor is a descriptor in a list prepared once.

    Several tensors that share a page are one. For a request the engine's thread computes the indices from
    the block ids, in the order in which the lists name them, and posts them; NIXL merges indices that are
    neighbours in that order.
    """

    def __init__(self, nixl: Any, remote: str, bases: tuple[int, int], layout: RankLayout) -> None:
        super().__init__(nixl)
        ranges = block_ranges(layout)
        self._range_starts = _first_descriptors(ranges)
        self._per_id = {group.name: group.physical_blocks_per_logical for group in layout.groups}
        self._local = nixl.prep_xfer_dlist("NIXL_INIT_AGENT", _descriptors(ranges, bases[0]), "DRAM")
        self._remote = nixl.prep_xfer_dlist(remote, _descriptors(ranges, bases[1]), "DRAM")
        self._lists: list[tuple[dict[str, BlockIds], dict[str, BlockIds]]] = []

    def close(self) -> None:
        """Release the prepared lists."""
        self._nixl.release_dlist_handle(self._local)
        self._nixl.release_dlist_handle(self._remote)

    def prepare(self, case: Case) -> list[tuple[int, int]]:
        """Store every slot's block ids: the engine has them when the request comes."""
        slots = range(case.slots)
        self._lists = [
            (block_lists(case, "decode", slot), block_lists(case, "prefill", slot)) for slot in slots
        ]
        num_bytes = [int(runs_of(case, slot).length.sum()) for slot in slots]
        return [(num_bytes[slot], len(self._indices(self._lists[slot][0]))) for slot in slots]

    def post(self, slot: int) -> PostedRead:
        """Compute the indices, make the request, and post it."""
        here, there = self._lists[slot]
        began = time.perf_counter()
        handle = self._nixl.make_prepped_xfer(
            "READ", self._local, self._indices(here), self._remote, self._indices(there)
        )
        is_done = self._nixl.transfer(handle) == "DONE"
        # An engine computes nothing beforehand, so all of it is timed.
        return PostedRead(handle, slot, began, began, time.perf_counter(), is_done)

    def _indices(self, lists: dict[str, BlockIds]) -> npt.NDArray[np.int32]:
        found = []
        for group, firsts in self._range_starts.items():
            per_id = self._per_id[group]  # type: ignore[index]
            blocks = (lists[group][:, None] * per_id + np.arange(per_id, dtype=np.int32)).ravel()
            found.append((firsts[:, None] + blocks).ravel())
        return np.concatenate(found).astype(np.int32, copy=False)


class BlockRange(NamedTuple):
    """What lies in one piece in each block of a group."""

    group: str
    num_blocks: int
    offset: int  # in block 0
    block_stride: int
    length: int
    layer: int  # the last one in it


def block_ranges(layout: RankLayout) -> list[BlockRange]:
    """Return what a connector registers: each tensor, or as one those that interleave, and layers that touch.

    Every block of the layout has to be in one piece: LHBNC has none that are.
    """
    groups = {group.name: group for group in layout.groups}
    found: list[BlockRange] = []
    for tensor in sorted(layout.tensors, key=lambda one: (one.group, one.offset)):
        group = groups[tensor.group]
        length = tensor.num_units * tensor.content_bytes
        if group.kind is not GroupKind.STATE:
            items = group.block_tokens // group.physical_blocks_per_logical // tensor.granule_tokens
            length = (items - 1) * tensor.token_stride + (tensor.num_units - 1) * tensor.unit_stride
            length += (tensor.num_chunks - 1) * tensor.chunk_stride + tensor.chunk_bytes
        pages = group.num_blocks * group.physical_blocks_per_logical
        made = BlockRange(group.name, pages, tensor.offset, tensor.block_stride, length, tensor.layer)
        last = found[-1] if found and found[-1].group == made.group else None
        if last is None or made.offset > (end := last.offset + last.length):
            found.append(made)
        elif made.offset < end or made.layer != last.layer:
            length = max(end, made.offset + made.length) - last.offset
            found[-1] = last._replace(length=length, layer=made.layer)
        else:
            found.append(made)
    return found


def _first_descriptors(ranges: Sequence[BlockRange]) -> dict[str, npt.NDArray[np.int32]]:
    """Return, by group, the index of each of its ranges' first descriptor in the list."""
    found: dict[str, list[int]] = {}
    position = 0
    for one in ranges:
        found.setdefault(one.group, []).append(position)
        position += one.num_blocks
    return {group: np.array(firsts, dtype=np.int32) for group, firsts in found.items()}


def _descriptors(ranges: Sequence[BlockRange], base: int) -> npt.NDArray[np.uint64]:
    """Return (address, length, device) of every block of every range, range by range."""
    found = []
    for one in ranges:
        address = base + one.offset + np.arange(one.num_blocks, dtype=np.uint64) * one.block_stride
        found.append(np.stack((address, np.full_like(address, one.length), np.zeros_like(address)), axis=1))
    return np.concatenate(found).astype(np.uint64, copy=False)


class NixlAgent:
    """An agent in a process of its own, the memory that it has registered, and its reader.

    Who ends the process removes its directory in /dev/shm.
    """

    def __init__(self, is_engine: bool) -> None:
        """`is_engine`: as the in-engine connector has it, with a progress thread; else none."""
        self._is_engine = is_engine
        make_shm_directory()
        api = import_library("auto").api
        num_threads = ENGINE_NUM_THREADS if is_engine else 0
        config = api.nixl_agent_config(
            enable_prog_thread=is_engine, num_threads=num_threads, backends=["UCX"]
        )
        self._nixl: Any = api.nixl_agent(f"bench-{uuid.uuid4()}", config)
        self._layout: RankLayout
        self._memory: Mapping | None = None
        self._registered: Any = None
        self._remote = ""
        self._reader: SlotReader | None = None
        self._is_polling = False

    def progress(self) -> bool:
        """Poll for readers; return False if there are none to serve."""
        if self._is_polling:
            self._nixl.get_new_notifs()
        return self._is_polling

    def set_polling(self, is_polling: bool) -> None:
        """Poll by hand between calls, so that others can read from this process, or no longer."""
        self._is_polling = is_polling

    def attach(self, pair: EnginePair, memory: ProcessMemory) -> AttachedMemory:
        """Register the memory of a first rank in place of the previous one.

        Raises EngineError if this user may not open it.
        """
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._memory is not None:
            self._nixl.deregister_memory(self._registered)
            self._memory.unmap()
        self._layout = layout_of(pair)
        size_bytes = self._layout.regions[0].size_bytes
        self._memory = _map_process_memory(memory, size_bytes)
        self._registered = self._nixl.register_memory([(self._memory.address, size_bytes, 0, "")], "DRAM")
        return AttachedMemory(self._nixl.get_agent_metadata(), self._memory.address)

    def add_remote(self, source: AttachedMemory) -> None:
        """Read from that memory from now on."""
        if self._remote:
            # The metadata is loaded anew, so that the agent keeps nothing of memory that is gone.
            self._nixl.remove_remote_agent(self._remote)
        name = self._nixl.add_remote_agent(source.metadata)
        self._remote = name.decode() if isinstance(name, bytes) else name
        assert self._memory is not None
        bases = self._memory.address, source.address
        if self._is_engine:
            self._reader = EngineReader(self._nixl, self._remote, bases, self._layout)
        else:
            self._reader = RawReader(self._nixl, self._remote, bases)

    def move(self, case: Case, count: int, window: int) -> list[Sample]:
        """See `SlotReader.move`."""
        assert self._reader is not None
        return self._reader.move(case, count, window)


def _map_process_memory(place: ProcessMemory, size_bytes: int) -> Mapping:
    try:
        fd = os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise EngineError(f"cannot open the memory of process {place.pid}: {error.strerror}") from error
    try:
        return map_memfd(fd, size_bytes)
    finally:
        os.close(fd)
