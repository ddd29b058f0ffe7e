"""Tests whether registered memory is really readable, by one read that is compared byte by byte.

A registration that succeeds proves nothing: a library may find a wrong way to the memory, or none, and
report that at the first read only. So a mover reads a sample of its own memory through its own agent, into
memory of the same kind, and compares. The probed memory is never written, because it may be live.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from kvxferd.errors import KvxferdError
from kvxferd.memory.device_pool import DevicePool
from kvxferd.memory.driver import Driver
from kvxferd.mover.transport.base import (
    MemoryKind,
    MemoryRange,
    ReadHandle,
    ReadKinds,
    Transport,
    TransportError,
)
from kvxferd.mover.transport.runs import single_run
from kvxferd.plan import Runs
from kvxferd.wire.common import MeasuredPlacement

SAMPLE_BYTES = 4096  # compared at the beginning, in the middle and at the end
TIMED_BYTES = 1 << 20  # read to measure the rate: 0.2 ms by a memory copy, 1 ms over TCP
NUM_TIMED_READS = 2  # the first pays for pages that were never touched
LIMIT_S = 0.5  # for the whole probe; a mover does nothing else meanwhile
# For a GPU, where the first read makes what the library needs on the device, before the rank is bound. Only
# the registration waits, and a hasty failure would have all of the rank's reads staged for ever.
DEVICE_LIMIT_S = 5.0
NUM_ATTEMPTS = 3  # live memory may change between two reads of it

# What reads that never ended may write: its memory is freed with the process.
_WRITTEN_FOR_EVER: list[ProbedMemory] = []

_INVERTED = bytes(255 - byte for byte in range(256))
_TCP_INFO_BYTES = 232
_BYTES_RECEIVED_OFFSET = 128  # tcpi_bytes_received of struct tcp_info


class ProbeOutcome(NamedTuple):
    """What a probe found."""

    ok: bool
    why: str  # why not, "" where it is ok
    over_tcp: bool  # the bytes went through TCP sockets, by the kernel's count
    gigabytes_per_s: float  # 0: not measured
    is_stuck: bool = False  # a read of the memory may go on for ever, so it must stay registered


class ProbedMemory(Protocol):
    """Access to memory of one kind, beside the transfer library."""

    def read(self, address: int, size_bytes: int) -> bytes:
        """Return the bytes there."""
        ...

    def write(self, address: int, content: bytes) -> None:
        """Write into the probe's own memory."""
        ...

    def allocate_target(self) -> MemoryRange:
        """Allocate `TIMED_BYTES` for reads to land in."""
        ...

    def free_target(self, span: MemoryRange) -> None:
        """Free what `allocate_target` returned."""
        ...

    def close(self) -> None:
        """Free what `read` and `write` used."""
        ...


class ProbedHostMemory:
    """Host memory, which this process reads and writes itself."""

    def __init__(self) -> None:
        self._targets: dict[int, mmap.mmap] = {}

    def read(self, address: int, size_bytes: int) -> bytes:
        return ctypes.string_at(address, size_bytes)

    def write(self, address: int, content: bytes) -> None:
        ctypes.memmove(address, content, len(content))

    def allocate_target(self) -> MemoryRange:
        made = mmap.mmap(-1, TIMED_BYTES)
        anchor = ctypes.c_char.from_buffer(made)
        address = ctypes.addressof(anchor)
        del anchor  # or the mapping could not be closed
        self._targets[address] = made
        return MemoryRange(address, TIMED_BYTES)

    def free_target(self, span: MemoryRange) -> None:
        self._targets.pop(span.address).close()

    def close(self) -> None:
        """Do nothing."""


class ProbedDeviceMemory:
    """Memory of a device, read and written by copies."""

    def __init__(self, driver: Driver, span: MemoryRange) -> None:
        self._driver = driver
        self._span = span
        self._uuid = driver.device_of(span.address)
        self._pool = DevicePool(self._uuid, driver)
        with driver.on(self._uuid):
            self._host_copy = driver.allocate_host(SAMPLE_BYTES)
            try:
                self._stream = driver.open_stream()
            except BaseException:
                driver.free_host(self._host_copy)
                raise

    def read(self, address: int, size_bytes: int) -> bytes:
        self._copy(self._host_copy, address, size_bytes)
        return ctypes.string_at(self._host_copy, size_bytes)

    def write(self, address: int, content: bytes) -> None:
        ctypes.memmove(self._host_copy, content, len(content))
        self._copy(address, self._host_copy, len(content))

    def _copy(self, to: int, source: int, size_bytes: int) -> None:
        with self._driver.on(self._uuid):
            self._driver.copy([to], [source], [size_bytes], self._stream)
            self._driver.synchronize(self._stream)

    def allocate_target(self) -> MemoryRange:
        """Allocate exportable memory, as workers' is."""
        block = self._pool.allocate(TIMED_BYTES)
        return MemoryRange(block.address, block.size_bytes, self._span.mem_type, self._span.device)

    def free_target(self, span: MemoryRange) -> None:
        self._pool.free(span.address)

    def close(self) -> None:
        with self._driver.on(self._uuid):
            self._driver.free_host(self._host_copy)
            self._driver.close_stream(self._stream)


