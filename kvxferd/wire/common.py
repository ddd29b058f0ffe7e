"""Structs that more than one of the three protocols uses."""

from __future__ import annotations

from typing import Annotated, Self

import msgspec

from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import (
    AgentName,
    Endpoint,
    EngineId,
    EngineKey,
    Generation,
    GroupName,
    Incarnation,
    Rank,
    RegionId,
    TransferId,
)
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.wire.bounds import METADATA, NAME, PIECES, REASON, REGIONS, TRACEPARENT


class Message(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="t", kw_only=True
):
    """Base of everything that is sent: a msgpack map whose key ``t`` names the type."""


# The incarnation of each rank's memory in an engine: a publish is bound to them.
RankIncarnations = tuple[tuple[Rank, Incarnation], ...]


class Versions(msgspec.Struct, frozen=True, array_like=True):
    """The protocol versions that a side supports, both ends included."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        return str(self.newest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


class TransferRef(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The reference that the router carries from the prefill engine to the decode engine: plain JSON.

    The engine that made it may be newer than the one that reads it: unknown fields are ignored, within
    `MAX_REF_BYTES`.
    """

    endpoint: Endpoint  # the home's peer socket
    engine_id: EngineId
    generation: Generation
    transfer_id: TransferId
    nonce: str  # 32 hex digits; any process that has it may read the transfer
    # Of the request's trace, as `read_traceparent` returns it; "": none. Not part of the identity.
    traceparent: Annotated[str, TRACEPARENT] = ""

    def __eq__(self, other: object) -> bool:
        """Whether both name the same transfer, whichever trace they carry."""
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, TransferRef)
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        """Return the hash of the reference's identity."""
        return hash(self._identity())

    def _identity(self) -> tuple[str, str, str, str, str]:
        return self.transfer_id, self.nonce, self.engine_id, self.generation, self.endpoint

    def with_trace(self, traceparent: str) -> Self:
        """Return the reference with that traceparent; "": without one."""
        return msgspec.structs.replace(self, traceparent=traceparent)

    @property
    def engine(self) -> EngineKey:
        """The source engine's key."""
        return EngineKey(self.engine_id, self.generation)


class RegionAddress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a region lies in its mover's address space, in the terms of a NIXL descriptor."""

    region: Annotated[RegionId, NAME]
    address: int
    size_bytes: int
    device: int = 0  # NIXL's device id in that process
    mem_type: Annotated[str, NAME] = "DRAM"
    # (count, size) of the address ranges that are each registered alone: no read may cross from one
    # into the next. Empty: the region is registered as one.
    pieces: Annotated[tuple[tuple[int, int], ...], PIECES] = ()
    staged: bool = False  # NIXL cannot read it: its mover copies the bytes that a reader requests


class Binding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The part of a manifest that makes a layout readable: addresses, agent and incarnation."""

    agent: Annotated[AgentName, NAME]
    metadata: Annotated[bytes, METADATA]  # NIXL agent metadata of the registered regions
    regions: Annotated[tuple[RegionAddress, ...], REGIONS]
    incarnation: Annotated[Incarnation, NAME]


class RankManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One rank of an engine as a reader needs it."""

    spec: EngineSpec
    layout: RankLayout
    binding: Binding

    @property
    def rank(self) -> Rank:
        """The rank's place in its engine."""
        return self.spec.rank


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a rank's mover reaches the rank's memory, as its probe measured."""

    kind: Annotated[str, NAME] = "direct"  # direct, resident or staged
    why: Annotated[str, REASON] = ""  # not direct
    lanes: Annotated[str, REASON] = ""  # the transports that the transfer library chose
    gigabytes_per_s: float = 0.0  # of the probe's read; 0: not measured


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a request was refused: a code for machines, a sentence for people."""

    code: Code
    message: str
    retry_after_s: float = 0.0  # with the code `busy`: when another attempt may succeed

    @classmethod
    def of(cls, error: KvxferdError) -> Refusal:
        """Return the refusal that reports the error."""
        return cls(error.code, error.message, error.retry_after_s)


class FdBatch(Message, frozen=True, tag="descriptors"):
    """The first descriptors of a registration that has more than a frame carries.

    `first` is the number that came before: 0 starts over. The message that needs them carries the rest.
    """

    first: int


class BlockIds(Message, frozen=True, tag="block-ids"):
    """The front part of a long block list; the message that names `stream` carries the rest.

    `offset` is the number of bytes of the group's list that came before: 0 starts the list over, and any
    other value must be where the last part ended.
    """

    stream: int
    group: Annotated[GroupName, NAME]
    offset: int
    ids: bytes
