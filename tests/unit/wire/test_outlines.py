"""Manifests are left encoded until it is known who sent them; what is long on the loop is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvxferd.errors import ProtocolError
from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.common import Binding, RankManifest, RegionAddress
from kvxferd.wire.limits import MAX_GRANTS_PER_RENEWAL
from kvxferd.wire.outlines import (
    MAX_ENTRY_BYTES,
    PEER_OUTLINES,
    JoinRankOutline,
    ManifestReplyOutline,
    decode_join_rank,
    decode_manifest_reply,
)
from kvxferd.wire.peer import JoinRank, ManifestReply, RenewGrants, RequestDone


def manifest(layers: int = 3) -> RankManifest:
    spec = EngineSpec("e", "g", num_layers=layers, num_kv_heads=2, home="tcp://h:1")
    layout = attention_layout(
        spec=spec, layout="NHD", num_kv_heads=2, head_dim=2, block_tokens=4, num_blocks=8
    )
    regions = tuple(
        RegionAddress(r.region, 4096, r.size_bytes, pieces=((1, r.size_bytes),)) for r in layout.regions
    )
    return RankManifest(spec, layout, Binding("boot/1", b"meta", regions, "first"))


def test_what_is_put_together_is_what_was_sent():
    join = JoinRank(request=7, boot="b", manifest=manifest(), secret="s")
    outline = PEER_OUTLINES.decode(encode(join))
    assert isinstance(outline, JoinRankOutline)
    assert outline.manifest.spec == join.manifest.spec
    assert decode_join_rank(outline) == join == PEER_MESSAGES.decode(encode(join))
    engine = ManifestReply(request=7, boot="b", ranks=(manifest(), manifest(5)), num_ranks=2)
    outline = PEER_OUTLINES.decode(encode(engine))
    assert isinstance(outline, ManifestReplyOutline)
    assert decode_manifest_reply(outline) == engine
    assert PEER_OUTLINES.decode(encode(RequestDone(request=1))) == RequestDone(request=1)


NUMBERS = MAX_ENTRY_BYTES // 3  # of two numbers each, in three bytes
LONG = b"\xdd" + NUMBERS.to_bytes(4, "big") + b"\x92\x01\x01" * NUMBERS


@pytest.mark.parametrize(
    ("kind", "regions", "why"),
    [
        ("binding", [["kv", 4096, 4096, *[""] * 3, msgspec.Raw(LONG)]], "entry of"),  # one that is long
        ("binding", [1] * 1025, "length <= 1024"),  # more than there can be
        ("layout", [1] * 1025, "length <= 1024"),
    ],
)
def test_what_would_take_long_is_not_decoded(kind: str, regions: list[Any], why: str):
    plain = msgspec.msgpack.decode(encode(JoinRank(request=7, boot="b", manifest=manifest(), secret="s")))
    plain["manifest"][kind]["regions"] = regions
    with pytest.raises(ProtocolError, match=why):
        decode_join_rank(PEER_OUTLINES.decode(msgspec.msgpack.encode(plain)))  # type: ignore[arg-type]


def test_a_renewal_of_more_grants_than_can_be_held_is_not_decoded():
    within = RenewGrants(request=1, grants=("g",) * MAX_GRANTS_PER_RENEWAL)
    assert PEER_OUTLINES.decode(encode(within)) == within
    with pytest.raises(ProtocolError):
        PEER_OUTLINES.decode(encode(RenewGrants(request=1, grants=("",) * (MAX_GRANTS_PER_RENEWAL + 1))))
