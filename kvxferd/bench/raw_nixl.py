"""Raw NIXL at its best: the runs that kvxferd's planner found, sorted and merged, in one post.

The agent has no progress thread; the waiting process polls.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxferd.bench.cases import Case, runs_of
from kvxferd.bench.read_loop import PostedRead
from kvxferd.bench.shapes import FIRST_RANK

Descriptors = npt.NDArray[np.uint64]


def agent_config(api: Any) -> Any:
    """Return the agent's configuration."""
    return api.nixl_agent_config(enable_prog_thread=False, num_threads=0, backends=["UCX"])


class RawNixlReader:
    """See `read_loop.SlotReader`."""

    def __init__(self, nixl: Any, remote: str, local_base: int, remote_base: int) -> None:
        self._nixl = nixl
        self._remote = remote
        self._bases = np.uint64(local_base), np.uint64(remote_base)
        self._case: Case | None = None
        self._descriptors: list[tuple[Descriptors, Descriptors]] = []

    def prepare(self, case: Case) -> None:
        """Compute every slot's descriptors: (address, length, device)."""
        if case == self._case:
            return
        self._case, self._descriptors = case, []
        for slot in range(case.slots):
            runs = runs_of(case, FIRST_RANK, slot)
            device = np.zeros_like(runs.length)
            sides = ((runs.local, self._bases[0]), (runs.remote, self._bases[1]))
            local, remote = (np.stack((at + base, runs.length, device), axis=1) for at, base in sides)
            self._descriptors.append((local, remote))

    def post(self, slot: int) -> PostedRead:
        """Pass the arrays to the library, and post."""
        nixl = self._nixl
        local, remote = self._descriptors[slot]
        began = time.perf_counter()
        handle = nixl.initialize_xfer(
            "READ", nixl.get_xfer_descs(local, "DRAM"), nixl.get_xfer_descs(remote, "DRAM"), self._remote
        )
        built = time.perf_counter()
        is_done = nixl.transfer(handle) == "DONE"
        return PostedRead(handle, slot, began, built, time.perf_counter(), is_done)

    def is_done(self, handle: Any) -> bool:
        """Poll a request; return whether it is done."""
        return bool(self._nixl.check_xfer_state(handle) == "DONE")

    def release(self, handle: Any) -> None:
        """Release a request's handle."""
        self._nixl.release_xfer_handle(handle)

    def slot_size(self, slot: int) -> tuple[int, int]:
        """Return the bytes and the descriptors of a slot."""
        lengths = self._descriptors[slot][0][:, 1]
        return int(lengths.sum()), len(lengths)
