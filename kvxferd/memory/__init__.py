"""Memory that one process exports and another maps. Standard library only: the client imports it."""

from kvxferd.memory.fence import FencePage
from kvxferd.memory.mapping import Mapping, map_memfd
from kvxferd.memory.memfd import SealedMemory
from kvxferd.memory.validate import check_memfd

__all__ = ["FencePage", "Mapping", "SealedMemory", "check_memfd", "map_memfd"]
