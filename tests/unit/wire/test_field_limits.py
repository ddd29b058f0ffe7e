"""Everything that a message holds has a limit: at the field, or by a check that is named here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from kvxferd.errors import ProtocolError
from kvxferd.wire import mover, outlines, peer, worker
from kvxferd.wire.codec import CLIENT_MESSAGES, PEER_MESSAGES, encode

UNIONS = {
    "a worker": worker.ClientMessage,
    "a peer": peer.PeerMessage,
    "a peer, not whole": outlines.PeerOutline,
    "a mover": mover.FromMover,
}

SPEC = "core.manifest_checks.check_spec, and layout.validate before a rank is kept"
LAYOUT = (
    "layout.validate: what it refuses is not kept; a frame of 1 MiB, or wire.outlines, bounds its decoding"
)
NAMES = "core.manifest_checks.check_names, before it is kept"
IDS = "MAX_REQUEST_IDS_BYTES of core.arriving, and core.kept_ids"
TICKETS = "core.requests refuses more than may run"
PUBLISHED = "core.requests and core.source refuse it before it is kept"
RAW = "decoded entry by entry, wire.outlines.MAX_ENTRY_BYTES each"

CHECKED_ELSEWHERE = {
    **dict.fromkeys(["EngineSpec.engine_id", "EngineSpec.generation", "EngineSpec.home"], SPEC),
    "EngineSpec.fingerprint": SPEC,
    **dict.fromkeys(["RankLayout.groups", "RankLayout.tensors", "RankLayout.regions"], LAYOUT),
    **dict.fromkeys(["Group.name", "RegionSpec.region", "CacheTensor.component"], LAYOUT),
    **dict.fromkeys(["CacheTensor.group", "CacheTensor.region", "CacheTensor.units"], LAYOUT),
    **dict.fromkeys(["CacheTensor.dtype", "CacheTensor.encoding"], LAYOUT),
    "RegionExport.region": "core.ranks: one of the layout's",
    "Hello.client": "MAX_HELLO_BYTES, the whole message's",
    **dict.fromkeys(["Register.incarnation", "Attach.engine_id", "Attach.generation"], NAMES),
    "Resume.incarnation": "core.ranks, before it is kept",
    **dict.fromkeys(["BlockIds.ids", "PackedBlocks.ids"], IDS),
    **dict.fromkeys(["Publish.transfer_id", "Publish.incarnations"], PUBLISHED),
    **dict.fromkeys(["DeliveredByMover.tickets", "PullsResumed.tickets", "PullsResumed.arrived"], TICKETS),
    **dict.fromkeys(
        ["Publish.blocks", "PullRequest.blocks", "Ready.blocks"],
        "layout.blocks: a group that is none is refused",
    ),
    "Unpublish.transfer_id": "compared alone",
    **dict.fromkeys([f"GrantReply.fence_{name}" for name in ("agent", "word", "metadata")], "core.holds"),
    "ManifestReply.ranks": "wire.outlines.EngineOutline",
    **dict.fromkeys(["PeerRefused.message", "StillWaiting.why"], "core.peers clips it to MAX_SENTENCE_CHARS"),
    **dict.fromkeys(["ManifestOutline.layout", "BindingOutline.regions", "ManifestReplyOutline.ranks"], RAW),
}


def unbounded(of: inspect.Type, field: str, seen: set[type]) -> Iterator[str]:
    """Every field below that has no limit of its own, as `Struct.field`."""
    match of:
        case inspect.StrType() | inspect.BytesType():
            if of.max_length is None:
                yield field
        case inspect.VarTupleType() | inspect.ListType() | inspect.SetType() | inspect.FrozenSetType():
            if of.max_length is None:
                yield field
            yield from unbounded(of.item_type, field, seen)
        case inspect.DictType():
            if of.max_length is None:
                yield field
            yield from unbounded(of.key_type, field, seen)
            yield from unbounded(of.value_type, field, seen)
        case inspect.TupleType():
            for one in of.item_types:
                yield from unbounded(one, field, seen)
        case inspect.UnionType():
            for one in of.types:
                yield from unbounded(one, field, seen)
        case inspect.StructType() | inspect.NamedTupleType():
            if of.cls not in seen:
                seen.add(of.cls)
                for part in of.fields:
                    yield from unbounded(part.type, f"{of.cls.__name__}.{part.name}", seen)
        case (
            inspect.IntType() | inspect.FloatType() | inspect.BoolType() | inspect.NoneType()
            | inspect.EnumType() | inspect.LiteralType()
        ):  # fmt: skip
            pass
        case _:  # raw, any, and what is not thought of yet
            yield field


def found(union: object) -> set[str]:
    return set(unbounded(inspect.type_info(union), "", set()))


@pytest.mark.parametrize("sender", UNIONS)
def test_each_field_has_a_limit_or_a_check_elsewhere(sender: str) -> None:
    assert not found(UNIONS[sender]) - CHECKED_ELSEWHERE.keys()


def test_no_check_is_named_for_a_field_that_has_a_limit() -> None:
    assert not CHECKED_ELSEWHERE.keys() - set().union(*map(found, UNIONS.values()))


def test_a_field_without_a_limit_is_found() -> None:
    inner = msgspec.defstruct("Inner", [("names", dict[str, tuple[bytes, ...]]), ("number", int)])
    outer = msgspec.defstruct("Outer", [("inner", inner | None), ("anything", msgspec.Raw)])
    assert found(outer) == {"Inner.names", "Outer.anything"}


def test_an_impossible_report_is_not_decoded() -> None:
    report: dict[str, Any] = {"transfer_id": "t", "incarnation": "i", "ready_tokens": -2}
    of_rank: dict[str, Any] = {"engine_id": "e", "generation": "g", "rank": (0, 0), "secret": "s"}
    with pytest.raises(ProtocolError, match=">= -1"):
        CLIENT_MESSAGES.decode(encode(worker.Ready(**report)))
    with pytest.raises(ProtocolError, match=">= -1"):
        PEER_MESSAGES.decode(encode(peer.RankReady(request=1, **of_rank, **report)))
