"""Peer messages with their manifests still encoded, so that the sender is checked first.

A message of 16 MiB can be five million tuples of two numbers: decoding it in one go takes 1.1 s, and
skipping it 0.1 s. So manifests are decoded tensor by tensor and region by region, off the daemon's event
loop, and only from senders that may send them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvxferd.errors import Code, ProtocolError
from kvxferd.ids import AgentName, BootId, Incarnation
from kvxferd.layout import CacheTensor, EngineSpec, Group, RankLayout, RegionSpec
from kvxferd.layout.validate import MAX_TENSORS
from kvxferd.wire import peer
from kvxferd.wire.bounds import METADATA, NAME, REQUIRED_NAME
from kvxferd.wire.codec import Decoder
from kvxferd.wire.common import Binding, Message, RankManifest, RegionAddress
from kvxferd.wire.limits import MAX_GROUPS_PER_REQUEST, MAX_RANKS, MAX_REGIONS

# One tensor, or one region's address, is decoded in one go. Unit ranges of a tensor whose units are
# listed one by one are 4 bytes each, pieces of a region 10. Dense ones take 70 ns a byte: 9 ms.
MAX_ENTRY_BYTES = 128 << 10

Entries = tuple[msgspec.Raw, ...]


class BindingOutline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `Binding` whose regions are still encoded."""

    agent: Annotated[AgentName, NAME]
    metadata: Annotated[bytes, METADATA]
    regions: Annotated[Entries, msgspec.Meta(max_length=MAX_REGIONS)]
    incarnation: Annotated[Incarnation, NAME]


class LayoutOutline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `RankLayout` whose lists are still encoded."""

    start_layer: int
    end_layer: int
    groups: Annotated[Entries, msgspec.Meta(max_length=MAX_GROUPS_PER_REQUEST)]
    tensors: Annotated[Entries, msgspec.Meta(max_length=MAX_TENSORS)]
    regions: Annotated[Entries, msgspec.Meta(max_length=MAX_REGIONS)]


class ManifestOutline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `RankManifest` of which only the fields that name its rank are decoded."""

    spec: EngineSpec
    layout: msgspec.Raw
    binding: BindingOutline


class JoinRankOutline(Message, frozen=True, tag="JoinRank"):
    """A `JoinRank` whose manifest is still encoded."""

    request: int
    boot: Annotated[BootId, NAME]
    manifest: ManifestOutline
    secret: Annotated[str, REQUIRED_NAME]


class ManifestReplyOutline(Message, frozen=True, tag="ManifestReply"):
    """A `ManifestReply` whose manifests are still encoded."""

    request: int
    boot: Annotated[BootId, NAME]
    ranks: Annotated[Entries, msgspec.Meta(max_length=MAX_RANKS)]
    num_ranks: int


PeerOutline = peer.PlainRequest | peer.PlainReply | JoinRankOutline | ManifestReplyOutline

PEER_OUTLINES: Decoder[PeerOutline] = Decoder(PeerOutline)

_MANIFEST: Decoder[ManifestOutline] = Decoder(ManifestOutline)
_LAYOUT: Decoder[LayoutOutline] = Decoder(LayoutOutline)
_GROUP: Decoder[Group] = Decoder(Group)
_TENSOR: Decoder[CacheTensor] = Decoder(CacheTensor)
_REGION: Decoder[RegionSpec] = Decoder(RegionSpec)
_ADDRESS: Decoder[RegionAddress] = Decoder(RegionAddress)


def decode_join_rank(outline: JoinRankOutline) -> peer.JoinRank:
    """Return the message with its manifest decoded. Raises ProtocolError(bad-frame)."""
    manifest = _decode_manifest(outline.manifest)
    return peer.JoinRank(request=outline.request, boot=outline.boot, manifest=manifest, secret=outline.secret)


def decode_manifest_reply(outline: ManifestReplyOutline) -> peer.ManifestReply:
    """Return the message with its manifests decoded. Raises ProtocolError(bad-frame)."""
    ranks = tuple(_decode_manifest(_MANIFEST.decode(bytes(raw))) for raw in outline.ranks)
    return peer.ManifestReply(
        request=outline.request, boot=outline.boot, ranks=ranks, num_ranks=outline.num_ranks
    )


def _decode_manifest(outline: ManifestOutline) -> RankManifest:
    layout = _LAYOUT.decode(bytes(outline.layout))
    binding = outline.binding
    return RankManifest(
        outline.spec,
        RankLayout(
            layout.start_layer,
            layout.end_layer,
            tuple(_GROUP.decode(_checked_entry(raw)) for raw in layout.groups),
            tuple(_TENSOR.decode(_checked_entry(raw)) for raw in layout.tensors),
            tuple(_REGION.decode(_checked_entry(raw)) for raw in layout.regions),
        ),
        Binding(
            binding.agent,
            binding.metadata,
            tuple(_ADDRESS.decode(_checked_entry(raw)) for raw in binding.regions),
            binding.incarnation,
        ),
    )


def _checked_entry(raw: msgspec.Raw) -> bytes:
    entry = bytes(raw)
    if len(entry) > MAX_ENTRY_BYTES:
        raise ProtocolError(
            f"cannot take an entry of {len(entry)} bytes in a manifest: {MAX_ENTRY_BYTES} is the limit",
            Code.BAD_FRAME,
        )
    return entry
