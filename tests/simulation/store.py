"""One rank's memory, and what must be in it: whoever else writes there shows."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from enum import StrEnum, auto
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvxferd.ids import RegionId
from kvxferd.layout import RankLayout
from kvxferd.memory import SealedMemory, SharedMemory
from kvxferd.memory.device import DeviceMemory, ResidentMemory
from kvxferd.memory.device_pool import DevicePool
from kvxferd.memory.driver_registry import open_driver
from tests.simulation.contents import Contents, Lists
from tests.simulation.shapes import RankShape
from tests.support.fake_driver import FakeDriver

REUSED = 0xEE  # what an engine writes into blocks that it was given back
FREED = 0xDD  # and into memory that it was given back

Bytes = npt.NDArray[np.uint8]


@lru_cache(maxsize=4096)
def contents_of(layout: RankLayout) -> Contents:
    """Return what a layout's blocks hold."""
    return Contents(layout)


class MemoryKind(StrEnum):
    """Where a rank's memory is."""

    SHARED = auto()  # of the host, and other processes may map it
    RESIDENT = auto()  # of the host, for its own process alone
    GPU = auto()  # exported by the driver
    MIXED = auto()  # of the host and of the GPU, in turn


WITH_GPU = (MemoryKind.GPU, MemoryKind.MIXED)


class GpuMemory:
    """Memory of a simulated GPU, which its engine's kernels write: here its bytes are at the same address."""

    def __init__(self, size_bytes: int) -> None:
        self._driver = open_driver()
        self._pool = DevicePool(self._driver.devices()[0].uuid, self._driver)
        self.shared = DeviceMemory(self._pool.allocate(size_bytes).address, size_bytes, self._driver)
        self.buffer = (ctypes.c_uint8 * size_bytes).from_address(self.shared.address)

    @property
    def fd(self) -> int:
        """The descriptor of its pages."""
        assert isinstance(self._driver, FakeDriver)
        return self._driver.fd_of(self.shared.address)

    def __enter__(self) -> GpuMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()


class Store:
    """The memories of one rank while it has them, and their bytes as its engine has written them."""

    def __init__(self, shape: RankShape, kind: MemoryKind) -> None:
        self._shape, self._kind = shape, kind
        self._contents = contents_of(shape.layout)
        self.memories: list[SealedMemory | GpuMemory] = []
        with ExitStack() as undoing:
            for number, size in enumerate(shape.memory_bytes):
                is_of_gpu = kind is MemoryKind.GPU or (kind is MemoryKind.MIXED and number % 2)
                made = GpuMemory(size) if is_of_gpu else SealedMemory.create(size)
                self.memories.append(undoing.enter_context(made))
            undoing.pop_all()
        self._bytes = [np.frombuffer(memory.buffer, dtype=np.uint8) for memory in self.memories]
        self._expected = [real.copy() for real in self._bytes]
        self._is_lent = [np.zeros_like(real) for real in self._bytes]
        self._views = shape.views([memory.buffer for memory in self.memories])
        self._expected_views = shape.views(self._expected)
        self._lent_views = shape.views(self._is_lent)
        self.is_freed = False

    @property
    def num_fds(self) -> int:
        """How many descriptors its process has for it: of a sealed memory its own, and Python's mapping's."""
        return sum(1 if isinstance(memory, GpuMemory) else 2 for memory in self.memories)

    @property
    def regions(self) -> dict[RegionId, SharedMemory] | dict[RegionId, ResidentMemory]:
        """What `register` and `resume` take."""
        if self._kind is not MemoryKind.RESIDENT:
            shared = [one.shared if isinstance(one, GpuMemory) else one for one in self.memories]
            return self._shape.regions(shared)
        return {name: ResidentMemory(view.ctypes.data, view.size) for name, view in self._views.items()}

    def write(self, lists: Lists, number: int, start: int, end: int | None) -> None:
        """Write tokens [start, end) of request `number`, as the engine's kernels do; None: to its end."""
        if not self.is_freed:
            for views in (self._views, self._expected_views):
                self._contents.write(views, lists, number, start, end)

    def wrong(self, lists: Lists, number: int, num_tokens: int) -> str:
        """Return what is wrong of a delivered request; "" if nothing is."""
        found = self._contents.check(self._views, lists, number, num_tokens)
        return f"{found.count} bytes, first {found.first}" if found.count else ""

    def lend(self, lists: Lists) -> None:
        """Let somebody write these blocks."""
        self._fill(self._lent_views, lists, 1)

    def take_back(self, lists: Lists) -> None:
        """Let nobody write these blocks any more, and use them for something else."""
        self._fill(self._lent_views, lists, 0)
        self._fill(self._views, lists, REUSED)
        self._fill(self._expected_views, lists, REUSED)

    def masks_of(self, lists: Lists) -> list[Bytes]:
        """Return for each memory which of its bytes are in these blocks."""
        masks = [np.zeros_like(one) for one in self._bytes]
        self._fill(self._shape.views(masks), lists, 1)
        return masks

    def is_written(self, lists: Lists) -> bool:
        """Whether somebody has written these blocks since their engine did."""
        parts = zip(self._bytes, self._expected, self.masks_of(lists), strict=True)
        return any(np.any((real != expected) & (mask != 0)) for real, expected, mask in parts)

    def num_changed(self) -> int:
        """Return how many bytes that nobody may write are not as the engine has left them."""
        found = 0
        for real, expected, is_lent in zip(self._bytes, self._expected, self._is_lent, strict=True):
            if real.tobytes() != expected.tobytes():
                found += int(np.count_nonzero((real != expected) & (is_lent == 0)))
        return found

    def free(self) -> None:
        """Give all of it back: from now on it is somebody else's."""
        self.is_freed = True
        for arrays, value in ((self._bytes, FREED), (self._expected, FREED), (self._is_lent, 0)):
            for array in arrays:
                array[:] = value

    def _fill(self, views: dict[RegionId, Bytes], lists: Lists, value: int) -> None:
        if not self.is_freed:
            for name, listed in lists.items():
                if any(group.name == name for group in self._shape.layout.groups):
                    self._contents.overwrite(views, name, list(listed.ids), value)
