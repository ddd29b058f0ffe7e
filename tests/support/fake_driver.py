"""A driver without a GPU: physical memory is memfds, mapping them is mmap. For tests of real processes.

It is as strict as a real driver: mapped memory faults until `set_access`, a copy lands no sooner than its
event is polled, a stream's device must be current, and sizes must be multiples of the granularity.
`KVXFERD_DRIVER` names it in processes that have the repository on their path.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import secrets
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvxferd.errors import Code, DeviceError, EngineError
from kvxferd.memory.driver import AddressRange, Device, Rows, WriteOrder
from kvxferd.memory.memfd import SealedMemory
from kvxferd.memory.validate import check_memfd

FAKE = "tests.support.fake_driver:FakeDriver"
FAKE_DEVICES = (
    Device("GPU-fake-0", 0, "fake 0", 1 << 30),
    Device("GPU-fake-1", 1, "fake 1", 1 << 30),
)
GRANULARITY = 64 << 10
WRITE_ORDER_VARIABLE = "KVXFERD_FAKE_WRITE_ORDER"
_PREFIX = "kvxferd-fake:"  # a memfd's name is this, then the device and the size

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value
_PROT_NONE = 0
_MAP_FIXED = 0x10
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


@dataclass
class _Physical:
    fd: int
    size_bytes: int
    uuid: str
    num_references: int = 1  # handles and mappings of this process


@dataclass
class _Stream:
    uuid: str
    pending: deque[tuple[Sequence[int], Sequence[int], Sequence[int]]] = field(default_factory=deque)
    started: int = 0
    done: int = 0

    def start(self, to: Sequence[int], source: Sequence[int], length: Sequence[int]) -> None:
        self.pending.append((to, source, length))
        self.started += 1


@dataclass
class _Event:
    stream: _Stream
    after: int  # copies of the stream that must be done
    num_polls: int = 0


class FakeDriver:
    """Keeps the contract of `Driver`."""

    name = "fake"
    mem_type = "DRAM"

    def __init__(self) -> None:
        self.flushed: Counter[str] = Counter()
        self.polls_per_copy = 1  # polls of an event that report False before its copies land
        self._thread = threading.local()  # `current`: its device
        self._handles: dict[int, _Physical] = {}
        self._handle_numbers = itertools.count(1)
        self._reserved: dict[int, int] = {}
        self._mapped: dict[int, tuple[int, _Physical]] = {}  # address: size and memory
        self._plain: dict[int, tuple[int, str]] = {}
        self._host: dict[int, int] = {}

    def devices(self) -> tuple[Device, ...]:
        return FAKE_DEVICES

    def describe(self) -> dict[str, str]:
        return {"driver": self.name} | {
            f"{device.uuid} ({device.name})": "export as descriptor" for device in FAKE_DEVICES
        }

    def device(self, uuid: str) -> Device:
        for device in FAKE_DEVICES:
            if device.uuid == uuid:
                return device
        raise DeviceError(f"cannot use device {uuid}: this process does not see it", Code.DEVICE_UNAVAILABLE)

    @contextlib.contextmanager
    def on(self, uuid: str) -> Iterator[None]:
        before, self._thread.current = self._current(), self.device(uuid)
        try:
            yield
        finally:
            self._thread.current = before

    def _current(self) -> Device | None:
        return getattr(self._thread, "current", None)

    def _current_uuid(self) -> str:
        if (device := self._current()) is None:
            raise DeviceError("cannot use a device: none is current on this thread")
        return device.uuid

    def _check_current(self, stream: _Stream) -> None:
        if self._current_uuid() != stream.uuid:
            raise DeviceError(f"cannot use a stream of {stream.uuid}: {self._current_uuid()} is current")

    def device_of(self, address: int) -> str:
        base = self.allocation_range(address).base
        return self._mapped[base][1].uuid if base in self._mapped else self._plain[base][1]

    def fd_of(self, address: int) -> int:
        """Return the descriptor of mapped memory."""
        return self._mapped[self.allocation_range(address).base][1].fd

    def write_order(self, uuid: str) -> WriteOrder:
        self.device(uuid)
        return WriteOrder(os.environ.get(WRITE_ORDER_VARIABLE, WriteOrder.NATIVE))

    def flush_writes(self) -> None:
        self.flushed[self._current_uuid()] += 1

    # --- physical memory

    def granularity(self, uuid: str) -> int:
        self.device(uuid)
        return GRANULARITY

    def create(self, uuid: str, size_bytes: int) -> int:
        device = self.device(uuid)
        _check_size("create memory", size_bytes)
        # Only this process's own: to count all others' for each of hundreds of allocations takes a minute.
        if self._held_bytes(uuid) + size_bytes > device.total_bytes:
            raise DeviceError(f"cannot create {size_bytes} bytes of device memory: out of memory")
        memory = SealedMemory.create(size_bytes, f"{_PREFIX}{uuid}:{size_bytes}:{secrets.token_hex(4)}")
        try:
            fd = os.dup(memory.fd)
        finally:
            memory.close()
        return self._add(_Physical(fd, size_bytes, uuid))

    def _held_bytes(self, uuid: str) -> int:
        held = [*self._handles.values(), *(physical for _, physical in self._mapped.values())]
        return sum(one.size_bytes for one in {id(one): one for one in held}.values() if one.uuid == uuid)

    def retain(self, address: int) -> int:
        base = self.allocation_range(address).base
        if base not in self._mapped:
            raise DeviceError(
                f"cannot export memory at {address:#x}: it was allocated as cudaMalloc does",
                Code.REGION_NOT_EXPORTABLE,
            )
        physical = self._mapped[base][1]
        physical.num_references += 1
        return self._add(physical)

    def release(self, handle: int) -> None:
        if handle not in self._handles:
            raise DeviceError(f"cannot release handle {handle}: it is not known")
        _release_physical(self._handles.pop(handle))

    def export(self, handle: int) -> int:
        return os.dup(self._physical(handle).fd)

    def import_fd(self, uuid: str, fd: int, size_bytes: int) -> int:
        self.device(uuid)
        described = _describe_fd(fd)
        if described != (uuid, size_bytes):
            raise DeviceError(
                f"cannot import descriptor {fd} as {size_bytes} bytes of {uuid}: it is {described or 'none'}"
            )
        try:
            check_memfd(fd, size_bytes)
        except EngineError as error:
            raise DeviceError(error.message, error.code) from error
        return self._add(_Physical(os.dup(fd), size_bytes, uuid))

    def _add(self, physical: _Physical) -> int:
        handle = next(self._handle_numbers)
        self._handles[handle] = physical
        return handle

    def _physical(self, handle: int) -> _Physical:
        if handle not in self._handles:
            raise DeviceError(f"cannot use handle {handle}: it is not known")
        return self._handles[handle]

    # --- addresses

    def allocation_range(self, address: int) -> AddressRange:
        for base, (size, _) in (*self._mapped.items(), *self._plain.items()):
            if base <= address < base + size:
                return AddressRange(base, size)
        raise DeviceError(f"cannot find an allocation at {address:#x}: it is no device memory")

    def reserve(self, size_bytes: int) -> int:
        _check_size("reserve addresses", size_bytes)
        address = _mmap(None, size_bytes, _PROT_NONE, _ANONYMOUS)
        self._reserved[address] = size_bytes
        return address

    def unreserve(self, address: int, size_bytes: int) -> None:
        if self._reserved.get(address) != size_bytes:
            raise DeviceError(f"cannot free {size_bytes} addresses at {address:#x}: not so reserved")
        if any(address <= base < address + size_bytes for base in self._mapped):
            raise DeviceError(f"cannot free addresses at {address:#x}: memory is mapped there")
        del self._reserved[address]
        _LIBC.munmap(address, size_bytes)

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        physical = self._physical(handle)
        if size_bytes != physical.size_bytes:
            raise DeviceError(f"cannot map {size_bytes} bytes of an allocation of {physical.size_bytes}")
        if not self._is_free(address, size_bytes):
            raise DeviceError(f"cannot map at {address:#x}: those addresses are not reserved, or taken")
        _mmap(address, size_bytes, _PROT_NONE, mmap.MAP_SHARED | _MAP_FIXED, physical.fd)
        physical.num_references += 1
        self._mapped[address] = (size_bytes, physical)

    def _is_free(self, address: int, size_bytes: int) -> bool:
        end = address + size_bytes
        inside = any(base <= address and end <= base + size for base, size in self._reserved.items())
        taken = any(base < end and address < base + size for base, (size, _) in self._mapped.items())
        return inside and not taken and address % mmap.PAGESIZE == 0

    def set_access(self, uuid: str, address: int, size_bytes: int) -> None:
        covered = sum(
            size for base, (size, _) in self._mapped.items() if address <= base < address + size_bytes
        )
        if covered != size_bytes:
            raise DeviceError(
                f"cannot set access to {size_bytes} bytes at {address:#x}: {covered} are mapped"
            )
        self.device(uuid)
        if _LIBC.mprotect(address, size_bytes, _READ_WRITE):
            raise DeviceError(f"cannot set access at {address:#x}: {os.strerror(ctypes.get_errno())}")

    def unmap(self, address: int, size_bytes: int) -> None:
        size, physical = self._mapped.get(address, (0, None))
        if physical is None or size != size_bytes:
            raise DeviceError(f"cannot unmap {size_bytes} bytes at {address:#x}: not so mapped")
        del self._mapped[address]
        _mmap(address, size_bytes, _PROT_NONE, _ANONYMOUS | _MAP_FIXED)
        _release_physical(physical)

    def allocate_plain(self, uuid: str, size_bytes: int) -> int:
        self.device(uuid)
        address = _mmap(None, size_bytes, _READ_WRITE, _ANONYMOUS)
        self._plain[address] = (size_bytes, uuid)
        return address

    def free_plain(self, address: int) -> None:
        size, _ = self._plain.pop(address)
        _LIBC.munmap(address, size)

    # --- copies

    def allocate_host(self, size_bytes: int) -> int:
        self._current_uuid()
        address = _mmap(None, size_bytes, _READ_WRITE, _ANONYMOUS)
        self._host[address] = size_bytes
        return address

    def free_host(self, address: int) -> None:
        _LIBC.munmap(address, self._host.pop(address))

    def open_stream(self) -> Any:
        return _Stream(self._current_uuid())

    def close_stream(self, stream: Any) -> None:
        if stream.pending:
            raise DeviceError("cannot close a stream: copies are under way on it")

    def copy(self, to: Sequence[int], source: Sequence[int], length: Sequence[int], stream: Any) -> None:
        self._check_current(stream)
        stream.start(to, source, length)

    def copy_rows(self, to: memoryview, source: memoryview, rows: Rows, stream: Any) -> None:
        self._check_current(stream)
        starts = []
        for addresses, pitch in ((to, rows.to_pitch), (source, rows.source_pitch)):
            starts.append([first + row * pitch for first in addresses for row in range(rows.rows)])
            self._check_reachable(starts[-1], rows.width, stream.uuid)
        stream.start(*starts, [rows.width] * len(starts[0]))

    def _check_reachable(self, starts: Iterable[int], width: int, uuid: str) -> None:
        """Refuse addresses at which a device's kernel would fault."""
        mapped = {base: size for base, (size, physical) in self._mapped.items() if physical.uuid == uuid}
        plain = {base: size for base, (size, on) in self._plain.items() if on == uuid}
        reachable = tuple((mapped | plain | self._host).items())
        for start in starts:
            if not any(base <= start and start + width <= base + size for base, size in reachable):
                raise DeviceError(f"cannot copy rows at {start:#x}: {uuid} does not reach them")

    def record(self, stream: Any) -> Any:
        self._check_current(stream)
        return _Event(stream, stream.started)

    def is_done(self, event: Any) -> bool:
        if event.stream.done >= event.after:
            return True
        event.num_polls += 1
        if event.num_polls <= self.polls_per_copy:
            return False
        self._run_copies(event.stream, event.after)
        return True

    def drop_event(self, event: Any) -> None:
        """Do nothing."""

    def synchronize(self, stream: Any) -> None:
        self._run_copies(stream, stream.started)

    @staticmethod
    def _run_copies(stream: _Stream, until: int) -> None:
        while stream.done < until:
            for to, source, length in zip(*stream.pending.popleft(), strict=True):
                ctypes.memmove(to, source, length)
            stream.done += 1


