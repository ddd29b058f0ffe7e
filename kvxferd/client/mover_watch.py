"""Watches movers for their end: a descriptor is readable once the mover can write nothing any more.

A child's descriptor is the pidfd that its daemon sends. A resident mover, which the client started,
has one of its own.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvxferd.ids import BootId
from kvxferd.wire.worker import RegionExport


class ResidentMover(Protocol):
    """A mover that is a thread of this process; `kvxferd.resident` makes them."""

    @property
    def daemon_end(self) -> int:
        """The daemon's end of the mover's socket, to be sent to the daemon."""

    @property
    def is_quiesced(self) -> bool:
        """Whether its agent is gone: the mover neither reads nor writes memory any more."""

    def fileno(self) -> int:
        """Return a descriptor that is readable once the mover is quiesced. The mover keeps it open."""

    def close_daemon_end(self) -> None:
        """Close the daemon's end here: the daemon has its copy, or will not get one any more. Idempotent."""

    def stop(self) -> None:
        """Request the mover's end, which may take as long as its library does; never waits. Idempotent."""

    def wait(self, timeout_s: float) -> bool:
        """Return whether the mover is quiesced within `timeout_s`."""


# Start a mover for a daemon, for these regions of this process. Never waits; raises OSError where no
# descriptor is left. The mover's thread reports its errors to its daemon.
LaunchMover = Callable[[BootId, tuple[RegionExport, ...]], ResidentMover]


def wait_all_quiesced(movers: Sequence[ResidentMover], timeout_s: float) -> bool:
    """Return whether all are quiesced within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    return all(mover.wait(max(0.0, deadline - time.monotonic())) for mover in movers)


class MoverWatch:
    """The movers of each connection. Belongs to the I/O thread; owns the pidfds."""

    def __init__(self, selector: selectors.BaseSelector, on_movers_exited: Callable[[int], None]) -> None:
        self._selector = selector
        # Called with an epoch that has ended and whose movers are all dead.
        self._on_movers_exited = on_movers_exited
        self._pidfds: dict[int, set[int]] = {}  # epoch -> pidfds
        self._ended_epochs: set[int] = set()

    def watch(self, epoch: int, pidfd: int) -> None:
        """Watch a mover of the present connection; owns `pidfd`. Raises OSError if it cannot be polled."""
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._handle_exit(epoch, pidfd))
        self._pidfds.setdefault(epoch, set()).add(pidfd)

    def connection_ended(self, epoch: int) -> None:
        """Record that the connection has ended: no further mover of it will come."""
        self._ended_epochs.add(epoch)
        self._report_if_all_exited(epoch)

    def close(self) -> None:
        """Stop watching, and close every pidfd."""
        for pidfds in self._pidfds.values():
            for pidfd in pidfds:
                self._unwatch(pidfd)

    def _handle_exit(self, epoch: int, pidfd: int) -> None:
        self._pidfds[epoch].discard(pidfd)
        self._unwatch(pidfd)
        self._report_if_all_exited(epoch)

    def _report_if_all_exited(self, epoch: int) -> None:
        if epoch in self._ended_epochs and not self._pidfds.get(epoch):
            self._pidfds.pop(epoch, None)
            self._ended_epochs.discard(epoch)
            self._on_movers_exited(epoch)

    def _unwatch(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
