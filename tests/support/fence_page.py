"""A fence page without a daemon and a client."""

from __future__ import annotations

from kvxferd.memory import FencePage
from kvxferd.memory.fence import UnmappedFencePage
from kvxferd.memory.mapping import map_memfd
from kvxferd.wire.limits import FENCE_PAGE_BYTES


class SharedFencePage(FencePage):
    """A page as a daemon makes it and the client maps it. `fd` is the daemon's descriptor."""

    def __init__(self) -> None:
        self._made = UnmappedFencePage.create()
        super().__init__(map_memfd(self._made.fd, FENCE_PAGE_BYTES))

    @property
    def fd(self) -> int:
        return self._made.fd

    def close(self) -> None:
        super().close()
        self._made.close()
