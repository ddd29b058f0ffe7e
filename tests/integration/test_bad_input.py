"""Bad input on both sockets: the sender gets a code and a sentence, everyone else goes on."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import pytest
import zmq

from kvxferd.errors import Code
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.layout.presets import attention_layout
from kvxferd.memory import SealedMemory
from kvxferd.wire import peer, worker
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.common import Versions
from kvxferd.wire.framing import HEADER
from kvxferd.wire.limits import MAX_FRAME_BYTES, MAX_PEER_MESSAGE_BYTES
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.rank_process import RankProcess
from tests.support.nodes.requests import publish, pull_and_check, spec_of
from tests.support.raw_worker import WAIT_S, RawWorker, frame


@pytest.fixture(scope="module")
def node(module_fleet: Fleet) -> Node:
    daemon = module_fleet.shared("node")
    source, sink = module_fleet.pair(daemon)
    return Node(daemon.worker_socket, daemon.endpoint, source, sink, module_fleet.generation())


@dataclass
class Node:
    """A daemon with an engine pair that must not notice anything."""

    socket: str
    endpoint: str
    source: RankProcess
    sink: RankProcess
    generation: str
    number: int = field(default=0)

    def still_works(self) -> None:
        self.number += 1
        pull_and_check([self.sink], publish([self.source], self.number), self.number)


@pytest.fixture(autouse=True)
def everyone_else_goes_on(node: Node) -> Iterator[None]:
    yield
    node.still_works()


@pytest.fixture
def raw(node: Node) -> Iterator[RawWorker]:
    connection = RawWorker(node.socket)
    yield connection
    connection.close()


# --- frames on the worker socket


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (HEADER.pack(MAX_FRAME_BYTES + 1, 0, 0), Code.FRAME_TOO_LARGE),
        (HEADER.pack(4, 0, 7) + b"abcd", Code.BAD_FRAME),  # not our header
        (HEADER.pack(4, 0, 0) + b"\xff\xff\xff\xff", Code.BAD_FRAME),  # no msgpack
        (HEADER.pack(1, 0, 0) + b"\x80", Code.BAD_FRAME),  # a map without a tag
        (HEADER.pack(9, 0, 0) + b"\x81\xa1t\xa5other", Code.BAD_FRAME),  # an unknown tag
        (HEADER.pack(1, 1, 0) + b"\x80", Code.BAD_FRAME),  # a descriptor that never came
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", Code.BAD_FRAME),
    ],
)
def test_a_bad_frame_costs_its_sender_the_connection(raw: RawWorker, content: bytes, code: Code):
    raw.raw(content)
    farewell = raw.await_one(worker.Farewell)
    assert farewell.code in (code, Code.FRAME_TOO_LARGE if content.startswith(b"GET") else code)
    assert farewell.message.startswith("cannot")


def test_a_truncated_frame_is_nobodys_matter(node: Node):
    for cut in (1, HEADER.size, HEADER.size + 3):
        connection = RawWorker(node.socket, hello=False)
        connection.raw(frame(worker.Hello(versions=worker.WORKER_VERSIONS, client="raw"))[:cut])
        connection.socket.shutdown(socket.SHUT_WR)
        farewell = connection.next()
        assert farewell is None or farewell.code is Code.BAD_FRAME
        assert connection.next() is None
        assert connection.ended
        connection.close()


def test_a_wrong_version_is_told_the_right_ones(node: Node):
    connection = RawWorker(node.socket, hello=False)
    farewell = connection.hello(Versions(40, 50))
    connection.close()
    assert isinstance(farewell, worker.Farewell)
    assert farewell.code is Code.BAD_VERSION
    assert "version 40 to 50" in farewell.message
    assert "upgrade the older" in farewell.message


# --- registrations


def layout_for(spec: EngineSpec) -> RankLayout:
    return attention_layout(
        spec=spec, num_kv_heads=8, head_dim=16, block_tokens=16, num_blocks=8, layout="HND"
    )


def read_only(fd: int) -> int:
    """The same memory, which this descriptor cannot write."""
    reopened = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.close(fd)
    return reopened


def memfd(size: int, sealed: bool) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda size: memfd(size, sealed=False), Code.REGION_UNSEALED),
        (lambda size: memfd(size - 1, sealed=True), Code.REGION_TOO_SMALL),
        (lambda size: os.open("/dev/null", os.O_RDWR), Code.REGION_INVALID),
        (lambda size: os.open("/dev/zero", os.O_RDWR), Code.REGION_INVALID),
        (lambda size: os.open("/", os.O_RDONLY), Code.REGION_INVALID),
        (lambda size: os.pipe()[0], Code.REGION_INVALID),
        (lambda size: read_only(memfd(size, sealed=True)), Code.REGION_INVALID),
    ],
    ids=["unsealed", "too small", "a device", "zeros", "a directory", "a pipe", "read-only"],
)
def test_memory_that_is_not_what_it_claims_is_refused_and_the_session_lives(raw: RawWorker, make, code):
    spec = spec_of("bad")
    layout = layout_for(spec)
    fd = make(layout.regions[0].size_bytes)
    refused = raw.register(spec, layout, fd)
    os.close(fd)
    assert isinstance(refused, worker.Refused)
    assert (refused.request, refused.code) == (1, code)
    with SealedMemory.create(layout.regions[0].size_bytes, "good") as memory:
        assert isinstance(raw.register(spec, layout, memory.fd), worker.Registered)


def test_strides_that_reach_outside_the_region_are_refused(raw: RawWorker):
    spec = spec_of("bad")
    layout = layout_for(spec)
    first = msgspec.structs.replace(layout.tensors[-1], block_stride=1 << 30)
    broken = msgspec.structs.replace(layout, tensors=(*layout.tensors[:-1], first))
    with SealedMemory.create(layout.regions[0].size_bytes, "good") as memory:
        refused = raw.register(spec, broken, memory.fd)
    assert refused.code is Code.LAYOUT_INVALID
    assert "layer" in refused.message


def test_descriptors_and_regions_that_do_not_match_are_refused(raw: RawWorker):
    spec = spec_of("bad")
    assert raw.register(spec, layout_for(spec)).code is Code.REGION_INVALID
    with SealedMemory.create(layout_for(spec).regions[0].size_bytes, "good") as memory:
        shifted = raw.register(spec, layout_for(spec), memory.fd, region={"fd_offset": 100})
    assert shifted.code is Code.REGION_TOO_SMALL


def test_a_taken_rank_is_refused(node: Node, raw: RawWorker):
    spec = msgspec.structs.replace(spec_of("prefill"), generation=node.generation)
    layout = layout_for(spec)
    with SealedMemory.create(layout.regions[0].size_bytes, "good") as memory:
        assert raw.register(spec, layout, memory.fd).code is Code.RANK_TAKEN


# --- pulls


def test_too_few_blocks_and_unknown_names_fail_the_pull_alone(node: Node):
    ref = publish([node.source], 900)
    good = list(range(32))
    for changed, ids, code in (
        (ref, good[:-1], "blocks-invalid"),
        (ref, [*good[:-1], good[0]], "blocks-invalid"),
        (ref | {"engine_id": "nobody"}, good, "engine-unknown"),
        (ref | {"transfer_id": "nothing"}, good, "transfer-unknown"),
        (ref | {"nonce": "0" * 32}, good, "nonce-wrong"),
        (ref | {"generation": "old"}, good, "generation-stale"),
    ):
        name, fields = node.sink.end_of(node.sink.pull(changed, ids, 500))
        assert (name, fields["code"], fields["safe_to_reuse"]) == ("Failed", code, True), fields
    node.source.unpublish(ref)


# --- the peer socket


@pytest.fixture
def dealer(node: Node) -> Iterator[zmq.Socket]:
    context = zmq.Context()
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
    made.connect(node.endpoint)
    yield made
    made.close(linger=0)
    context.term()


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x80", b"\x81\xa1t\xa5other", os.urandom(1000)])
def test_a_bad_peer_message_is_answered_and_nobody_else_notices(dealer, content):
    dealer.send(content)
    refused = PEER_MESSAGES.decode(dealer.recv())
    assert isinstance(refused, peer.PeerRefused)
    assert refused.code is Code.BAD_FRAME


def test_a_peer_message_of_several_parts_is_refused(dealer):
    dealer.send_multipart([b"a", b"b"])
    assert PEER_MESSAGES.decode(dealer.recv()).code is Code.BAD_FRAME


def test_an_oversized_peer_message_costs_its_sender_the_connection(node: Node, dealer):
    monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    monitor.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
    dealer.send(b"x" * (MAX_PEER_MESSAGE_BYTES + 1))
    assert monitor.recv_multipart()
    dealer.disable_monitor()


@pytest.mark.parametrize(
    "message",
    [
        peer.GrantsRenewed(request=1, ended=()),
        peer.StillWaiting(request=1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_an_answer_that_nobody_asked_for_changes_nothing(dealer, message):
    dealer.send(encode(message))
    assert PEER_MESSAGES.decode(dealer.recv()).code is Code.OUT_OF_PLACE
