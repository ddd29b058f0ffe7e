"""Bad input on both sockets: the sender gets a code and a sentence, everyone else goes on."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import zmq

from kvxferd.errors import Code
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.layout.presets import attention_layout
from kvxferd.memory import SealedMemory
from kvxferd.wire import peer, worker
from kvxferd.wire.codec import encode
from kvxferd.wire.framing import HEADER
from kvxferd.wire.limits import MAX_PEER_MESSAGE_BYTES
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.rank_process import RankProcess
from tests.support.nodes.requests import publish, pull_and_check, spec_of
from tests.support.raw_peer import PeerByHand
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
    ("content", "codes"),
    [
        (HEADER.pack(9, 0, 0) + b"\x81\xa1t\xa5other", [Code.BAD_FRAME]),  # an unknown tag
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", [Code.BAD_FRAME, Code.FRAME_TOO_LARGE]),
    ],
)
def test_a_bad_frame_costs_its_sender_the_connection(raw: RawWorker, content: bytes, codes: list[Code]):
    raw.raw(content)
    farewell = raw.await_one(worker.Farewell)
    assert farewell.code in codes
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


# --- registrations


def layout_for(spec: EngineSpec) -> RankLayout:
    return attention_layout(
        spec=spec, num_kv_heads=8, head_dim=16, block_tokens=16, num_blocks=8, layout="HND"
    )


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
        (lambda size: os.open("/dev/zero", os.O_RDWR), Code.REGION_INVALID),
    ],
    ids=["unsealed", "too small", "a device"],
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


def test_descriptors_and_regions_that_do_not_match_are_refused(raw: RawWorker):
    spec = spec_of("bad")
    assert raw.register(spec, layout_for(spec)).code is Code.REGION_INVALID
    with SealedMemory.create(layout_for(spec).regions[0].size_bytes, "good") as memory:
        shifted = raw.register(spec, layout_for(spec), memory.fd, region={"fd_offset": 100})
    assert shifted.code is Code.REGION_TOO_SMALL


# --- the peer socket


@pytest.fixture
def bare(node: Node) -> Iterator[PeerByHand]:
    made = PeerByHand(node.endpoint, None, greet=False)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([b"\x81\xa1t\xa5other"], Code.BAD_FRAME),  # an unknown tag
        ([b"a", b"b"], Code.BAD_FRAME),
        ([encode(peer.GrantsRenewed(request=1, ended=()))], Code.OUT_OF_PLACE),  # nobody asked for it
    ],
)
def test_a_bad_peer_message_is_answered_and_nobody_else_notices(
    bare: PeerByHand, parts: list[bytes], code: Code
) -> None:
    bare.socket.send_multipart(parts)
    refused = bare.next()
    assert isinstance(refused, peer.PeerRefused)
    assert refused.code is code


def test_an_oversized_peer_message_costs_its_sender_the_connection(bare: PeerByHand):
    monitor = bare.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    bare.socket.send(b"x" * (MAX_PEER_MESSAGE_BYTES + 1))
    assert monitor.poll(int(WAIT_S * 1000))
    bare.socket.disable_monitor()
