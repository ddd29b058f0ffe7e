"""The memory that a mover serves: its rank's regions and its node's fence pages."""

from __future__ import annotations

from collections.abc import Sequence

from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.ids import SessionId
from kvxferd.memory import Mapping, check_memfd, map_memfd
from kvxferd.mover.transport import Span, Transport
from kvxferd.wire.common import RegionAddress
from kvxferd.wire.mover import Bound, FenceMapped
from kvxferd.wire.worker import RegionExport


class Bindings:
    """Maps and registers memory. Descriptors stay the caller's and may be closed afterwards."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._fences: dict[SessionId, Mapping] = {}
        self.regions: tuple[RegionAddress, ...] = ()

    def bind(self, exports: Sequence[RegionExport], fds: Sequence[int]) -> Bound:
        """Map and register all regions, or none. Raises KvxferdError."""
        if self.regions:
            raise EngineError("cannot bind a mover twice", Code.OUT_OF_PLACE)
        if not exports:
            raise EngineError("cannot bind a rank without regions", Code.REGION_INVALID)
        mapped: list[Mapping] = []
        registered: list[Span] = []
        try:
            for export in exports:
                mapped.append(_map(export, fds))
                self._transport.register(_span(mapped[-1]))
                registered.append(_span(mapped[-1]))
            metadata = self._transport.metadata(registered)
        except KvxferdError:
            for span in registered:
                self._transport.deregister(span)
            for mapping in mapped:
                mapping.unmap()
            raise
        self.regions = tuple(
            RegionAddress(export.region, mapping.address, mapping.size_bytes)
            for export, mapping in zip(exports, mapped, strict=True)
        )
        return Bound(regions=self.regions, metadata=metadata)

    def map_fence(self, session: SessionId, size_bytes: int, fd: int) -> FenceMapped:
        """Map and register a fence page. Raises KvxferdError."""
        if session in self._fences:
            raise EngineError(f"cannot map two fence pages of session {session}", Code.OUT_OF_PLACE)
        check_memfd(fd, size_bytes)
        mapping = map_memfd(fd, size_bytes)
        self._fences[session] = mapping
        self._transport.register(_span(mapping))
        metadata = self._transport.metadata([_span(mapping)])
        return FenceMapped(session=session, address=mapping.address, metadata=metadata)

    def unmap_fence(self, session: SessionId) -> None:
        """Let go of a session's page. A late reader finds zeros there, which are nobody's word."""
        mapping = self._fences.pop(session, None)
        if mapping is not None:
            self._transport.deregister(_span(mapping))
            mapping.blank()


def _map(export: RegionExport, fds: Sequence[int]) -> Mapping:
    if export.kind != "memfd":
        raise EngineError(
            f"cannot map region {export.region} of kind {export.kind!r}: only memfd is known here",
            Code.REGION_INVALID,
        )
    if not 0 <= export.fd_index < len(fds):
        raise EngineError(
            f"cannot map region {export.region}: it is in descriptor {export.fd_index}, {len(fds)} came",
            Code.REGION_INVALID,
        )
    fd = fds[export.fd_index]
    try:
        check_memfd(fd, export.fd_offset + export.size_bytes)
        return map_memfd(fd, export.size_bytes, export.fd_offset)
    except EngineError as error:
        raise EngineError(f"cannot bind region {export.region}: {error.message}", error.code) from error


def _span(mapping: Mapping) -> Span:
    return Span(mapping.address, mapping.size_bytes)
