"""docs/reference/protocol.md says what the code does: messages, fields, limits, codes and the example."""

from __future__ import annotations

import re
from typing import get_args

import msgspec
import pytest

from kvxferd.errors import Code
from kvxferd.layout import unpack_ids
from kvxferd.wire import limits, peer, worker
from kvxferd.wire.codec import CLIENT_MESSAGES, encode
from kvxferd.wire.common import BlockIds, FdBatch
from kvxferd.wire.framing import HEADER, FrameDecoder, encode_frame
from tests.support.protocol_document import (
    PATH,
    actual_fields,
    documented_fields,
    hex_examples,
    rows,
    sections,
    structs_inside,
)

SECTIONS = sections()
UNIONS = {
    "Client to daemon": get_args(worker.ClientMessage),
    "Daemon to client": get_args(worker.DaemonMessage),
}
MESSAGES = sorted({message for union in UNIONS.values() for message in union}, key=lambda m: m.__name__)
STRUCTS = sorted(
    {struct for message in MESSAGES for struct in structs_inside(message)}, key=lambda s: s.__name__
)
# The messages whose frames carry descriptors.
WITH_DESCRIPTORS = {
    FdBatch,
    worker.Register,
    worker.Resume,
    worker.NewMover,
    worker.Registered,
    worker.MoverOffered,
}
# Limits of what only daemons send to each other and to their movers.
OF_DAEMONS = {
    *("MAX_ADDRESS", "MAX_DEVICES", "MAX_METADATA_BYTES", "MAX_ENGINE_TENSORS", "MAX_GRANTS_PER_RENEWAL"),
    *("MAX_PEER_MESSAGE_BYTES", "MAX_PEER_REQUEST_BYTES", "MAX_SENTENCE_CHARS", "MAX_REASON_CHARS"),
    "CHUNK_BYTES",
    "MAX_CHUNKS_PER_MOVER",
}


@pytest.mark.parametrize("heading", UNIONS)
def test_messages_are_described_field_by_field_where_they_belong(heading: str) -> None:
    order = list(SECTIONS)
    after = order[order.index(heading) + 1 :]
    own = [message for message in UNIONS[heading] if message not in (BlockIds, FdBatch)]
    assert after[: len(own)] == [tag_of(message) for message in own]
    for message in UNIONS[heading]:
        section = SECTIONS[tag_of(message)]
        assert documented_fields(section) == actual_fields(message), message
        carries = "**Carries" in section or "**carries" in section
        assert carries == (message in WITH_DESCRIPTORS), message


def tag_of(message: type[msgspec.Struct]) -> str:
    return str(message.__struct_config__.tag)


def test_every_struct_is_described_field_by_field() -> None:
    for struct in STRUCTS:
        section = SECTIONS[struct.__name__]
        assert documented_fields(section) == actual_fields(struct), struct
        assert ("An array." in section) == struct.__struct_config__.array_like, struct


def test_requests_of_daemons_and_their_replies_are_named() -> None:
    table = rows(SECTIONS["Requests and replies"])
    assert sorted(row[0] for row in table) == sorted(map(tag_of, get_args(peer.RequestMessage)))
    named = {row[1] for row in table} | {"PeerRefused", "StillWaiting"}
    assert named == {tag_of(message) for message in get_args(peer.ReplyMessage)}


def test_limits() -> None:
    documented = {row[0]: int(row[1]) for row in rows(SECTIONS["Limits"])}
    names = {name for name in dir(limits) if name.isupper()} - OF_DAEMONS
    assert documented == {name: getattr(limits, name) for name in names}


def test_codes() -> None:
    page = PATH.with_name("codes.md").read_text().partition("\n## Exceptions\n")[0]
    assert re.findall(r"^\| `([a-z-]+)` \| \w", page, re.MULTILINE) == [str(code) for code in Code]


def test_the_example_is_what_the_encoder_writes() -> None:
    (raw_publish,) = hex_examples(SECTIONS["Worked example"])
    (publish_frame,) = FrameDecoder().feed(raw_publish)
    publish = CLIENT_MESSAGES.decode(publish_frame.payload)
    assert isinstance(publish, worker.Publish)
    assert list(unpack_ids(publish.blocks["full"].ids)) == [7, 260]
    assert (publish.num_tokens, publish.fence_slot, publish.num_readers) == (32, 0, 1)
    assert encode_frame(encode(publish)) == raw_publish


def test_the_frame_header_is_as_drawn() -> None:
    assert [row[0] for row in rows(SECTIONS["Frame"])] == ["0 to 3", "4 to 5", "6 to 7", "8 on"]
    assert HEADER.format == "<IHH"


def test_versions() -> None:
    (version,) = {worker.WORKER_VERSIONS, peer.PEER_VERSIONS}
    assert f"each in one version ({version})" in SECTIONS["Protocols"]
