"""What kvxferd needs of a GPU's driver; `kvxferd.memory.driver_registry` chooses one.

Two implementations keep this contract and pass one suite: `kvxferd.memory.cuda`, the only file that
touches CUDA, and `kvxferd.memory.fake_driver`, where device memory is memfds. Addresses and handles
are plain ints; a device is named by its UUID, because its number differs between processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

# For tests, and for a node whose movers must leave its GPUs alone ("none").
DRIVER_VARIABLE = "KVXFERD_DRIVER"
PLACEMENT_VARIABLE = "KVXFERD_PLACEMENT"  # the configuration's mover.placement, on its way to a child


class Device(NamedTuple):
    """One GPU as this process sees it."""

    uuid: str  # as nvidia-smi writes it: "GPU-..." or "MIG-..."
    ordinal: int  # meaningful in this process alone
    name: str
    total_bytes: int


class AddressRange(NamedTuple):
    """The addresses under which one physical allocation is mapped."""

    base: int
    size_bytes: int


class WriteOrder(StrEnum):
    """Whether what a network card has written to a device is there for the device's own work to see."""

    NATIVE = "native"  # it is, or no network card writes to this device
    FLUSH = "flush"  # after `flush_writes`
    NONE = "none"  # nobody can tell: a card must not write there directly


class Driver(Protocol):
    """Raises DeviceError from every method: with the call's name and the driver's own words.

    What concerns a device wants it current on the calling thread: `use` for a thread's whole life,
    `on` for a while.
    """

    name: str  # for people: "cuda 13.0", "fake"
    mem_type: str  # what NIXL calls its memory

    def devices(self) -> tuple[Device, ...]:
        """Return the devices that this process can see."""
        ...

    def describe(self) -> dict[str, str]:
        """Return versions and abilities, for people."""
        ...

    def use(self, uuid: str) -> int:
        """Make the device current on this thread, for good; return its ordinal, NIXL's device id."""
        ...

    def on(self, uuid: str) -> AbstractContextManager[None]:
        """Make the device current on this thread while inside; what was current is so again after."""
        ...

    def device_of(self, address: int) -> str:
        """Return the UUID of the device whose memory the address is in."""
        ...

    def write_order(self, uuid: str) -> WriteOrder:
        """Return what network cards' writes to the device need before its own work may read them."""
        ...

    def flush_writes(self) -> None:
        """Return once all that network cards have written to the current device is there to see."""
        ...

    # --- physical memory: a handle is released once by whoever got it; memory lives on while it is mapped

    def granularity(self, uuid: str) -> int:
        """Return what sizes and places of mapped memory are multiples of."""
        ...

    def create(self, uuid: str, size_bytes: int) -> int:
        """Allocate physical memory that can be exported; return its handle."""
        ...

    def retain(self, address: int) -> int:
        """Return a handle of the physical memory mapped there.

        Raises region-not-exportable for memory of plain cudaMalloc, and for memory that was not made to be
        exported as a descriptor.
        """
        ...

    def release(self, handle: int) -> None:
        """Give a handle back."""
        ...

    def export(self, handle: int) -> int:
        """Return a descriptor of the memory, to be closed by the caller. Raises region-not-exportable."""
        ...

    def import_fd(self, uuid: str, fd: int, size_bytes: int) -> int:
        """Return a handle of exported memory; the descriptor stays the caller's."""
        ...

    # --- addresses

    def allocation_range(self, address: int) -> AddressRange:
        """Return where the allocation that is mapped at the address begins, and how long it is."""
        ...

    def reserve(self, size_bytes: int) -> int:
        """Return the first of so many free addresses."""
        ...

    def unreserve(self, address: int, size_bytes: int) -> None:
        """Give reserved addresses back; nothing is mapped there."""
        ...

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        """Map all of a physical allocation at reserved addresses; `allow` makes it usable."""
        ...

    def set_access(self, uuid: str, address: int, size_bytes: int) -> None:
        """Let the device, and copies, read and write what is mapped there."""
        ...

    def unmap(self, address: int, size_bytes: int) -> None:
        """Undo `map`. Waits for work of this process that uses it."""
        ...

    def allocate_plain(self, uuid: str, size_bytes: int) -> int:
        """Allocate as cudaMalloc does: memory that cannot be exported."""
        ...

    def free_plain(self, address: int) -> None:
        """Undo `allocate_plain`."""
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
        """Give a stream back; what was started on it is done."""
        ...

    def copy(self, to: Sequence[int], source: Sequence[int], length: Sequence[int], stream: Any) -> None:
        """Start copies, of host or device memory each. Addresses stay valid until an event says so."""
        ...

    def record(self, stream: Any) -> Any:
        """Return an event that is done when all that was started on the stream is."""
        ...

    def is_done(self, event: Any) -> bool:
        """Whether an event is done; never waits. Raises DeviceError where a copy has failed."""
        ...

    def drop_event(self, event: Any) -> None:
        """Give an event back."""
        ...

    def synchronize(self, stream: Any) -> None:
        """Wait for all that was started on the stream. Tests and probes; a mover never waits."""
        ...

    def used_bytes(self, uuid: str) -> int:
        """Return how much of the device's memory is in use, by whomever, as the driver counts."""
        ...
