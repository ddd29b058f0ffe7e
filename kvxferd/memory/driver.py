"""The contract of a GPU's driver: all that kvxferd needs of one. `driver_registry` chooses it.

`kvxferd.memory.cuda` keeps it, the only file that calls CUDA. Addresses and handles are plain ints; a
device is named by its UUID, because its number differs between processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

# "none" for a node whose movers must leave its GPUs alone; MODULE:CLASS for another driver.
DRIVER_VARIABLE = "KVXFERD_DRIVER"

# Pairs of addresses in one launch of `copy_rows`'s kernel. They are passed by value, and a kernel's
# parameters have 32,764 bytes at most.
PAIRS_PER_LAUNCH = 2045


class Device(NamedTuple):
    """One GPU as this process sees it."""

    uuid: str  # as nvidia-smi writes it: "GPU-..." or "MIG-..."
    ordinal: int  # NIXL's device id; meaningful in this process alone
    name: str
    total_bytes: int


class AddressRange(NamedTuple):
    """The addresses under which one physical allocation is mapped."""

    base: int
    size_bytes: int


class WriteOrder(StrEnum):
    """When a device's own work sees the bytes that a network card has written to its memory."""

    NATIVE = "native"  # at once, or no network card can write to this device
    FLUSH = "flush"  # after `flush_writes`
    NONE = "none"  # unknown: a network card must not write there directly


class Rows(NamedTuple):
    """Equal rows, of which each begins a pitch after the one before: any number of bytes, also backwards."""

    width: int  # bytes
    rows: int = 1
    to_pitch: int = 0
    source_pitch: int = 0


class Driver(Protocol):
    """Every method raises DeviceError, with the call's name and the driver's own text.

    Methods that concern a device need it to be current on the calling thread, as a stream's copies and
    events need the stream's: call them inside `on`. None stays current beyond that: the transfer library,
    called with one, pins host memory for the device too, and fails where the device refuses.
    """

    name: str  # for people: "cuda 13.0"
    mem_type: str  # what NIXL calls its memory

    def devices(self) -> tuple[Device, ...]:
        """Return the devices that this process can see."""
        ...

    def describe(self) -> dict[str, str]:
        """Return versions and capabilities, for people."""
        ...

    def device(self, uuid: str) -> Device:
        """Return a device that this process can see. Raises DeviceError(device-unavailable)."""
        ...

    def on(self, uuid: str) -> AbstractContextManager[None]:
        """Make the device current on this thread inside the block, and the previous one after it."""
        ...

    def device_of(self, address: int) -> str:
        """Return the UUID of the device whose memory the address is in."""
        ...

    def write_order(self, uuid: str) -> WriteOrder:
        """Return what has to happen before the device's own work sees the writes of a network card."""
        ...

    def flush_writes(self) -> None:
        """Return once the current device sees all that network cards have written to it."""
        ...

    # --- physical memory: the caller that got a handle releases it once; mapped memory lives on without one

    def granularity(self, uuid: str) -> int:
        """Return the number of bytes of which sizes and addresses of mapped memory are multiples."""
        ...

    def create(self, uuid: str, size_bytes: int) -> int:
        """Allocate physical memory that can be exported; return its handle."""
        ...

    def retain(self, address: int) -> int:
        """Return a handle of the physical memory that is mapped at the address.

        Raises region-not-exportable for memory of plain cudaMalloc, and for memory that was not allocated to
        be exported as a descriptor.
        """
        ...

    def release(self, handle: int) -> None:
        """Release a handle."""
        ...

    def export(self, handle: int) -> int:
        """Return a descriptor of the memory, to be closed by the caller. Raises region-not-exportable."""
        ...

    def import_fd(self, uuid: str, fd: int, size_bytes: int) -> int:
        """Return a handle of exported memory; the descriptor stays the caller's."""
        ...

    # --- addresses

    def allocation_range(self, address: int) -> AddressRange:
        """Return the base and size of the allocation that is mapped at the address."""
        ...

    def reserve(self, size_bytes: int) -> int:
        """Reserve a range of addresses, and return the first."""
        ...

    def unreserve(self, address: int, size_bytes: int) -> None:
        """Free reserved addresses, at which nothing is mapped."""
        ...

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        """Map all of a physical allocation at reserved addresses; `set_access` makes it usable."""
        ...

    def set_access(self, uuid: str, address: int, size_bytes: int) -> None:
        """Let the device, and copies, read and write the mapped memory."""
        ...

    def unmap(self, address: int, size_bytes: int) -> None:
        """Undo `map`. Waits for work of this process that uses it."""
        ...

    def allocate_plain(self, uuid: str, size_bytes: int) -> int:
        """Allocate as cudaMalloc does: memory that cannot be exported. It is freed with this process."""
        ...

    # --- copies

    def allocate_host(self, size_bytes: int) -> int:
        """Return host memory that devices copy from and to asynchronously; zeroed."""
        ...

    def free_host(self, address: int) -> None:
        """Undo `allocate_host`."""
        ...

    def open_stream(self) -> Any:
        """Return a stream of the current device, which waits for no other."""
        ...

    def close_stream(self, stream: Any) -> None:
        """Close a stream on which all copies are done."""
        ...

    def copy(self, to: Sequence[int], source: Sequence[int], length: Sequence[int], stream: Any) -> None:
        """Start copies of host or device memory. The caller keeps the memory until an event is done."""
        ...

    def copy_rows(self, to: memoryview, source: memoryview, rows: Rows, stream: Any) -> None:
        """Start copies of `rows` between each pair of first rows: many short ones, by a kernel.

        `to`, `source`: addresses of the current device's memory, or of `allocate_host`'s, as 64-bit numbers
        side by side. The driver reads them at once. As `copy`: where one is refused, those before it run.
        Raises where the kernel cannot be loaded.
        """
        ...

    def record(self, stream: Any) -> Any:
        """Return an event that is done once all copies that were started on the stream are."""
        ...

    def is_done(self, event: Any) -> bool:
        """Whether an event is done; never waits. Raises DeviceError where a copy has failed."""
        ...

    def drop_event(self, event: Any) -> None:
        """Free an event."""
        ...

    def synchronize(self, stream: Any) -> None:
        """Wait for all copies of the stream. For tests and probes; a mover that serves never waits."""
        ...
