"""Processes that are no client: what each sends its daemon, and with which codes that replies in turn.

What is just allowed is followed by what ends it, or by something that is refused with another code.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from kvxferd.core.settings import Settings
from kvxferd.core.worker_requests import MAX_PULL_S
from kvxferd.errors import Code
from kvxferd.ids import EngineId, Generation, GroupName, Incarnation, Rank, Ticket, TransferId
from kvxferd.layout import EngineSpec, PackedBlocks
from kvxferd.layout.presets import attention_layout
from kvxferd.memory import SealedMemory
from kvxferd.plan.block_list_checks import MAX_TOKENS
from kvxferd.wire import limits as sizes
from kvxferd.wire import worker as wire
from kvxferd.wire.codec import encode
from kvxferd.wire.common import BlockIds, FdBatch, Message, TransferRef, Versions
from kvxferd.wire.framing import HEADER, encode_frame
from tests.simulation.false_messages import LONG_NAME, NAME
from tests.simulation.history import End
from tests.support.raw_worker import RawWorker, frame

NUM_TOKENS = 5  # of a block, of which there are two
WORD = b"0123456789abcdef"
WITH_WORDS = (1, sizes.FENCE_SLOTS - 1)  # slots
HEARD = (wire.Farewell, wire.PublishRefused, wire.Refused, wire.Released, wire.TicketFailed)
Rows = list[tuple[tuple[Code, ...], list[Message | bytes]]]
INVALID, BAD, WRONG_FRAME = Code.BLOCKS_INVALID, Code.BAD_REQUEST, Code.BAD_FRAME
OUT, TAKEN = Code.OUT_OF_PLACE, Code.UNPUBLISHED  # what is taken is withdrawn

HELLO = wire.Hello(versions=wire.WORKER_VERSIONS, client="stranger")
ATTACH = wire.Attach(request=1, engine_id=EngineId("stranger"), generation=Generation("g1"))
IDS = [
    BlockIds(stream=n, group=GroupName("g"), offset=0, ids=b"") for n in range(sizes.MAX_OPEN_ASSEMBLIES + 1)
]
GROUPS = [replace(IDS[0], group=f"g{n}") for n in range(sizes.MAX_GROUPS_PER_REQUEST + 1)]
SPEC = EngineSpec(EngineId("stranger"), Generation("g1"), num_layers=1, num_kv_heads=1)
LAYOUT = attention_layout(spec=SPEC, num_kv_heads=1, head_dim=2, block_tokens=NUM_TOKENS, num_blocks=2)
((REGION, REGION_BYTES),) = [(one.region, one.size_bytes) for one in LAYOUT.regions]
INCARNATION = Incarnation("here")


def _lists(*ids: int, at: int = 0) -> dict[GroupName, PackedBlocks]:
    return {GroupName("full"): PackedBlocks(struct.pack(f"<{len(ids)}i", *ids), at)}


T1, EMPTY = TransferId("t1"), {GroupName("full"): PackedBlocks(b"")}
PUBLISH = wire.Publish(
    T1, "0" * 32, _lists(0), NUM_TOKENS, fence_slot=1, incarnations=((Rank(0, 0), INCARNATION),)
)
UNPUBLISH = wire.Unpublish(T1)
# Its endpoint and generation are put in as it is sent.
REF = TransferRef("", "stranger", "", "t1", "0" * 32)  # type: ignore[arg-type]
OTHER = replace(REF, engine_id="nobody")
PULL = wire.PullRequest(ticket=Ticket(1), ref=OTHER, blocks=_lists(0), num_tokens=NUM_TOKENS, deadline_s=9.0)


def _publish(**changed: Any) -> Message:
    return replace(PUBLISH, **changed)


def _pull(**changed: Any) -> Message:
    return replace(PULL, **changed)


def _add(blocks: dict[GroupName, PackedBlocks], **more: Any) -> Message:
    return wire.Ready(T1, blocks=blocks, **more)


def _large_hello(num_bytes: int) -> Message:
    more = num_bytes - len(encode(replace(HELLO, client="s" * 300)))
    return replace(HELLO, client="s" * (300 + more))


GROWING, GROWING_BY_ONE = _publish(ready_tokens=0, blocks={}), _publish(ready_tokens=0, num_tokens=6)
LATER = _publish(fence_slot=1 << 30, stream=99)  # is refused, so all before it was not
TICKETS = tuple(map(Ticket, range(sizes.MAX_DELIVERED_BY_MOVER)))
PART = BlockIds(stream=1, group=GroupName("full"), offset=0, ids=bytes(4))
IN_PARTS = _publish(blocks=EMPTY, stream=1)

OF_STRANGERS: Rows = [
    ((OUT,), [wire.Suspend()]),
    ((OUT,), [HELLO, HELLO]),
    ((Code.BAD_VERSION,), [wire.Hello(versions=Versions(99, 99), client="stranger")]),
    ((Code.BAD_VERSION,), [wire.Hello(versions=Versions(0, 0), client="stranger")]),
    ((OUT,), [wire.Hello(versions=Versions(0, 99), client="stranger"), wire.Suspend()]),
    ((OUT,), [_large_hello(sizes.MAX_HELLO_BYTES), wire.Suspend()]),
    ((Code.FRAME_TOO_LARGE,), [_large_hello(sizes.MAX_HELLO_BYTES + 1)]),
    ((OUT,), [HELLO, wire.Cancel(ticket=Ticket(1))]),
    ((OUT,), [HELLO, UNPUBLISH]),
    ((OUT,), [HELLO, PUBLISH]),
    ((OUT,), [HELLO, PULL]),
    ((OUT,), [HELLO, ATTACH, ATTACH]),
    ((OUT,), [HELLO, ATTACH, PULL]),
    ((OUT,), [HELLO, ATTACH, wire.Prepare(OTHER)]),
    ((OUT,), [HELLO, ATTACH, wire.Ready(T1, INCARNATION)]),
    ((WRONG_FRAME,), [HELLO, encode_frame(b"\xc1")]),
    ((WRONG_FRAME,), [HELLO, encode_frame(b"")]),
    ((WRONG_FRAME,), [HELLO, ATTACH, *IDS]),
    ((OUT,), [HELLO, ATTACH, *IDS[:-1], LATER]),
    ((WRONG_FRAME,), [HELLO, ATTACH, *GROUPS]),
    ((OUT,), [HELLO, ATTACH, *GROUPS[:-1], LATER]),
    ((WRONG_FRAME,), [HELLO, ATTACH, replace(IDS[0], offset=4)]),
    ((WRONG_FRAME,), [HELLO, ATTACH, replace(IDS[0], group=LONG_NAME)]),
    ((WRONG_FRAME,), [HELLO, encode_frame(b"\x81\xa1t\xa4None")]),
    ((Code.FRAME_TOO_LARGE,), [HELLO, HEADER.pack(sizes.MAX_FRAME_BYTES + 1, 0, 0)]),
    ((Code.FRAME_TOO_LARGE,), [HEADER.pack(sizes.MAX_FRAME_BYTES, 0, 0)]),
    ((WRONG_FRAME,), [HELLO, HEADER.pack(8, sizes.MAX_FDS_PER_FRAME + 1, 0)]),
    ((WRONG_FRAME,), [HELLO, HEADER.pack(8, 0, 7)]),
    ((WRONG_FRAME,), [HELLO, HEADER.pack(1, 2, 0), b"\x80"]),
    ((OUT,), [HELLO, FdBatch(first=0)]),
]

# What a rank sends that has registered as SPEC with LAYOUT, and has written words.
OF_RANKS: Rows = [
    ((OUT,), [wire.MoverAcknowledged(number=9)]),
    ((OUT,), [ATTACH]),
    ((WRONG_FRAME,), [wire.DeliveredByMover(TICKETS * 64)]),
    ((WRONG_FRAME,), [wire.DeliveredByMover((*TICKETS, Ticket(1)))]),
    ((OUT,), [wire.DeliveredByMover(TICKETS), LATER]),
    ((WRONG_FRAME,), [wire.PullsResumed(1, (*TICKETS, Ticket(1)))]),
    ((WRONG_FRAME,), [wire.PullsResumed(1, (), (*TICKETS, Ticket(1)))]),
    ((OUT,), [wire.PullsResumed(1, TICKETS, TICKETS), LATER]),
    # reports
    ((WRONG_FRAME,), [wire.Ready(T1)]),
    ((WRONG_FRAME,), [wire.Ready(T1, INCARNATION, -2)]),
    ((TAKEN,), [PUBLISH, wire.Ready(T1, INCARNATION, 99), UNPUBLISH]),
    ((Code.RANK_LOST,), [PUBLISH, wire.Ready(T1, Incarnation("gone"))]),
    ((TAKEN,), [wire.Ready(T1, Incarnation("gone")), PUBLISH, UNPUBLISH]),
    # publishes
    ((TAKEN,), [PUBLISH, UNPUBLISH]),
    ((OUT,), [_publish(fence_slot=0)]),
    ((OUT,), [_publish(fence_slot=-1)]),
    ((OUT,), [_publish(fence_slot=sizes.FENCE_SLOTS)]),
    ((TAKEN,), [_publish(fence_slot=sizes.FENCE_SLOTS - 1), UNPUBLISH]),
    ((OUT,), [_publish(transfer_id="")]),
    ((OUT,), [_publish(transfer_id=LONG_NAME)]),
    ((TAKEN,), [_publish(transfer_id=NAME), wire.Unpublish(TransferId(NAME))]),
    ((WRONG_FRAME,), [_publish(nonce=LONG_NAME)]),
    ((Code.TRANSFER_EXISTS,), [PUBLISH, PUBLISH]),
    ((OUT,), [PUBLISH, _publish(transfer_id="t2")]),
    ((TAKEN, TAKEN), [PUBLISH, UNPUBLISH, _publish(transfer_id="t2"), wire.Unpublish(TransferId("t2"))]),
    ((TAKEN, Code.RELEASED), [PUBLISH, UNPUBLISH, PUBLISH]),
    ((TAKEN, Code.TRANSFER_EXISTS), [PUBLISH, UNPUBLISH, _publish(nonce="1" * 32)]),
    ((BAD,), [_publish(lease_s=-1.0)]),
    ((BAD,), [_publish(lease_s=math.nan)]),
    ((BAD,), [_publish(lease_s=Settings().max_lease_s + 1.0)]),
    ((TAKEN,), [_publish(lease_s=Settings().max_lease_s), UNPUBLISH]),
    ((Code.LEASE_EXPIRED,), [_publish(lease_s=0.5)]),
    ((Code.TRANSFER_NOT_READY,), [_publish(incarnations=())]),
    ((Code.RANK_LOST,), [_publish(incarnations=((Rank(0, 0), "gone"),))]),
    ((Code.RANK_INVALID,), [_publish(incarnations=PUBLISH.incarnations * 2)]),
    ((Code.RANK_INVALID,), [_publish(incarnations=((Rank(0, 0), LONG_NAME),))]),
    ((Code.TRANSFER_NOT_READY,), [_publish(incarnations=((Rank(0, 1), INCARNATION),))]),
    ((TAKEN,), [_publish(traceparent="none"), UNPUBLISH]),
    ((Code.SUSPENDED,), [PUBLISH, wire.Suspend()]),
    ((Code.RANK_LOST,), [wire.Suspend(), PUBLISH]),
    # what grows
    ((TAKEN,), [GROWING, UNPUBLISH]),
    ((TAKEN,), [GROWING, _add(_lists(0)), UNPUBLISH]),
    ((INVALID,), [GROWING, _add(_lists(0)), _add(_lists(1))]),
    ((INVALID,), [GROWING, _add({GroupName("none"): PackedBlocks(bytes(4))})]),
    ((INVALID,), [GROWING, _add(_lists(2))]),
    ((INVALID,), [PUBLISH, _add(_lists(1))]),
    ((TAKEN,), [PUBLISH, wire.Ready(TransferId("t2"), blocks=_lists(1)), UNPUBLISH]),
    ((TAKEN,), [GROWING_BY_ONE, _add(_lists(1, at=NUM_TOKENS)), UNPUBLISH]),
    ((TAKEN,), [GROWING_BY_ONE, _add(_lists(1)), UNPUBLISH]),
    ((INVALID,), [GROWING_BY_ONE, _add(_lists(1, at=1))]),
    ((INVALID,), [GROWING_BY_ONE, _add(_lists(0))]),
    ((INVALID,), [_publish(ready_tokens=-2)]),
    ((INVALID,), [_publish(ready_tokens=NUM_TOKENS + 1)]),
    ((TAKEN,), [_publish(ready_tokens=NUM_TOKENS), UNPUBLISH]),
    # ids in parts
    ((TAKEN,), [PART, IN_PARTS, UNPUBLISH]),
    ((TAKEN,), [PART, PART, IN_PARTS, UNPUBLISH]),
    ((INVALID,), [PART, replace(PART, offset=4), IN_PARTS]),
    ((INVALID,), [PART, _publish(stream=1)]),
    ((WRONG_FRAME,), [PART, _publish(blocks={}, stream=1)]),
    ((TAKEN,), [GROWING, PART, _add(EMPTY, stream=1), UNPUBLISH]),
    # pulls
    ((BAD,), [_pull(deadline_s=0.0)]),
    ((BAD,), [_pull(deadline_s=-1.0)]),
    ((BAD,), [_pull(deadline_s=math.nan)]),
    ((BAD,), [_pull(deadline_s=MAX_PULL_S + 1.0)]),
    ((Code.ENGINE_UNKNOWN,), [_pull(deadline_s=MAX_PULL_S)]),
    ((Code.ENGINE_UNKNOWN,), [_pull(ref=replace(OTHER, traceparent="none"))]),
    ((Code.ENDPOINT_INVALID,), [_pull(ref=replace(OTHER, endpoint="nowhere"))]),
    ((Code.NOT_ALLOWED,), [_pull(ref=REF)]),
    ((WRONG_FRAME,), [PULL, PULL]),
    ((Code.CANCELLED,), [PULL, wire.Cancel(Ticket(1))]),
    ((Code.CANCELLED,), [PULL, wire.Abandon(OTHER)]),
    ((Code.SUSPENDED,), [wire.Suspend(), PULL]),
    ((WRONG_FRAME,), [PART, _pull(blocks={}, stream=1)]),
    ((Code.ENGINE_UNKNOWN,), [PART, _pull(blocks=EMPTY, stream=1)]),
    # what is given up
    ((Code.ABANDONED,), [PUBLISH, wire.Abandon(REF)]),
    ((Code.ABANDONED,), [_publish(num_readers=0), wire.Abandon(REF)]),
    ((Code.LEASE_EXPIRED,), [_publish(lease_s=0.5, num_readers=2), wire.Abandon(REF)]),
    ((Code.LEASE_EXPIRED,), [_publish(lease_s=0.5), wire.Abandon(replace(REF, nonce="1" * 32))]),
    ((OUT,), [wire.Abandon(replace(REF, endpoint="nowhere")), LATER]),
    ((OUT,), [wire.Prepare(replace(REF, endpoint="nowhere")), LATER]),
    ((OUT,), [wire.Prepare(OTHER), wire.Prepare(OTHER), LATER]),
]
# Wrong lists, which publishes and pulls may both have, by how many tokens they are for.
for _code, _num, _blocks in (
    (INVALID, NUM_TOKENS, {}),
    (INVALID, NUM_TOKENS, {GroupName("none"): PackedBlocks(bytes(4))}),
    (INVALID, NUM_TOKENS, _lists(-1)),
    (INVALID, NUM_TOKENS, _lists(2)),
    (INVALID, NUM_TOKENS, _lists(0, 1)),
    (INVALID, NUM_TOKENS, _lists(0, at=-NUM_TOKENS)),
    (INVALID, NUM_TOKENS, _lists(0, at=NUM_TOKENS)),
    (INVALID, NUM_TOKENS, {GroupName("full"): PackedBlocks(bytes(3))}),
    (INVALID, NUM_TOKENS, {GroupName("full"): PackedBlocks(bytes(5))}),
    (INVALID, 0, EMPTY),
    (INVALID, -1, EMPTY),
    (INVALID, NUM_TOKENS + 1, _lists(0)),
    (INVALID, NUM_TOKENS + 1, _lists(1, 1)),
    (INVALID, MAX_TOKENS + 1, _lists(0, at=MAX_TOKENS // NUM_TOKENS * NUM_TOKENS)),
    (TAKEN, 1, _lists(0)),
    (TAKEN, NUM_TOKENS, _lists(1)),
    (TAKEN, NUM_TOKENS, _lists(0, at=1)),
    (TAKEN, NUM_TOKENS, EMPTY),
    (TAKEN, NUM_TOKENS + 1, _lists(1, 0)),
    (TAKEN, NUM_TOKENS + 1, _lists(0, at=NUM_TOKENS)),
):
    _fields: dict[str, Any] = {"num_tokens": _num, "blocks": _blocks}
    _is_taken = _code is TAKEN
    OF_RANKS.append(((_code,), [_publish(**_fields), *[UNPUBLISH] * _is_taken]))
    OF_RANKS.append(((Code.ENGINE_UNKNOWN if _is_taken else _code,), [_pull(**_fields)]))


def be_stranger(
    path: str,
    sent: list[Message | bytes],
    codes: tuple[Code, ...],
    number: int,
    brings_mover: bool,
    wait_s: float,
    has_failed: Callable[[End], None],
) -> list[object]:
    """Send this as a process that is no client, or as a rank; return what is heard, and what is not right.

    `number`: of the rank's generation, 0: it is no rank. `brings_mover`: before, one that has ended.
    `has_failed` is called with each end of a pull.
    """
    stranger, found, endpoint, generation = RawWorker(path, hello=bool(number)), [], "", f"g{number}"
    if number:
        with SealedMemory.create(REGION_BYTES) as memory:
            spec = replace(SPEC, generation=generation)
            if brings_mover:
                refused = stranger.bring_ended_mover(spec, LAYOUT, memory.fd)
                if getattr(refused, "code", None) is not Code.MOVER_LOST:
                    found.append(refused)
            registered = stranger.register(spec, LAYOUT, memory.fd, incarnation=INCARNATION)
        if not isinstance(registered, wire.Registered):
            return [registered]
        endpoint = registered.endpoint
        for slot in WITH_WORDS:
            os.pwrite(stranger.fds[-1], WORD, slot * len(WORD))
    for one in sent:
        if (ref := getattr(one, "ref", None)) is not None:
            ref = replace(ref, generation=generation, endpoint=ref.endpoint or endpoint)
            one = replace(one, ref=ref)  # noqa: PLW2901
        stranger.raw(one if isinstance(one, bytes) else frame(one))
    heard: Any = None
    for _ in codes:
        heard = stranger.await_one(HEARD, wait_s)
        found.append(heard and getattr(heard, "code", getattr(heard, "why", None)))
        if number and isinstance(heard, wire.TicketFailed):
            has_failed(End(T1, SPEC.engine_id, SPEC.rank, heard.code))
    is_over = isinstance(heard, wire.Farewell)
    if is_over and (stranger.next(wait_s) is not None or not stranger.ended):
        found.append("goes on")
    stranger.close()
    return found
