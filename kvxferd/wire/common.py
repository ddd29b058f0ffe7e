"""Structs that more than one of the three protocols uses."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Any, Self

import msgspec

from kvxferd.errors import Code, EngineError, KvxferdError
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
from kvxferd.wire.bounds import ENDPOINT, METADATA, NAME, PIECES, REASON, REGIONS, TRACEPARENT
from kvxferd.wire.limits import MAX_ENDPOINT_CHARS, MAX_NAME_CHARS, MAX_REF_BYTES
from kvxferd.wire.traceparent import read_traceparent


class Message(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag=True,
    tag_field="t",
    kw_only=True,
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
    """A reference to a published transfer, plain as JSON. Any process that has it may read the transfer.

    The router carries it from the prefill engine to the decode engine. The engine that made it may be newer
    than the one that reads it: unknown fields are ignored, within `MAX_REF_BYTES`.

    Attributes:
        endpoint: the peer socket of the daemon that is the engine's home, ``tcp://HOST:PORT`` with
            ``#KEY`` behind it where CURVE is on.
        engine_id: the engine that published.
        generation: that engine's generation.
        transfer_id: as given to `publish`.
        nonce: 32 hex digits that prove the right to read.
        traceparent: of the request's trace (W3C Trace Context), where the publisher named one. Two
            references that differ in it alone are equal.
    """

    endpoint: Annotated[Endpoint, ENDPOINT]
    engine_id: Annotated[EngineId, NAME]
    generation: Annotated[Generation, NAME]
    transfer_id: Annotated[TransferId, NAME]
    nonce: Annotated[str, NAME]
    traceparent: Annotated[str, TRACEPARENT] = ""

    @classmethod
    def parse(cls, ref: RefLike) -> TransferRef:
        """Return the reference, whichever form it has. Raises EngineError(transfer-unknown).

        The result can be encoded: every field is checked here, in the caller's thread, also those of a
        `TransferRef`, which are not checked when it is made.
        """
        try:
            given = _ref_fields(ref)
            return cls(
                endpoint=Endpoint(_ref_text(given, "endpoint", MAX_ENDPOINT_CHARS)),
                engine_id=EngineId(_ref_text(given, "engine_id")),
                generation=Generation(_ref_text(given, "generation")),
                transfer_id=TransferId(_ref_text(given, "transfer_id")),
                nonce=_ref_text(given, "nonce"),
                # A hint: one that is not valid is dropped, and the transfer is pulled all the same.
                traceparent=read_traceparent(given.get("traceparent")),
            )
        # RecursionError: JSON that is nested as deep as it is long.
        except (msgspec.DecodeError, TypeError, ValueError, RecursionError) as error:
            raise EngineError(
                f"cannot read the transfer reference: {error}; hand on what publish() returned, unchanged",
                Code.TRANSFER_UNKNOWN,
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Return it as a dict of strings, for a router that builds JSON itself."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields

    def to_json(self) -> str:
        """Return it as a JSON object."""
        return msgspec.json.encode(self).decode()

    def __eq__(self, other: object) -> bool:
        """Whether both name the same transfer, whichever trace they carry."""
        if not isinstance(other, TransferRef):
            return NotImplemented
        return _IDENTITY(self) == _IDENTITY(other)

    def __hash__(self) -> int:
        """Return the hash of the reference's identity."""
        return hash(_IDENTITY(self))

    def with_trace(self, traceparent: str) -> Self:
        """Return the reference with that traceparent; "": without one."""
        return msgspec.structs.replace(self, traceparent=traceparent)

    @property
    def engine(self) -> EngineKey:
        """The source engine's key."""
        return EngineKey(self.engine_id, self.generation)


_IDENTITY = attrgetter("transfer_id", "nonce", "engine_id", "generation", "endpoint")
RefLike = TransferRef | Mapping[str, Any] | str | bytes


def _ref_fields(ref: object) -> Mapping[str, object]:
    """Return the reference's fields, unchecked."""
    if isinstance(ref, TransferRef):
        return msgspec.structs.asdict(ref)
    if isinstance(ref, str | bytes):
        if len(ref) > MAX_REF_BYTES:
            raise ValueError(f"it has {len(ref)} bytes, at most {MAX_REF_BYTES} go")
        ref = msgspec.json.decode(ref)
    if not isinstance(ref, Mapping):
        raise TypeError(f"it is a {type(ref).__name__}")
    return ref


def _ref_text(given: Mapping[str, object], name: str, most_chars: int = MAX_NAME_CHARS) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise TypeError(f"`{name}` is missing or no text")
    if not 0 < len(value) <= most_chars:
        raise ValueError(f"`{name}` has {len(value)} characters, 1 to {most_chars} go")
    return as_utf8_str(value)


def as_utf8_str(text: str) -> str:
    """Return a text that msgpack can carry. Raises UnicodeEncodeError (a ValueError) for a lone surrogate."""
    return str.encode(text).decode()


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


class MeasuredPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
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


class FdBatch(Message, frozen=True):
    """The first descriptors of a registration that has more than a frame carries.

    `first` is the number that came before: 0 starts over. The message that needs them carries the rest.
    """

    first: int


class BlockIds(Message, frozen=True):
    """The front part of a long block list; the message that names `stream` carries the rest.

    `offset` is the number of bytes of the group's list that came before: 0 starts the list over, and any
    other value must be where the last part ended.
    """

    stream: int
    group: Annotated[GroupName, NAME]
    offset: int
    ids: bytes
