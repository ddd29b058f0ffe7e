"""The memory that a mover serves: its rank's regions and its node's fence pages."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from typing import NamedTuple, TypeVar

from kvxferd.errors import Code, DeviceError, EngineError
from kvxferd.ids import SessionId
from kvxferd.memory import Mapping, check_memfd, map_memfd
from kvxferd.memory.device import DeviceMapping
from kvxferd.memory.driver import Driver, WriteOrder
from kvxferd.memory.driver_registry import open_driver
from kvxferd.memory.prefault import prefault
from kvxferd.memory.validate import check_exports
from kvxferd.mover.chunks.device_scatter import DeviceScatterer
from kvxferd.mover.transport.base import MemoryRange, TransportError
from kvxferd.mover.transport.copy_probe import probe_copy_rows
from kvxferd.mover.transport.probe import ProbeOutcome, placement_of, probe_span
from kvxferd.mover.transport.staging import StagedTransport
from kvxferd.wire.common import MeasuredPlacement, RegionAddress
from kvxferd.wire.mover import Bound, DevicePlacement, FenceMapped
from kvxferd.wire.worker import RegionExport

_LOG = logging.getLogger(__name__)

M = TypeVar("M", Mapping, DeviceMapping)

_OVER_TCP_ALONE = "GPU memory is read over TCP, because it cannot be copied"
_OVER_TCP = (
    "the transfer library reads this GPU over TCP, in pieces of a few KiB, and copies are faster; "
    'mover.placement = "direct" leaves it to TCP'
)


class BoundRegions(NamedTuple):
    """Regions at their addresses in this process, and the spans that readers must load for them."""

    regions: tuple[RegionAddress, ...]
    spans: tuple[MemoryRange, ...]


class Bindings:
    """Maps and registers memory. Descriptors stay the caller's, which may close them afterwards."""

    def __init__(
        self,
        transport: StagedTransport,
        make_driver: Callable[[], Driver] = open_driver,
        own_regions: Sequence[RegionExport] = (),
    ) -> None:
        """`make_driver` is called when there is GPU memory to bind, and not before.

        `own_regions` are the regions of this process's own memory, which may be bound where they lie. A child
        has none.
        """
        self._own_regions = frozenset(own_regions)
        self._mappings: list[Mapping | DeviceMapping] = []
        self._transport = transport
        self._make_driver = make_driver
        self._fences: dict[SessionId, Mapping] = {}
        self._host_spans: tuple[MemoryRange, ...] = ()
        self._prefaulting: deque[Iterator[None]] = deque()
        self._device_placement = DevicePlacement.AUTO
        self._placement = MeasuredPlacement()
        self._scatters = False
        self._scattering_driver: Driver | None = None
        self.device_scatterer: DeviceScatterer | None = (
            None  # where all regions are in a GPU that copies right
        )
        self.regions: tuple[RegionAddress, ...] = ()
        self.flush: Callable[[], None] | None = None  # called before bytes read into a device count as read

    def bind(
        self,
        exports: Sequence[RegionExport],
        fds: Sequence[int],
        *,
        device_placement: DevicePlacement = DevicePlacement.AUTO,
        scatters: bool = False,
    ) -> Bound:
        """Map and register all regions, or none. Raises KvxferdError.

        `scatters`: whether covering reads are wanted, so that a GPU's copies of rows are to be probed.
        """
        if self.regions:
            raise EngineError("cannot bind a mover twice", Code.OUT_OF_PLACE)
        if not exports:
            raise EngineError("cannot bind a rank without regions", Code.REGION_INVALID)
        check_exports(exports, fds)
        self._device_placement, self._scatters = device_placement, scatters
        by_kind = {kind: [e for e in exports if e.kind == kind] for kind in ("memfd", "vmm", "resident")}
        with ExitStack() as undoing:
            bound = [
                self._bind_host(by_kind["memfd"], fds, undoing),
                self._bind_device(by_kind["vmm"], fds, undoing),
                self._bind_resident(by_kind["resident"], undoing),
            ]
            metadata = self._transport.metadata([span for one in bound for span in one.spans])
            undoing.pop_all()
        addresses = {region.region: region for one in bound for region in one.regions}
        self.regions = tuple(addresses[export.region] for export in exports)
        self._make_device_scatterer(exports)
        return Bound(regions=self.regions, metadata=metadata, placement=self._placement)

    def _make_device_scatterer(self, exports: Sequence[RegionExport]) -> None:
        """Make what scatters in a GPU where that is wanted, and the probe shows that it is right.

        Nothing that goes wrong here concerns direct reads, so it is logged and no more.
        """
        driver = self._scattering_driver
        if driver is None or not all(export.device for export in exports):
            return
        uuid = exports[0].device
        try:
            if why := probe_copy_rows(driver, uuid):
                _LOG.warning("GPU memory read directly: device=%s reason=%s", uuid, why)
                return
            self.device_scatterer = DeviceScatterer(driver, uuid, self.regions, self.flush)
        except DeviceError as error:
            _LOG.warning("GPU memory read directly: device=%s reason=%s", uuid, error.message)

    @property
    def has_pages_to_prefault(self) -> bool:
        """Whether host memory is bound whose pages may not be mapped yet."""
        return bool(self._prefaulting)

    def prefault_some(self) -> None:
        """Map some of those pages, for less than a millisecond."""
        for _ in self._prefaulting[0]:
            return
        self._prefaulting.popleft()

    def probe_host_memory(self, placement: MeasuredPlacement) -> MeasuredPlacement | None:
        """Return what a read of the bound host memory shows; None where there is none, or it was probed.

        The first region and the last stand for all, because all are mapped and registered alike.
        """
        if not self._host_spans or placement.gigabytes_per_s or placement.why:
            return None
        ends = dict.fromkeys((self._host_spans[0], self._host_spans[-1]))
        return placement_of(placement.kind, self._probe(ends))

    # --- one kind of memory each: all or nothing, `undoing` holds the steps back

    def _bind_host(self, exports: list[RegionExport], fds: Sequence[int], undoing: ExitStack) -> BoundRegions:
        regions, spans = [], []
        for export in exports:
            mapping = self._keep_mapping(_map_region(export, fds), undoing)
            spans.append(self._register(_span_of(mapping), undoing))
            regions.append(RegionAddress(export.region, mapping.address, mapping.size_bytes))
            self._prefaulting.append(prefault(mapping))
            undoing.callback(self._prefaulting.clear)
        self._host_spans = tuple(spans)
        return BoundRegions(tuple(regions), tuple(spans))

    def _bind_device(
        self, exports: list[RegionExport], fds: Sequence[int], undoing: ExitStack
    ) -> BoundRegions:
        if not exports:
            return BoundRegions((), ())
        uuid, driver = _only_device(exports), self._make_driver()
        ordinal = driver.device(uuid).ordinal
        sizes = _sizes_by_descriptor(exports)
        numbers = sorted(sizes)
        mapping = DeviceMapping.map(driver, uuid, [(fds[number], sizes[number]) for number in numbers])
        self._keep_mapping(mapping, undoing)
        handles = dict(zip(numbers, mapping.allocations, strict=True))
        found = [MemoryRange(*handle, driver.mem_type, ordinal) for handle in mapping.allocations]
        spans = self._register_or_stage("direct", driver, uuid, found, undoing)
        regions = tuple(
            RegionAddress(
                export.region,
                handles[export.fd_index].address + export.fd_offset,
                export.size_bytes,
                ordinal,
                driver.mem_type,
                pieces_of(export),
                staged=self._placement.kind == "staged",
            )
            for export in exports
        )
        return BoundRegions(regions, spans)

    def _register_or_stage(
        self, kind: str, driver: Driver, uuid: str, found: Sequence[MemoryRange], undoing: ExitStack
    ) -> tuple[MemoryRange, ...]:
        """Register a GPU's memory, or stage it where the library cannot read it. Returns what readers load.

        A registration that succeeds proves nothing; only a read does. And a read proves nothing of the order
        in which the device sees what a network card writes; only the driver can report that.
        """
        why = "mover.placement is staged" if self._device_placement is DevicePlacement.STAGED else ""
        order = driver.write_order(uuid)
        if not why and order is WriteOrder.NONE:
            why = (
                f"cannot have a network card write to {uuid}: it neither orders such writes nor flushes them "
                "(GPU_DIRECT_RDMA_WRITES_ORDERING, GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)"
            )
        if not why:
            with ExitStack() as registering:
                try:
                    for span in found:
                        self._register(span, registering)
                    proof = self._probe(dict.fromkeys((found[0], found[-1])), driver)
                except TransportError as error:
                    proof = ProbeOutcome(False, error.message, False, 0.0)
                why = proof.why
                if proof.over_tcp and self._device_placement is DevicePlacement.AUTO:
                    try:
                        return self._stage(driver, uuid, found, _OVER_TCP)
                    except (DeviceError, TransportError) as error:
                        # There may be no room for pinned memory: slow reads are better than none.
                        proof = proof._replace(why=f"{_OVER_TCP_ALONE}: {error.message}")
                        _LOG.warning("GPU memory read over TCP: device=%s reason=%s", uuid, error.message)
                if not why:
                    self._placement = placement_of(kind, proof)
                    self.flush = partial(_flush, driver, uuid) if order is WriteOrder.FLUSH else None
                    self._scattering_driver = driver if self._scatters else None
                    undoing.push(registering.pop_all())
                    return tuple(found)
                if proof.is_stuck:  # a read may go on, so its memory stays registered
                    undoing.push(registering.pop_all())
        return self._stage(driver, uuid, found, why)

    def _stage(
        self, driver: Driver, uuid: str, found: Sequence[MemoryRange], why: str
    ) -> tuple[MemoryRange, ...]:
        spans = self._transport.stage(driver, uuid, found)
        _LOG.warning("GPU memory staged: device=%s reason=%s", uuid, why)
        self._placement = MeasuredPlacement("staged", why)
        return spans

    def _probe(self, spans: Iterable[MemoryRange], driver: Driver | None = None) -> ProbeOutcome:
        """Return the first outcome that fails, or else the last: all were mapped and registered alike."""
        proof = ProbeOutcome(True, "", False, 0.0)
        for span in spans:
            proof = probe_span(self._transport, span, driver)
            if not proof.ok:
                break
        return proof

    def _bind_resident(self, exports: list[RegionExport], undoing: ExitStack) -> BoundRegions:
        """Register memory of this process itself: the mover is a thread of the worker."""
        for export in exports:
            if export not in self._own_regions:
                raise EngineError(
                    f"cannot bind region {export.region} where it lies: not memory of this mover's process",
                    Code.REGION_INVALID,
                )
        if exports:
            self._placement = MeasuredPlacement("resident")
        on_host = [export for export in exports if not export.device]
        spans = [self._register(MemoryRange(e.address, e.size_bytes), undoing) for e in on_host]
        regions = [RegionAddress(e.region, e.address, e.size_bytes) for e in on_host]
        if on_device := [export for export in exports if export.device]:
            uuid, driver = _only_device(on_device), self._make_driver()
            ordinal = driver.device(uuid).ordinal
            found = [MemoryRange(e.address, e.size_bytes, driver.mem_type, ordinal) for e in on_device]
            spans += self._register_or_stage("resident", driver, uuid, found, undoing)
            staged = self._placement.kind == "staged"
            regions += [
                RegionAddress(e.region, e.address, e.size_bytes, ordinal, driver.mem_type, staged=staged)
                for e in on_device
            ]
        return BoundRegions(tuple(regions), tuple(spans))

    def _keep_mapping(self, mapping: M, undoing: ExitStack) -> M:
        undoing.callback(mapping.unmap)
        self._mappings.append(mapping)
        return mapping

    def _register(self, span: MemoryRange, undoing: ExitStack) -> MemoryRange:
        self._transport.register(span)
        undoing.callback(self._transport.deregister, span)
        return span

    # --- fence pages

    def map_fence(self, session: SessionId, size_bytes: int, fd: int) -> FenceMapped:
        """Map and register a fence page, or nothing of it. Raises KvxferdError."""
        if session in self._fences:
            raise EngineError(f"cannot map two fence pages of session {session}", Code.OUT_OF_PLACE)
        check_memfd(fd, size_bytes)
        mapping = map_memfd(fd, size_bytes)
        with ExitStack() as undoing:
            undoing.callback(mapping.unmap)
            span = self._register(_span_of(mapping), undoing)
            metadata = self._transport.metadata([span])
            undoing.pop_all()
        self._fences[session] = mapping
        return FenceMapped(session=session, address=mapping.address, metadata=metadata)

    def unmap_fence(self, session: SessionId) -> None:
        """Release a session's page. A late reader finds zeros there, which are no transfer's word.

        Its address stays in use: over TCP this process sends what a peer with old metadata asks for, at any
        later time, and would die by SIGSEGV where nothing is mapped. That costs 64 KiB of addresses a session
        and no memory. The kernel makes one mapping of neighbours: after 3,000 sessions, 16 at a time, the
        mover had 32 mappings more of the 65,530 that a process may have, and 132 KiB more resident.
        """
        mapping = self._fences.pop(session, None)
        if mapping is not None:
            self._transport.deregister(_span_of(mapping))
            mapping.blank()

    def close(self) -> None:
        """Unmap everything, for a mover whose process goes on. Call it only when the agent is gone.

        An agent that still sends from unmapped memory kills its process by SIGSEGV.
        """
        self._prefaulting.clear()
        for mapping in (*self._mappings, *self._fences.values()):
            mapping.unmap()
        self._mappings.clear()
        self._fences.clear()


