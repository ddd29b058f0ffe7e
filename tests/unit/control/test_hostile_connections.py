"""What whoever reaches the peer socket can make it hold, and do: real ZMQ, and bare TCP spoken by hand."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import msgspec
import pytest
import structlog.testing
import zmq
import zmq.asyncio

from kvxferd.control import connection_guard, peer_inbox
from kvxferd.control.connection_guard import MAX_HANDSHAKE_BYTES
from kvxferd.control.curve_keys import make_key
from kvxferd.control.unread_replies import UnreadReplies
from kvxferd.control.watched_socket import WatchedSocket
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.limits import MAX_PEER_REQUEST_BYTES
from kvxferd.wire.peer import ManifestReply, RequestDone
from tests.support.peer_socket_harness import HELLO, ListeningPeer, join_of

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
CURVE = GREETING + b"CURVE".ljust(20, b"\0") + bytes(32)
NULL = GREETING + b"NULL".ljust(20, b"\0") + bytes(32)


def part_of(body: bytes, *, is_last: bool = False) -> bytes:
    """Return a frame of ZMTP."""
    return bytes([2 | (not is_last)]) + len(body).to_bytes(8) + body


@pytest.fixture
async def node(start_peer) -> ListeningPeer:
    return start_peer()


@pytest.fixture
async def keyed(start_peer, tmp_path: Path) -> ListeningPeer:
    return start_peer(key=make_key(tmp_path / "key"))


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


def dealer_to(context: zmq.asyncio.Context, node: ListeningPeer) -> zmq.asyncio.Socket:
    made = context.socket(zmq.DEALER)
    if node.key is not None:
        public = bytes.fromhex(node.key.public)
        made.curve_serverkey, made.curve_publickey, made.curve_secretkey = public, public, node.key.secret
    made.connect(node.address)
    return made


def tcp_to(node: ListeningPeer, first: bytes = b"") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", node.port))
    made.setblocking(False)
    if first:
        made.sendall(first)
    return made


async def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 15
    while not holds():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


async def is_ended(connection: socket.socket) -> bool:
    """Whether the other end closes the connection, which is read until then."""
    loop = asyncio.get_running_loop()
    with connection:
        try:
            while await asyncio.wait_for(loop.sock_recv(connection, 4096), 15):
                pass
        except ConnectionError:
            return True
        except TimeoutError:
            return False
    return True


# --- before admission


async def test_what_nobody_has_been_admitted_for_is_not_kept(keyed, context):
    """A handshake's command may be as long as any message, and libzmq takes all of it first."""
    before = resident_mib()
    frame = b"\x06" + (MAX_PEER_REQUEST_BYTES - 100).to_bytes(8, "big")
    # How fast somebody sends says nothing: who has sent more than a handshake needs is ended, however slowly.
    strangers = [tcp_to(keyed, CURVE + frame + bytes(8 * MAX_HANDSHAKE_BYTES)) for _ in range(48)]
    assert all(await asyncio.gather(*map(is_ended, strangers)))
    assert resident_mib() - before < 100
    honest = dealer_to(context, keyed)
    await honest.send(encode(HELLO))
    assert (await keyed.next()).message == HELLO


async def test_half_open_connections_keep_no_honest_one_out(keyed, context):
    strangers = [tcp_to(keyed, CURVE[: 10 * (n % 2)]) for n in range(300)]
    try:
        guard = keyed.socket._guard
        assert guard is not None
        honest = dealer_to(context, keyed)
        await honest.send(encode(HELLO))
        assert (await keyed.next()).message == HELLO
        await until(lambda: len(guard._connections) <= connection_guard.MAX_UNFINISHED + 1, "they stay")
    finally:
        for stranger in strangers:
            stranger.close()
    await until(lambda: len(guard._connections) == 1, "they are counted for ever")


async def test_one_address_has_so_many_connections_and_no_more(start_peer, monkeypatch):
    monkeypatch.setattr(connection_guard, "MAX_PER_ADDRESS", 4)
    monkeypatch.setitem(connection_guard.ConnectionGuard.__init__.__kwdefaults__, "max_per_address", 4)
    node = start_peer()
    strangers = [asyncio.create_task(is_ended(tcp_to(node, NULL))) for _ in range(12)]
    try:
        for ended in islice(asyncio.as_completed(strangers, timeout=15), 8):
            assert await ended
        await until(lambda: len(node.socket._guard._connections) == 4, "those that were cut are counted on")
    finally:
        for stranger in strangers:
            stranger.cancel()


async def test_a_number_that_is_no_connection_by_now_costs_no_descriptor(node, tmp_path):
    """The monitor names a descriptor that libzmq may have closed, and whose number a file may have since."""
    guard = node.socket._guard
    with (tmp_path / "file").open("wb") as file:
        gc.collect()  # what earlier tests dropped is closed now, not between two counts
        before = os.listdir("/proc/self/fd")
        assert guard._duplicate(file.fileno()) is None
        assert os.listdir("/proc/self/fd") == before