def _check_size(what: str, size_bytes: int) -> None:
    if size_bytes <= 0 or size_bytes % GRANULARITY:
        raise DeviceError(f"cannot {what} of {size_bytes} bytes: give a multiple of {GRANULARITY}")


def _release_physical(physical: _Physical) -> None:
    physical.num_references -= 1
    if not physical.num_references:
        os.close(physical.fd)


def _mmap(address: int | None, size_bytes: int, protection: int, flags: int, fd: int = -1) -> int:
    mapped = _LIBC.mmap(address, size_bytes, protection, flags, fd, 0)
    if mapped is None or mapped == _FAILED:
        raise DeviceError(f"cannot map {size_bytes} bytes: {os.strerror(ctypes.get_errno())}")
    return int(mapped)


def _fake_name_in(text: str) -> str:
    """Return the name of fake device memory in a descriptor's link, "" for any other descriptor."""
    _, found, rest = text.partition("/memfd:" + _PREFIX)
    return _PREFIX + rest.split(" ")[0] if found else ""


def _describe_fd(fd: int) -> tuple[str, int] | None:
    with contextlib.suppress(OSError):
        if name := _fake_name_in(os.readlink(f"/proc/thread-self/fd/{fd}")):
            _, uuid, size, _ = name.split(":")
            return uuid, int(size)
    return None


def used_bytes(uuid: str, pids: Iterable[int]) -> int:
    """Return how much of a fake device's memory these processes hold."""
    held: set[str] = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):  # it has ended
            held |= _fake_memory_of(pid)
    return sum(int(size) for _, of, size, *_ in (name.split(":") for name in held) if of == uuid)


def _fake_memory_of(process: int) -> set[str]:
    # A process that maps memory keeps its descriptor (`_Physical`), and has fewer of these than mappings.
    names: set[str] = set()
    for fd in os.listdir(f"/proc/{process}/fd"):
        with contextlib.suppress(OSError):
            names.add(_fake_name_in(os.readlink(f"/proc/{process}/fd/{fd}")))
    return names - {""}
