"""Memory that one process exports and another maps: memfds, fence pages, and GPU memory by its driver.

The client imports it, so it imports the standard library and msgspec alone; CUDA and torch are imported by
the calls that need them.
"""

from kvxferd.memory.fence import FencePage
from kvxferd.memory.mapping import Mapping, map_memfd
from kvxferd.memory.memfd import SealedMemory
from kvxferd.memory.share import MemoryPlacement, SharedMemory, share, share_all, share_regions
from kvxferd.memory.validate import check_memfd

__all__ = [
    "FencePage",
    "Mapping",
    "MemoryPlacement",
    "SealedMemory",
    "SharedMemory",
    "check_memfd",
    "map_memfd",
    "share",
    "share_all",
    "share_regions",
]
