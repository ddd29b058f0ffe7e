"""Frames of version 1 are understood as they were, and what is sent to version 1 is what it was."""

from __future__ import annotations

import msgspec
import pytest

from kvxferd.client.refs import TransferRef, read_ref
from kvxferd.errors import Code, EngineError, ProtocolError
from kvxferd.wire import peer, worker
from kvxferd.wire.codec import (
    CLIENT_MESSAGES,
    DAEMON_MESSAGES,
    PEER_MESSAGES,
    decode_first_frame,
    encode,
    refusal_of_undecodable,
)
from kvxferd.wire.common import Message, Versions
from kvxferd.wire.framing import FrameDecoder, encode_frame
from kvxferd.wire.limits import MAX_HELLO_BYTES, MAX_REF_BYTES
from kvxferd.wire.versions import VERSION_1_CODES, for_version_1
from tests.support import schema_0_1
from tests.support.frames_0_1 import Recorded, frames, references

SIDES = {
    "client": (CLIENT_MESSAGES.decode, schema_0_1.CLIENT.decode),
    "session": (CLIENT_MESSAGES.decode, schema_0_1.CLIENT.decode),
    "daemon": (DAEMON_MESSAGES.decode, schema_0_1.DAEMON.decode),
    "peer": (PEER_MESSAGES.decode, schema_0_1.PEER.decode),
}
RECORDED = [pytest.param(s, r, id=f"{s}: {r.name}") for s in SIDES for r in frames(s)]


@pytest.mark.parametrize(("side", "recorded"), RECORDED)
def test_a_frame_of_version_1_says_what_it_said(side: str, recorded: Recorded) -> None:
    (frame,) = FrameDecoder().feed(recorded.frame, fds=range(recorded.num_fds))
    decode, decode_0_1 = SIDES[side]
    message, then = decode(frame.payload), decode_0_1(frame.payload)
    assert msgspec.to_builtins(then, builtin_types=(bytes,)) == _with_bytes(recorded.fields, then)
    now = msgspec.to_builtins(message, builtin_types=(bytes,))
    assert now == msgspec.to_builtins(then, builtin_types=(bytes,))
    # Fields that came later have defaults, which are left out: so 0.1 takes it, byte for byte.
    assert encode_frame(encode(message), recorded.num_fds) == recorded.frame


def _with_bytes(fields: dict, like: object) -> dict:
    """The recorded fields, in which JSON holds bytes as base64."""
    read = msgspec.convert(fields, type(like), builtin_types=())
    return msgspec.to_builtins(read, builtin_types=(bytes,))


def test_every_message_of_version_1_is_recorded() -> None:
    for side, union in (
        ("client", schema_0_1.ClientMessage),
        ("daemon", schema_0_1.DaemonMessage),
        ("peer", schema_0_1.PeerMessage),
    ):
        assert {r.name for r in frames(side) if "," not in r.name} == {
            kind.__struct_config__.tag for kind in union.__args__
        }


@pytest.mark.parametrize("text", references())
def test_a_reference_of_version_1_is_read_and_written_as_it_was(text: str) -> None:
    read = read_ref(text)
    assert isinstance(read, TransferRef)
    assert read.to_json() == text
    assert schema_0_1.REFERENCE.decode(text) == schema_0_1.REFERENCE.decode(read.to_json())


# --- what is newer than this side


def test_unknown_fields_of_hello_greet_and_a_reference_are_ignored() -> None:
    hello = _with(worker.Hello(versions=Versions(1, 9), client="future", notices=True), colour="blue")
    assert decode_first_frame(hello) == (
        worker.Hello(versions=Versions(1, 9), client="future", notices=True),
        5,
    )
    greet = peer.PeerHello(request=3, versions=Versions(1, 9), boot="b", endpoint="tcp://x:1")
    assert PEER_MESSAGES.decode(_with(greet, colour="blue")) == greet
    reference = msgspec.json.decode(references()[0]) | {"colour": {"shade": 3}}
    for form in (reference, msgspec.json.encode(reference), msgspec.json.encode(reference).decode()):
        assert read_ref(form).to_json() == references()[0]
    prepare = {"t": "prepare", "ref": reference}
    taken = CLIENT_MESSAGES.decode(msgspec.msgpack.encode(prepare)).ref
    assert msgspec.structs.asdict(taken) == msgspec.structs.asdict(read_ref(references()[0]))


def test_what_is_ignored_has_a_limit() -> None:
    hello = _with(worker.Hello(versions=Versions(1, 9), client="future"), colour="b" * MAX_HELLO_BYTES)
    with pytest.raises(ProtocolError) as refused:
        decode_first_frame(hello)
    assert refused.value.code is Code.FRAME_TOO_LARGE
    reference = msgspec.json.decode(references()[0]) | {"colour": "b" * MAX_REF_BYTES}
    for form in (msgspec.json.encode(reference), msgspec.json.encode(reference).decode()):
        with pytest.raises(EngineError, match="bytes"):
            read_ref(form)


def test_a_hello_of_another_shape_is_told_the_versions() -> None:
    future = {"t": "hello", "versions": [7, 9, "and more"], "client": {"name": "x"}, "notices": 3}
    with pytest.raises(ProtocolError, match="upgrade the older") as refused:
        decode_first_frame(msgspec.msgpack.encode(future))
    assert refused.value.code is Code.BAD_VERSION


def test_a_greet_of_another_shape_is_told_the_versions() -> None:
    payload = msgspec.msgpack.encode({"t": "greet", "request": 4, "versions": [7, 9], "boot": 3})
    with pytest.raises(ProtocolError) as error:
        PEER_MESSAGES.decode(payload)
    refused = refusal_of_undecodable(payload, error.value)
    assert (refused.request, refused.code) == (4, Code.BAD_VERSION)
    assert refusal_of_undecodable(b"\xc1", error.value).code is Code.BAD_FRAME


def _with(message: Message, **more: object) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.decode(encode(message)) | more)


def test_version_1_gets_no_code_that_it_does_not_know() -> None:
    known = {str(code) for code in schema_0_1.Code}
    assert {code for code in Code if str(code) not in known} == VERSION_1_CODES.keys()
    for code in Code:
        for message in (
            worker.Farewell(code=code, message="m"),
            worker.Released(transfer_id="t", why=code),
        ):
            schema_0_1.DAEMON.decode(encode(for_version_1(message)))
