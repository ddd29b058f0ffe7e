"""Tests whether a device's copies of rows are right: that they write each byte they have to, and no other.

A driver may be unable to load the kernel, or have it wrong. So copies with the shapes of heads and tokens and
with no alignment at all are compared with the same copies made here: inside the device, and between it and
pinned host memory.
"""

from __future__ import annotations

import ctypes
import os
import time
from array import array
from contextlib import ExitStack
from typing import Any

from kvxferd.errors import DeviceError
from kvxferd.memory.device_pool import DevicePool
from kvxferd.memory.driver import Driver, Rows

PROBE_BYTES = 64 << 10
LIMIT_S = 5.0  # as a probe read has, on a GPU

# Rows, and offsets (to, source) of the pairs. None leaves `PROBE_BYTES`.
SHAPES = (
    (Rows(4096), [(0, 0)]),
    (Rows(30000), [(1, 17)]),  # longer than a piece of the kernel, and of no alignment
    (Rows(256, 16, 512, 256), [(8192, 0), (8448, 4096), (32768, 8192)]),  # 16 tokens of each of three heads
    (Rows(1152), [(3456 * i, 1152 * i) for i in range(8)]),  # latents of 576 numbers
    (Rows(64, 8, 128, -64), [(1024 * i, 480 + 512 * i) for i in range(16)]),  # backwards
    (Rows(100, 5, 300, 100), [(4 + 1500 * i, 8 + 500 * i) for i in range(7)]),  # words of four bytes
    (Rows(7, 9, 13, 11), [(5, 3), (999, 1234), (4000, 90)]),
)


def probe_copy_rows(driver: Driver, uuid: str) -> str:
    """Return what is wrong with the device's copies of rows, "" if nothing is. Raises nothing.

    Memory of copies that do not end is left to the process.
    """
    try:
        with driver.on(uuid), ExitStack() as undoing:
            pool = DevicePool(uuid, driver)
            undoing.callback(pool.close)
            source, target = (pool.allocate(PROBE_BYTES).address for _ in range(2))
            host = driver.allocate_host(PROBE_BYTES)
            undoing.callback(driver.free_host, host)
            pinned = driver.allocate_host(PROBE_BYTES)
            undoing.callback(driver.free_host, pinned)
            stream = driver.open_stream()
            undoing.callback(driver.close_stream, stream)
            probe = _CopyProbe(driver, stream, host)
            try:
                for to, origin in ((target, source), (pinned, source), (target, pinned)):
                    if why := probe.compare(to, origin):
                        return why
            except TimeoutError as error:
                undoing.pop_all()
                return str(error)
            return ""
    except DeviceError as error:
        return error.message


class _CopyProbe:
    def __init__(self, driver: Driver, stream: Any, host: int) -> None:
        """`host`: pinned memory through which all else is written and read."""
        self._driver = driver
        self._stream = stream
        self._host = host
        self._deadline = time.perf_counter() + LIMIT_S

    def compare(self, target: int, origin: int) -> str:
        """Return what is wrong with copies of all shapes from one buffer to another, "" if nothing is."""
        content = os.urandom(PROBE_BYTES)
        self._write(origin, content)
        for rows, pairs in SHAPES:
            before = os.urandom(PROBE_BYTES)
            self._write(target, before)
            to = memoryview(array("Q", [target + offset for offset, _ in pairs]))
            source = memoryview(array("Q", [origin + offset for _, offset in pairs]))
            self._driver.copy_rows(to, source, rows, self._stream)
            self._wait()
            found, wanted = self._read(target), _copied(rows, pairs, content, before)
            if found != wanted:
                num_wrong = sum(a != b for a, b in zip(found, wanted, strict=True))
                return f"a copy of rows ({rows}) left {num_wrong} bytes other than it has to"
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


def _copied(rows: Rows, pairs: list[tuple[int, int]], content: bytes, before: bytes) -> bytes:
    copied = bytearray(before)
    for to, source in pairs:
        for row in range(rows.rows):
            at, origin = to + row * rows.to_pitch, source + row * rows.source_pitch
            copied[at : at + rows.width] = content[origin : origin + rows.width]
    return bytes(copied)
