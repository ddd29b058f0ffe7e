"""A process's table of descriptors.

Promises:

* Beyond the limit an open or a copy raises OSError, and of several copies none is kept.
* What is closed makes room at once.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable


class DescriptorTable:
    """Numbers in place of descriptors, `limit` at most."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._next = 1000
        self.open_fds: set[int] = set()

    def open(self) -> int:
        """Return a new descriptor. Raises OSError."""
        if len(self.open_fds) >= self.limit:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self._next += 1
        self.open_fds.add(self._next)
        return self._next

    def dup_all(self, fds: Iterable[int]) -> tuple[int, ...]:
        """Return copies of all of them. Raises OSError, and then keeps none."""
        copies: list[int] = []
        try:
            for fd in fds:
                assert fd in self.open_fds
                copies.append(self.open())
        except OSError:
            self.close_all(copies)
            raise
        return tuple(copies)

    def close_all(self, fds: Iterable[int]) -> None:
        """Close them; one that is closed already does nothing."""
        self.open_fds.difference_update(fds)
