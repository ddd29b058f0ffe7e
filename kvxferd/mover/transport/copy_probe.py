"""Tests whether a device's strided copies are right: that they write each byte they have to, and no other.

A driver may refuse some strides, or take another path for them. So copies of one, two and three dimensions,
with the shapes of heads and tokens and with no alignment at all, are compared with the same copies made here.
"""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import ExitStack
from typing import Any

from kvxferd.errors import DeviceError
from kvxferd.memory.device_pool import DevicePool
from kvxferd.memory.driver import Driver, StridedCopy

PROBE_BYTES = 64 << 10
LIMIT_S = 5.0  # as a probe read has, on a GPU

# Offsets instead of addresses. None leaves `PROBE_BYTES`.
SHAPES = (
    StridedCopy(0, 0, 4096),
    StridedCopy(8192, 0, 256, 16, 512, 256),  # a head of 16 tokens into tokens of two heads
    StridedCopy(16640, 4096, 256, 16, 1024, 256),
    StridedCopy(0, 0, 256, 16, 512, 256, 4, 32, 32),  # the same of four blocks
    StridedCopy(32768, 32, 64, 8, 128, 64, 16, 16, 24),
    StridedCopy(5, 3, 7, 9, 13, 11),  # no alignment
    StridedCopy(49153, 1, 96, 5, 288, 96, 7, 6, 5),
    StridedCopy(0, 0, 1152, 1, 1152, 1152, 6, 3, 1),  # rows of several stretches: latents of 576 numbers
)


def probe_strided_copies(driver: Driver, uuid: str) -> str:
    """Return what is wrong with the device's strided copies, "" if nothing is. Raises nothing.

    Memory of copies that do not end is left to the process.
    """
    try:
        with driver.on(uuid), ExitStack() as undoing:
            pool = DevicePool(uuid, driver)
            undoing.callback(pool.close)
            source, target = (pool.allocate(PROBE_BYTES).address for _ in range(2))
            host = driver.allocate_host(PROBE_BYTES)
            undoing.callback(driver.free_host, host)
            stream = driver.open_stream()
            undoing.callback(driver.close_stream, stream)
            probe = _CopyProbe(driver, stream, host, source, target)
            try:
                return probe.run()
            except TimeoutError as error:
                undoing.pop_all()
                return str(error)
    except DeviceError as error:
        return error.message


class _CopyProbe:
    def __init__(self, driver: Driver, stream: Any, host: int, source: int, target: int) -> None:
        self._driver = driver
        self._stream = stream
        self._host = host
        self._source = source
        self._target = target
        self._deadline = time.perf_counter() + LIMIT_S

    def run(self) -> str:
        content = os.urandom(PROBE_BYTES)
        self._write(self._source, content)
        for shape in SHAPES:
            before = os.urandom(PROBE_BYTES)
            self._write(self._target, before)
            copy = shape._replace(to=self._target + shape.to, source=self._source + shape.source)
            self._driver.copy_strided([copy], self._stream)
            self._wait()
            wanted = bytearray(before)
            for to, source, width in shape.each_row():
                wanted[to : to + width] = content[source : source + width]
            found = self._read(self._target)
            if found != bytes(wanted):
                num_wrong = sum(a != b for a, b in zip(found, wanted, strict=True))
                return f"a copy of rows ({shape}) left {num_wrong} bytes other than it has to"
        return ""

    def _write(self, address: int, content: bytes) -> None:
        ctypes.memmove(self._host, content, len(content))
        self._driver.copy([address], [self._host], [len(content)], self._stream)
        self._wait()

    def _read(self, address: int) -> bytes:
        self._driver.copy([self._host], [address], [PROBE_BYTES], self._stream)
        self._wait()
        return ctypes.string_at(self._host, PROBE_BYTES)

    def _wait(self) -> None:
        event = self._driver.record(self._stream)
        while not self._driver.is_done(event):
            if time.perf_counter() > self._deadline:
                raise TimeoutError(f"copies of rows have not ended after {LIMIT_S:g} s")
        self._driver.drop_event(event)
