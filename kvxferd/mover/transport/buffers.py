"""Host memory that a GPU's copies pass through on their way from and to the wire."""

from __future__ import annotations

import logging
from contextlib import ExitStack

from kvxferd.errors import DeviceError
from kvxferd.memory.driver import Driver
from kvxferd.mover.transport.base import Span, Transport

_LOG = logging.getLogger(__name__)


class PinnedBuffer:
    """A pinned and registered buffer, and the stream of its copies. Its maker calls `close` once."""

    def __init__(self, transport: Transport, driver: Driver, size_bytes: int) -> None:
        """The device is current. Raises DeviceError or TransportError, and then leaves nothing behind."""
        self.driver = driver
        with ExitStack() as undoing:
            self.span = Span(driver.allocate_host(size_bytes), size_bytes)
            undoing.callback(driver.free_host, self.span.address)
            transport.register(self.span)
            undoing.callback(transport.deregister, self.span)
            self.stream = driver.open_stream()
            undoing.pop_all()

    @property
    def address(self) -> int:
        """The buffer's first address."""
        return self.span.address

    def discard(self, transport: Transport) -> None:
        """Free a buffer that nothing has used."""
        transport.deregister(self.span)
        self.close()

    def close(self) -> None:
        """Free it, when the transport is closed and nothing reads it any more.

        Raises nothing: memory that a broken driver does not free goes with the process, and the end of the
        mover must not wait for that.
        """
        driver = self.driver
        for step, what in (
            (driver.synchronize, self.stream),
            (driver.close_stream, self.stream),
            (driver.free_host, self.span.address),
        ):
            try:
                step(what)
            except DeviceError as error:
                _LOG.error("a staging buffer is left to the end of the process: %s", error.message)