def placement_of(kind: str, proof: ProbeOutcome) -> MeasuredPlacement:
    """Return the placement that a mover reports for a probe's outcome."""
    transports = "tcp" if proof.over_tcp else ""  # the other transports are in UCX's log
    return MeasuredPlacement(kind, proof.why, transports, float(f"{proof.gigabytes_per_s:.3g}"))


def probe_span(transport: Transport, span: MemoryRange, driver: Driver | None = None) -> ProbeOutcome:
    """Read samples of a registered span through the transport, and compare. Raises nothing.

    `driver`: the span is memory of one of its devices; None: of the host. It takes about a millisecond, and
    at most `LIMIT_S`, or `DEVICE_LIMIT_S`.
    """
    try:
        memory: ProbedMemory = ProbedHostMemory() if driver is None else ProbedDeviceMemory(driver, span)
        try:
            limit_s = LIMIT_S if driver is None else DEVICE_LIMIT_S
            return _Probe(transport, memory, span, limit_s).run()
        finally:
            memory.close()
    except KvxferdError as error:
        is_stuck = isinstance(error, TransportError) and not error.settled
        return ProbeOutcome(False, error.message, False, 0.0, is_stuck)


class _Probe:
    def __init__(self, transport: Transport, memory: ProbedMemory, span: MemoryRange, limit_s: float) -> None:
        self._limit_s = limit_s
        self._transport = transport
        self._memory = memory
        self._span = span
        self._deadline = time.perf_counter() + limit_s
        self._is_stuck = False
        place = MemoryKind(span.mem_type, span.device)
        self._kinds = ReadKinds(local=place, remote=place)

    def run(self) -> ProbeOutcome:
        with self._registered_target() as target:
            for address in self._sample_addresses():
                if why := self._compare_sample(address, target):
                    return ProbeOutcome(False, why, False, 0.0)
            return self._measure(target)

    def _sample_addresses(self) -> list[int]:
        first, size = self._span.address, self._span.size_bytes
        last = first + max(0, size - SAMPLE_BYTES)
        return sorted({first, first + (last - first) // 2, last})

    def _compare_sample(self, address: int, target: MemoryRange) -> str:
        """Return what is wrong with one sample, "" if nothing is."""
        size = min(SAMPLE_BYTES, self._span.size_bytes)
        for _ in range(NUM_ATTEMPTS):
            before = self._memory.read(address, size)
            # Every byte must change, or a read that moves nothing would pass for one of memory full of zeros.
            self._memory.write(target.address, before.translate(_INVERTED))
            self._read(address, size, target)
            came = self._memory.read(target.address, size)
            if came in (before, self._memory.read(address, size)):
                return ""
        num_wrong = sum(a != b for a, b in zip(came, before, strict=True))
        return (
            f"a read of {size} bytes through {self._transport.library} brought {num_wrong} bytes "
            "other than those that lie there"
        )

    def _measure(self, target: MemoryRange) -> ProbeOutcome:
        size = min(TIMED_BYTES, self._span.size_bytes)
        over_tcp, best = False, float("inf")
        for number in range(NUM_TIMED_READS):
            before = tcp_bytes_received() if not number else 0
            began = time.perf_counter()
            self._read(self._span.address, size, target)
            best = min(best, time.perf_counter() - began)
            if not number:
                over_tcp = tcp_bytes_received() - before >= size // 2
        return ProbeOutcome(True, "", over_tcp, size / best / 1e9)

    def _read(self, address: int, size: int, target: MemoryRange) -> None:
        transport = self._transport
        runs = single_run(target.address, address, size)
        try:
            handle = self._post(runs)
            while not transport.poll(handle):
                if time.perf_counter() > self._deadline:
                    text = f"a read of {size} bytes of its own memory has not ended after {self._limit_s:g} s"
                    raise TransportError(text, settled=False)
        except TransportError as error:
            self._is_stuck = not error.settled
            raise
        transport.release(handle)

    def _post(self, runs: Runs) -> ReadHandle:
        return self._transport.post(self._transport.agent, runs, self._kinds)

    @contextmanager
    def _registered_target(self) -> Iterator[MemoryRange]:
        target = self._memory.allocate_target()
        try:
            self._transport.register(target)
            try:
                yield target
            finally:
                if not self._is_stuck:
                    self._transport.deregister(target)
        finally:
            if self._is_stuck:
                _WRITTEN_FOR_EVER.append(self._memory)  # the read may still write its target
            else:
                self._memory.free_target(target)


def tcp_bytes_received() -> int:
    """Return what all TCP sockets of this process have received, by the kernel's count."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as duplicate:
                if duplicate.type == socket.SOCK_STREAM and duplicate.family != socket.AF_UNIX:
                    tcp_info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                    (received,) = struct.unpack_from("Q", tcp_info, _BYTES_RECEIVED_OFFSET)
                    total += received
        except (OSError, struct.error):  # closed meanwhile, or not a TCP socket
            continue
    return total
