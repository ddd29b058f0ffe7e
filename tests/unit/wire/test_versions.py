"""Hello of another version, whatever its other fields are, is refused with the versions of this side."""

from __future__ import annotations

import msgspec
import pytest

from kvxferd.client import TransferRef, make_ref
from kvxferd.errors import Code, EngineError, ProtocolError
from kvxferd.wire import peer, worker
from kvxferd.wire.codec import (
    CLIENT_MESSAGES,
    PEER_MESSAGES,
    decode_first_frame,
    encode,
    negotiate_version,
    refusal_of_undecodable,
)
from kvxferd.wire.common import Message, Versions
from kvxferd.wire.limits import MAX_HELLO_BYTES, MAX_REF_BYTES

HELLO = worker.Hello(versions=Versions(1, 9), client="future")
REF = make_ref("tcp://x:1", "e", "g", "t")


@pytest.mark.parametrize(
    ("theirs", "chosen"),
    [(Versions(1, 3), 3), (Versions(2, 9), 4), (Versions(4, 4), 4)],
)
def test_the_newest_version_of_both_is_chosen(theirs: Versions, chosen: int) -> None:
    assert negotiate_version(Versions(3, 4), theirs) == chosen


@pytest.mark.parametrize(
    ("theirs", "text"), [(Versions(5, 9), "version 5 to 9"), (Versions(2, 2), "version 2:")]
)
def test_sides_that_share_none_refuse_each_other(theirs: Versions, text: str) -> None:
    with pytest.raises(ProtocolError, match=f"{text}.* this one speaks 3 to 4; upgrade the older") as refused:
        negotiate_version(Versions(3, 4), theirs)
    assert refused.value.code is Code.BAD_VERSION


def test_unknown_fields_of_hello_and_of_a_reference_are_ignored() -> None:
    assert decode_first_frame(_with(HELLO, colour="blue")) == HELLO
    hello = peer.PeerHello(request=3, versions=Versions(1, 9), boot="b", endpoint="tcp://x:1")
    assert PEER_MESSAGES.decode(_with(hello, colour="blue")) == hello
    reference = REF.to_dict() | {"colour": {"shade": 3}}
    for form in (reference, msgspec.json.encode(reference), msgspec.json.encode(reference).decode()):
        assert TransferRef.parse(form).to_dict() == REF.to_dict()
    prepare = {"t": "Prepare", "ref": reference}
    assert msgspec.to_builtins(CLIENT_MESSAGES.decode(msgspec.msgpack.encode(prepare)).ref) == REF.to_dict()


def test_what_is_ignored_has_a_limit() -> None:
    with pytest.raises(ProtocolError) as refused:
        decode_first_frame(_with(HELLO, colour="b" * MAX_HELLO_BYTES))
    assert refused.value.code is Code.FRAME_TOO_LARGE
    reference = REF.to_dict() | {"colour": "b" * MAX_REF_BYTES}
    for form in (msgspec.json.encode(reference), msgspec.json.encode(reference).decode()):
        with pytest.raises(EngineError, match="bytes"):
            TransferRef.parse(form)


def test_a_hello_of_another_shape_is_told_the_versions() -> None:
    future = {"t": "Hello", "versions": [7, 9, "and more"], "client": {"name": "x"}, "notices": 3}
    with pytest.raises(ProtocolError, match="upgrade the older") as refused:
        decode_first_frame(msgspec.msgpack.encode(future))
    assert refused.value.code is Code.BAD_VERSION


def test_a_peers_hello_of_another_shape_is_told_the_versions() -> None:
    payload = msgspec.msgpack.encode({"t": "PeerHello", "request": 4, "versions": [7, 9], "boot": 3})
    with pytest.raises(ProtocolError) as error:
        PEER_MESSAGES.decode(payload)
    refused = refusal_of_undecodable(payload, error.value)
    assert (refused.request, refused.code) == (4, Code.BAD_VERSION)
    assert refusal_of_undecodable(b"\xc1", error.value).code is Code.BAD_FRAME


def _with(message: Message, **more: object) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.decode(encode(message)) | more)