async def test_who_comes_while_no_descriptor_is_free_is_watched_once_one_is(node, context, monkeypatch):
    guard, dup, is_free = node.socket._guard, os.dup, False

    def dup_if_free(fd: int) -> int:
        if not is_free:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return dup(fd)

    monkeypatch.setattr(os, "dup", dup_if_free)
    with tcp_to(node, NULL):
        await until(lambda: guard._untracked, "it is not kept in mind")
        is_free = True
        await until(lambda: guard._connections and not guard._untracked, "it is never looked at")


# --- who sends


def command(name: bytes, properties: dict[bytes, bytes]) -> bytes:
    body = bytes([len(name)]) + name
    for key, value in properties.items():
        body += bytes([len(key)]) + key + len(value).to_bytes(4, "big") + value
    return b"\x04" + bytes([len(body)]) + body


async def speaking(node: ListeningPeer, properties: dict[bytes, bytes], payload: bytes) -> socket.socket:
    """A connection without CURVE, spoken by hand, with one message sent.

    The message follows the node's READY, as libzmq's own does: until the admission is answered (one turn of
    the loop) libzmq 4.3.5 takes any message for a second READY, and closes the connection.
    """
    made, loop = tcp_to(node, NULL), asyncio.get_running_loop()
    made.sendall(command(b"READY", {b"Socket-Type": b"DEALER"} | properties))
    received = b""
    while len(received) < 66 or len(received) < 66 + received[65]:  # its greeting, and one short command
        came = await asyncio.wait_for(loop.sock_recv(made, 4096), 10)
        assert came, received
        received += came
    assert received[66:].startswith(b"\x05READY")
    made.sendall(b"\x00" + bytes([len(payload)]) + payload)
    return made


async def test_an_admission_that_takes_long_loses_no_message(node, context):
    """libzmq sends nothing before it is admitted: a busy loop only delays a peer."""
    admit, requests = node.socket._on_zap_request, []
    node.socket._zap_socket.on_message = lambda *request: requests.append(request)
    honest = dealer_to(context, node)
    await honest.send(encode(HELLO))
    await until(lambda: requests, "it is not asked for")
    node.socket._zap_socket.on_message = admit
    admit(*requests[0])
    assert (await node.next()).message == HELLO


async def test_without_curve_nobody_has_a_key_whatever_they_say(node):
    with await speaking(node, {b"User-Id": b"0a" * 32}, encode(HELLO)):
        event = await node.next()
        assert (event.message, event.key) == (HELLO, "")


async def send_for_ever(connection: socket.socket, payload: bytes) -> None:
    """Send until the other side has closed it, with time for others between."""
    with suppress(ConnectionError):
        while True:
            await asyncio.get_running_loop().sock_sendall(connection, payload)
            await asyncio.sleep(0.002)


async def test_a_message_without_end_is_not_kept(node, context):
    """libzmq bounds its parts, not their number: it would keep them until the daemon has no memory left."""
    honest = dealer_to(context, node)
    with await speaking(node, {b"Socket-Type": b"DEALER"}, b"") as greedy:
        await until(lambda: node.socket._guard._next_check_ms() is None, "it looks though nothing comes")
        flood = asyncio.create_task(send_for_ever(greedy, part_of(b"") * 7_000))
        try:
            # A sender may not be told: a full window only stays full.
            assert await is_ended(greedy)
        finally:
            flood.cancel()
            await asyncio.gather(flood, return_exceptions=True)
    await honest.send(encode(HELLO))
    assert (await node.next()).message == HELLO


async def test_what_a_busy_loop_has_not_read_yet_shuts_nobody_out(node, context, monkeypatch):
    """Whole messages that wait are none without an end, nor is a large one that comes slowly."""
    monkeypatch.setattr(connection_guard, "OPEN_CHECK_S", 0.01)
    monkeypatch.setattr(connection_guard, "MAX_INCOMPLETE_BYTES", 20_000)
    honest = dealer_to(context, node)
    await honest.send(encode(HELLO))
    assert (await node.next()).message == HELLO
    await until(lambda: node.socket._guard._connections, "the guard knows of it")
    before = list(node.socket._guard._connections.values())
    padded = encode(HELLO) + b"\xc0" * 10_000  # refused by its decoder, on the connection that stays
    for _ in range(5):
        for _ in range(10):
            await honest.send(padded)
        await asyncio.sleep(0)
        time.sleep(0.1)  # noqa: ASYNC251 - the loop is busy
        await honest.send(encode(HELLO))
        assert (await node.next()).message == HELLO
    assert list(map(id, node.socket._guard._connections.values())) == list(map(id, before))


