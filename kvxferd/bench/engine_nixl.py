"""NIXL as the in-engine connector sets it up: progress thread on, four threads, prepared lists.

Every block of every tensor, or of several that share a page, is a descriptor in a list that is
prepared once. For a request the engine's thread computes the indices from the block ids, in the
order in which the lists name them, and posts them; NIXL merges indices that are neighbours in that
order.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvxferd.bench.cases import BlockIds, Case, block_lists, runs_of
from kvxferd.bench.read_loop import PostedRead
from kvxferd.bench.shapes import FIRST_RANK, BenchDeployment, Role
from kvxferd.layout import GroupKind, RankLayout

NUM_THREADS = 4


def agent_config(api: Any) -> Any:
    """Return the agent's configuration."""
    return api.nixl_agent_config(enable_prog_thread=True, num_threads=NUM_THREADS, backends=["UCX"])


class EngineNixlReader:
    """See `read_loop.SlotReader`."""

    def __init__(
        self, nixl: Any, remote: str, local_base: int, remote_base: int, deployment: BenchDeployment
    ) -> None:
        self._nixl = nixl
        layout = deployment.layout()
        ranges = block_ranges(layout)
        self._range_starts = _first_descriptors(ranges)
        self._per_id: dict[str, int] = {
            group.name: group.physical_blocks_per_logical for group in layout.groups
        }
        self._local = nixl.prep_xfer_dlist("NIXL_INIT_AGENT", _descriptors(ranges, local_base), "DRAM")
        self._remote = nixl.prep_xfer_dlist(remote, _descriptors(ranges, remote_base), "DRAM")
        self._case: Case | None = None
        self._lists: list[tuple[dict[str, BlockIds], dict[str, BlockIds]]] = []
        self._slot_sizes: list[tuple[int, int]] = []

    def close(self) -> None:
        """Release the prepared lists."""
        self._nixl.release_dlist_handle(self._local)
        self._nixl.release_dlist_handle(self._remote)

    def prepare(self, case: Case) -> None:
        """Store every slot's block ids: the engine has them when the request comes."""
        if case == self._case:
            return
        self._case = case
        sides: tuple[Role, Role] = ("sink", "source")
        self._lists, self._slot_sizes = [], []
        for slot in range(case.slots):
            here, there = (block_lists(case, role, slot) for role in sides)
            self._lists.append((here, there))
            length = runs_of(case, FIRST_RANK, slot).length
            self._slot_sizes.append((int(length.sum()), len(self._indices(here))))

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

    def is_done(self, handle: Any) -> bool:
        """Poll a request; return whether it is done."""
        return bool(self._nixl.check_xfer_state(handle) == "DONE")

    def release(self, handle: Any) -> None:
        """Release a request's handle."""
        self._nixl.release_xfer_handle(handle)

    def slot_size(self, slot: int) -> tuple[int, int]:
        """Return the bytes of a slot, and its descriptors before NIXL merges any."""
        return self._slot_sizes[slot]

    def _indices(self, lists: dict[str, BlockIds]) -> npt.NDArray[np.int32]:
        found = []
        for group, firsts in self._range_starts.items():
            per_id = self._per_id[group]
            blocks: npt.NDArray[np.int32] = lists[group]
            if per_id > 1:
                blocks = (
                    (blocks[:, None] * per_id + np.arange(per_id, dtype=np.int32)).ravel().astype(np.int32)
                )
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