def _map_region(export: RegionExport, fds: Sequence[int]) -> Mapping:
    try:
        return map_memfd(fds[export.fd_index], export.size_bytes, export.fd_offset)
    except EngineError as error:
        raise EngineError(f"cannot bind region {export.region}: {error.message}", error.code) from error


def _flush(driver: Driver, uuid: str) -> None:
    with driver.on(uuid):
        driver.flush_writes()


def _only_device(exports: Iterable[RegionExport]) -> str:
    devices = sorted({export.device for export in exports})
    if len(devices) > 1:
        raise EngineError(
            f"cannot bind a rank with memory of several GPUs ({', '.join(devices)}): register a rank each",
            Code.REGION_INVALID,
        )
    return devices[0]


def _sizes_by_descriptor(exports: Iterable[RegionExport]) -> dict[int, int]:
    """Return the size of each descriptor. Raises EngineError where two regions disagree about one."""
    sizes: dict[int, int] = {}
    for export in exports:
        for number, size in enumerate(export.pieces, export.fd_index):
            if sizes.setdefault(number, size) != size:
                raise EngineError(
                    f"cannot bind region {export.region}: descriptor {number} has {size} bytes for it, and "
                    f"{sizes[number]} for another",
                    Code.REGION_INVALID,
                )
    return sizes


def pieces_of(export: RegionExport) -> tuple[tuple[int, int], ...]:
    """Return (count, size) of the parts of a region that are registered each by itself; () for one part."""
    if len(export.pieces) == 1:
        return ()
    sizes = list(export.pieces)
    sizes[-1] -= sum(sizes) - export.fd_offset - export.size_bytes
    sizes[0] -= export.fd_offset
    return tuple((len(list(alike)), size) for size, alike in groupby(sizes))


def _span_of(mapping: Mapping) -> MemoryRange:
    return MemoryRange(mapping.address, mapping.size_bytes)