async def test_a_message_of_many_parts_holds_no_loop(node, context, monkeypatch):
    honest = dealer_to(context, node)
    loop, num_turns, turns, skip = asyncio.get_running_loop(), 0, [], WatchedSocket._skip_parts

    def tick() -> None:
        nonlocal num_turns
        num_turns += 1
        loop.call_soon(tick)

    def skip_counted(watched: WatchedSocket) -> bool:
        turns.append(num_turns)
        return skip(watched)

    monkeypatch.setattr(WatchedSocket, "_skip_parts", skip_counted)
    # Else the parts are read for 20 ms of one turn of the loop.
    monkeypatch.setattr("kvxferd.control.turns.LOOP_TURN_S", 1e-6)
    tick()
    with await speaking(node, {b"Socket-Type": b"DEALER"}, b"") as greedy:
        parts = part_of(b"") * 20_000 + part_of(b"", is_last=True)
        await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(greedy, parts), 20)
        await until(lambda: len(turns) >= 20, "all of it was read")
        # In one turn the rest's own call may come, and one because more has arrived.
        assert max(Counter(turns).values()) <= 2, "other work runs between"
    await honest.send(encode(HELLO))
    assert (await node.next()).message == HELLO
    assert not node.socket._router._is_skipping


async def test_who_names_its_own_connection_is_not_listened_to(node):
    """A name that was another's route would bring it the answers to that one."""
    with await speaking(node, {b"Identity": b"anybody"}, encode(HELLO)) as stranger:
        received = b""
        while b"PeerRefused" not in received:
            came = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(stranger, 4096), 10)
            assert came, received
            received += came
        assert node.received.empty()
    unread = UnreadReplies()
    assert unread.claim_route(b"\0abcd", "a")
    assert not unread.claim_route(b"\0abcd", "b")
    assert unread.claim_route(b"\0abcd", "a")


async def test_a_message_that_cannot_be_taken_keeps_no_other_unread(node, context, monkeypatch):
    """Both lie in the socket when it is read. A defect of ours must not become everybody's silence."""
    took = peer_inbox.PeerInbox.handle

    def take(self, sender, payload):
        if payload == b"defect":
            raise RuntimeError("a defect")
        took(self, sender, payload)

    monkeypatch.setattr(peer_inbox.PeerInbox, "handle", take)
    sender = dealer_to(context, node)
    with structlog.testing.capture_logs() as logged:  # a traceback takes half a second to draw
        for _ in range(20):
            await sender.send(b"defect")
            await sender.send(b"defect")
            await sender.send(encode(HELLO))
        for _ in range(20):
            assert (await node.next()).message == HELLO
    assert [line["event"] for line in logged] == ["peer message failed"] * 40


# --- answers


MAX_UNREAD_BYTES = 8 << 20


def reply_large(node: ListeningPeer, route: bytes, num_replies: int) -> None:
    """Send answers of 2 MB each, which are made once."""
    ranks = (join_of(num_layers=4000).manifest,) * 2
    large = ManifestReply(request=1, boot="b", ranks=ranks, num_ranks=2)
    for request in range(num_replies):
        node.socket.reply(route, msgspec.structs.replace(large, request=request))


async def route_of(node: ListeningPeer, dealer: zmq.asyncio.Socket) -> bytes:
    await dealer.send(encode(HELLO))
    return (await node.next()).route


@pytest.fixture
async def slow(node, context) -> zmq.asyncio.Socket:
    """A peer that takes one message, and no more until it is read. The node keeps 8 MiB for it."""
    node.socket._unread_replies = UnreadReplies(MAX_UNREAD_BYTES)
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.RCVHWM, 1)
    made.connect(node.address)
    return made


async def test_answers_that_nobody_reads_do_not_pile_up(node, context, slow):
    other = dealer_to(context, node)
    route, before = await route_of(node, slow), resident_mib()
    reply_large(node, route, 200)
    assert node.socket._unread_replies._share.held <= MAX_UNREAD_BYTES
    assert resident_mib() - before < 100  # of 400
    back = await route_of(node, other)
    node.socket.reply(back, RequestDone(request=9))
    assert PEER_MESSAGES.decode(await asyncio.wait_for(other.recv(), 10)) == RequestDone(request=9)


async def test_a_slow_reader_has_its_answer_once_it_has_read_the_last(node, slow):
    unread, route = node.socket._unread_replies, await route_of(node, slow)
    reply_large(node, route, 50)
    read: list[int] = []

    async def read_on() -> None:
        while True:
            read.append(PEER_MESSAGES.decode(await slow.recv()).request)

    assert not unread.has_room(route, MAX_UNREAD_BYTES)
    reading = asyncio.create_task(read_on())
    try:
        # libzmq says that a message is written after its reader may have read it, from another thread.
        await until(lambda: unread.has_room(route, MAX_UNREAD_BYTES), "no room, and all is read")
        node.socket.reply(route, RequestDone(request=99))
        await until(lambda: 99 in read, "the answer has not come")
    finally:
        reading.cancel()
    assert 1 < len(read) < 50
