"""Registers a rank with a resident mover."""

from __future__ import annotations

import atexit
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from kvxferd.client import Client, RankHandle
from kvxferd.errors import Code, EngineError
from kvxferd.ids import AgentName, BootId, RegionId
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.memory import SharedMemory
from kvxferd.memory.device import ResidentMemory
from kvxferd.memory.driver_registry import open_driver
from kvxferd.mover.transport.base import Transport
from kvxferd.mover.transport.nixl import NixlTransport, TransferLibrary, import_library
from kvxferd.resident.thread_mover import MakeTransport, ThreadMover
from kvxferd.wire.worker import RegionExport

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)

EXIT_WAIT_S = 2.0  # an agent that is not gone by then is left to the end of the process

MemoryInput: TypeAlias = "ResidentMemory | SharedMemory | tuple[int, int] | torch.Tensor"


def register(
    client: Client,
    engine: EngineSpec,
    layout: RankLayout,
    regions: Mapping[RegionId, MemoryInput] | Mapping[str, MemoryInput],
    timeout_s: float = 30.0,
    make_transport: MakeTransport | None = None,
) -> RankHandle:
    """Register a rank whose mover is a thread of this process. Blocks and raises as `Client.register` does.

    Each region is what `kvxferd.memory.share` returned, in any placement; a tensor (its whole storage); an
    (address, size in bytes) of host memory; or a `ResidentMemory`. Keep the memory mapped, at its address,
    until `Suspended` or a `close` after which `memory_in_use` is False; of tensors the client itself keeps
    the storage so long. Raises MoverError(nixl-unavailable) where there is no transfer library.
    `make_transport` replaces the library.

    Where all regions are shared in placements that a child mover maps, no mover is started here.
    """
    shared = {name: place for name, place in regions.items() if isinstance(place, SharedMemory)}
    if len(shared) == len(regions) and not any(place.is_resident for place in shared.values()):
        return client.register(engine, layout, shared, timeout_s)

    def launch(boot: BootId, exports: tuple[RegionExport, ...]) -> ThreadMover:
        own = [export for export in exports if export.kind == "resident"]
        agent = AgentName(f"{boot}/{secrets.token_hex(8)}")  # no name is ever used twice
        mover = ThreadMover(agent, own, make_transport or _nixl_transport)
        _RUNNING_MOVERS.add(mover)
        return mover

    if make_transport is None:
        _import_once()  # here, where blocking is allowed, and not in the mover's thread
    memories = {
        name: place if isinstance(place, SharedMemory) else memory_of(place)
        for name, place in regions.items()
    }
    return client.register(engine, layout, memories, timeout_s, launch=launch)


def memory_of(place: MemoryInput) -> ResidentMemory:
    """Return memory of this process in the form that `register` and `RankHandle.resume` take.

    Raises EngineError(region-invalid) for a tensor without memory, DeviceError where a GPU's driver
    does not know the address.
    """
    if isinstance(place, ResidentMemory):
        return place
    if isinstance(place, SharedMemory):
        if not isinstance(place.memory, ResidentMemory):
            raise EngineError(
                f"cannot use {place.placement} memory as resident: hand it to `resume` as it is",
                Code.REGION_INVALID,
            )
        return place.memory
    if isinstance(place, tuple):
        return ResidentMemory(*place)
    storage = place.untyped_storage()
    if not storage.nbytes():
        raise EngineError("cannot register a tensor without memory", Code.REGION_INVALID)
    address = storage.data_ptr()
    device = "" if place.device.type == "cpu" else open_driver().device_of(address)
    return ResidentMemory(address, storage.nbytes(), device, (storage,))


class _RunningMovers:
    """Movers whose threads may run; `add` closes those whose agents are gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._movers: list[ThreadMover] = []

    def add(self, mover: ThreadMover) -> None:
        with self._lock:
            for old in self._movers:
                if old.is_quiesced:
                    old.close()
            self._movers = [old for old in self._movers if not old.is_quiesced]
            self._movers.append(mover)

    def stop_all(self) -> None:
        """Stop all movers, because the interpreter ends: an agent in use would crash it then."""
        for mover in self._movers:
            mover.stop()
        deadline = time.monotonic() + EXIT_WAIT_S
        for mover in self._movers:
            if not mover.wait(max(0.0, deadline - time.monotonic())):
                _LOG.error("resident mover alive at exit: agent=%s", mover.agent)


_RUNNING_MOVERS = _RunningMovers()
atexit.register(_RUNNING_MOVERS.stop_all)

_libraries: list[TransferLibrary] = []
_import_lock = threading.Lock()


def _import_once() -> TransferLibrary:
    with _import_lock:
        if not _libraries:
            _libraries.append(import_library())
        return _libraries[0]


def _nixl_transport(agent: AgentName) -> Transport:
    return NixlTransport(_import_once(), agent)
